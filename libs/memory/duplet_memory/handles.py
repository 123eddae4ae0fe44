"""GPU memory that one process owns and another maps: one interface over three kinds of handle.

| kind | travels as | notes |
|---|---|---|
| `cumem-fd` | a descriptor beside the message | first choice: no shared PID namespace needed |
| `cuda-ipc` | 64 bytes | plain `cudaMalloc` memory; needs one mapping a device |
| `cumem-fabric` | 64 bytes | needs an IMEX channel; used only where making one works |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from duplet_core.errors import require
from duplet_memory.cuda_driver import Device
from duplet_memory.handle_cumem import allocate_cumem, import_cumem
from duplet_memory.handle_ipc import allocate_ipc, import_ipc
from duplet_memory.layout import HandleKind

GPU_HANDLES: tuple[HandleKind, ...] = ("cumem-fd", "cuda-ipc", "cumem-fabric")
"""In the order in which an owner prefers them."""


class Allocation(Protocol):
    """The owner's end. Owns the memory and `fd` until `close`, which gives both back; memory
    that an importer has mapped stays until that importer closes too."""

    address: int
    """Of the first byte, in the owner's context."""
    size: int
    """Bytes; the wanted number rounded up to what the GPU allocates in."""
    fd: int
    """-1 where the handle is no descriptor."""
    token: str

    def close(self) -> None: ...


class Mapping(Protocol):
    """The importer's end. Owns the mapping until `close`."""

    def address(self, device: Device) -> int:
        """Of the first byte, as kernels on `device` reach it."""
        ...

    def close(self) -> None: ...


def allocate(kind: HandleKind, device: Device, size: int) -> Allocation:
    """Allocate `size` bytes on `device` with a handle of this kind. The caller owns it.

    Raises:
        CudaError: memory or handle were refused; nothing stays behind.
    """
    require(kind in GPU_HANDLES, f"{kind} is no GPU handle")
    if kind == "cuda-ipc":
        return allocate_ipc(device, size)
    return allocate_cumem(kind, device, size)


def import_handle(
    kind: HandleKind, owner: Device, reach: Sequence[Device], size: int, fd: int, token: str
) -> Mapping:
    """Map an allocation on `owner` for every device in `reach`. `fd` is borrowed.

    Raises:
        CudaError: the handle is stale, foreign or too small, or a device cannot reach it;
            nothing stays mapped.
    """
    require(kind in GPU_HANDLES, f"{kind} is no GPU handle")
    if kind == "cuda-ipc":
        return import_ipc(reach, size, token)
    return import_cumem(kind, owner, reach, size, fd, token)
