"""KV pools in GPU memory: made by their owner, mapped by kvproxy.

As with CPU pools, the importer reads the header back through its own mapping: only then is it
proven that this handle, at this offset, is that pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from duplet_core.errors import InvalidInput, Reason, require
from duplet_memory.cuda_driver import CudaError, Device, call, find_device
from duplet_memory.handles import GPU_HANDLES, Allocation, Mapping, allocate, import_handle
from duplet_memory.layout import HandleKind, PoolDescription
from duplet_memory.pool import HEADER, check_header, pack_header


class CudaPool:
    """A pool in its owner's process. Owns the allocation until `close`.

    Lends its memory to torch without a copy: `torch.as_tensor(pool, device="cuda")` is the
    whole allocation up to the pool's end, uint8; drop such tensors before `close`.
    """

    def __init__(self, description: PoolDescription, allocation: Allocation) -> None:
        """Made by `create_cuda_pool`."""
        self.description = description
        self._allocation: Allocation | None = allocation

    @property
    def address(self) -> int:
        """Of the allocation's first byte, where plans' offsets count from."""
        return self._live.address

    @property
    def fd(self) -> int:
        """The descriptor to pass on, lent until `close`; -1 where the handle is none."""
        return self._live.fd

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape = (self.description.total_bytes,)
        return {"shape": shape, "typestr": "|u1", "data": (self.address, False), "version": 3}

    @property
    def _live(self) -> Allocation:
        require(self._allocation is not None, "use of a closed pool")
        assert self._allocation is not None
        return self._allocation

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self._allocation is not None:
            allocation, self._allocation = self._allocation, None
            allocation.close()


class MappedPool:
    """Another process's pool as this one reaches it. Owns the mapping until `close`."""

    def __init__(
        self,
        description: PoolDescription,
        device: Device,
        reach: Sequence[Device],
        mapping: Mapping,
    ) -> None:
        """Made by `map_cuda_pool`."""
        self.description = description
        self.device = device
        """The GPU that has the memory."""
        self.reach = tuple(reach)
        """The GPUs whose work can use the mapping."""
        self._mapping: Mapping | None = mapping

    def address(self, device: Device) -> int:
        """Of the allocation's first byte, for work on `device`.

        Raises:
            CudaError: it does not reach the memory.
        """
        require(self._mapping is not None, "use of a closed mapping")
        assert self._mapping is not None
        if device not in self.reach:
            raise CudaError("MappedPool", f"{device.uuid} does not reach {self.device.uuid}")
        return self._mapping.address(device)

    def close(self) -> None:
        """Unmap; a second call does nothing. Nothing may use the addresses any more."""
        if self._mapping is not None:
            mapping, self._mapping = self._mapping, None
            mapping.close()


def create_cuda_pool(description: PoolDescription, kind: HandleKind, device: Device) -> CudaPool:
    """Make a zeroed pool with its header on `device`. The caller owns it.

    `description` is one of `describe_pool`; the pool's own says handle and device too.

    Raises:
        CudaError: memory or handle were refused.
    """
    allocation = allocate(kind, device, description.total_bytes)
    finished = False
    try:
        described = replace(description, handle=kind, device=device.uuid, token=allocation.token)
        device.use()
        call("cuMemsetD8", allocation.address, 0, allocation.size)
        header = np.frombuffer(pack_header(described), np.uint8)
        call(
            "cuMemcpyHtoD",
            allocation.address + described.header_offset,
            header.ctypes.data,
            header.size,
        )
        call("cuCtxSynchronize")
        finished = True
        return CudaPool(described, allocation)
    finally:
        if not finished:
            allocation.close()


def map_cuda_pool(fd: int, description: PoolDescription, devices: Sequence[Device]) -> MappedPool:
    """Map a pool that another process made, for work on all of `devices` that reach its GPU.

    `fd` is borrowed, and -1 where the handle is no descriptor. Blocks for some milliseconds.

    Raises:
        CudaError: this process does not see the pool's GPU, or the handle was refused.
        InvalidInput: it is no GPU pool, or what lies in memory is not what the description says.
    """
    if description.handle not in GPU_HANDLES:
        raise InvalidInput(Reason.PEER_PROTOCOL, f"pool handle {description.handle}, not a GPU's")
    device = find_device(description.device)
    reach = [d for d in devices if d.reaches(device)]
    mapping = import_handle(
        description.handle, device, reach, description.total_bytes, fd, description.token
    )
    proven = False
    try:
        check_header(read_header(device, mapping.address(device), description), description)
        proven = True
        return MappedPool(description, device, reach, mapping)
    finally:
        if not proven:
            mapping.close()


def read_header(device: Device, address: int, description: PoolDescription) -> bytes:
    """The pool's header as it lies in memory."""
    header = np.empty(HEADER.size, np.uint8)
    device.use()
    call("cuMemcpyDtoH", header.ctypes.data, address + description.header_offset, header.size)
    return header.tobytes()
