"""Handles of virtual memory management: POSIX descriptors and FABRIC handles.

The physical memory is counted by reference: it returns when its owner has released it and
every importer has unmapped it, whoever of them dies first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from duplet_memory.cuda_driver import CudaError, Device, call, driver
from duplet_memory.layout import HandleKind

_TYPE_NAMES = {
    "cumem-fd": "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "cumem-fabric": "CU_MEM_HANDLE_TYPE_FABRIC",
    "": "CU_MEM_HANDLE_TYPE_NONE",
}


class CumemMemory:
    """One mapping of physical memory, the owner's or an importer's.

    Owns its address range, its mapping and, at the owner, the descriptor; all until `close`.
    """

    def __init__(self, device: Device, address: int, size: int, fd: int, token: str) -> None:
        self._device = device
        self.size = size
        self.fd = fd
        self.token = token
        self._start = address

    @property
    def start(self) -> int:
        """Address of the first byte, the same on every device."""
        return self._start

    def address(self, device: Device) -> int:
        """As `start`: virtual memory has one address for all devices."""
        return self._start

    def close(self) -> None:
        """Unmap, give the address range back and close the descriptor; once."""
        self._device.use()
        call("cuMemUnmap", self._start, self.size)
        call("cuMemAddressFree", self._start, self.size)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CumemAllocation:
    """The owner's end. Owns its `CumemMemory`."""

    def __init__(self, memory: CumemMemory) -> None:
        self._memory = memory
        self.address = memory.start
        self.size = memory.size
        self.fd = memory.fd
        self.token = memory.token

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def allocate_cumem(kind: HandleKind, device: Device, size: int) -> CumemAllocation:
    """As `handles.allocate`."""
    return CumemAllocation(_create(kind, device, size, [device]))


def allocate_shared(device: Device, reach: Sequence[Device], size: int) -> CumemMemory:
    """Memory on `device` that never leaves this process and that all of `reach` can use.

    Raises:
        CudaError: refused, for lack of memory or because a device cannot reach it.
    """
    return _create("", device, size, reach)


def import_cumem(
    kind: HandleKind, owner: Device, reach: Sequence[Device], size: int, fd: int, token: str
) -> CumemMemory:
    """As `handles.import_handle`."""
    owner.use()
    handle_type = _handle_type(kind)
    if kind == "cumem-fd":
        if fd < 0:
            raise CudaError("import_cumem", "no descriptor came with the pool's description")
        os_handle: Any = fd
    else:
        os_handle = bytes.fromhex(token)
    memory = call("cuMemImportFromShareableHandle", os_handle, handle_type)
    try:
        # The memory says itself where it lies; a description could name another GPU.
        location = call("cuMemGetAllocationPropertiesFromHandle", memory).location
        if location.id != owner.ordinal:
            raise CudaError(
                "import_cumem", f"the memory lies on device {location.id}, not on {owner.uuid}"
            )
        return _map(memory, owner, reach, _round_up(size, owner, kind), -1, "")
    finally:
        call("cuMemRelease", memory)


def _create(
    kind: HandleKind | str, device: Device, size: int, reach: Sequence[Device]
) -> CumemMemory:
    device.use()
    size = _round_up(size, device, kind)
    memory = call("cuMemCreate", size, _properties(kind, device), 0)
    fd = -1
    try:
        token = ""
        if kind == "cumem-fd":
            fd = int(call("cuMemExportToShareableHandle", memory, _handle_type(kind), 0))
            os.set_inheritable(fd, False)
        elif kind:
            exported = call("cuMemExportToShareableHandle", memory, _handle_type(kind), 0)
            token = bytes(exported.data).hex()
        return _map(memory, device, reach, size, fd, token)
    except CudaError:
        if fd >= 0:
            os.close(fd)
        raise
    finally:
        # The mapping, once there, keeps the memory; without one this gives it back.
        call("cuMemRelease", memory)


def _map(
    memory: Any, owner: Device, reach: Sequence[Device], size: int, fd: int, token: str
) -> CumemMemory:
    address = int(call("cuMemAddressReserve", size, 0, 0, 0))
    mapped = False
    try:
        call("cuMemMap", address, size, 0, memory, 0)
        mapped = True
        call("cuMemSetAccess", address, size, [_access(d) for d in reach], len(reach))
    except CudaError:
        if mapped:
            call("cuMemUnmap", address, size)
        call("cuMemAddressFree", address, size)
        raise
    return CumemMemory(owner, address, size, fd, token)


def _handle_type(kind: HandleKind | str) -> Any:
    return getattr(driver().CUmemAllocationHandleType, _TYPE_NAMES[kind])


def _properties(kind: HandleKind | str, device: Device) -> Any:
    module = driver()
    properties = module.CUmemAllocationProp()
    properties.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(device)
    properties.requestedHandleTypes = _handle_type(kind)
    return properties


def _location(device: Device) -> Any:
    module = driver()
    location = module.CUmemLocation()
    location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device.ordinal
    return location


def _access(device: Device) -> Any:
    module = driver()
    access = module.CUmemAccessDesc()
    access.location = _location(device)
    access.flags = module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _round_up(size: int, device: Device, kind: HandleKind | str) -> int:
    flags = driver().CUmemAllocationGranularity_flags
    granularity = call(
        "cuMemGetAllocationGranularity",
        _properties(kind, device),
        flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
    )
    return int(-(-size // int(granularity)) * int(granularity))
