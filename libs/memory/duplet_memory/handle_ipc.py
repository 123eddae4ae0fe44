"""CUDA IPC handles: for memory from plain `cudaMalloc`.

A handle names a whole allocation. Opened while one device is current, it is reachable by
kernels on that device alone, so it is opened once for each. Opening inside the process that
exported it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duplet_memory.cuda_driver import CudaError, Device, call, driver


class IpcAllocation:
    """The owner's end. Owns the memory until `close`."""

    fd = -1

    def __init__(self, device: Device, address: int, size: int, token: str) -> None:
        self._device = device
        self.address = address
        self.size = size
        self.token = token

    def close(self) -> None:
        """Free the memory; importers' mappings end with it, so they close first."""
        self._device.use()
        call("cuMemFree", self.address)


class IpcMapping:
    """The importer's end: one opened handle a device. Owns them until `close`."""

    def __init__(self) -> None:
        self._opened: list[tuple[Device, int]] = []

    def open(self, device: Device, token: str) -> None:
        """Open the handle for `device`."""
        device.use()
        flag = driver().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(call("cuIpcOpenMemHandle", _handle(token), flag))
        self._opened.append((device, address))

    def address(self, device: Device) -> int:
        """Where kernels on `device` find the first byte."""
        for opened_for, address in self._opened:
            if opened_for is device:
                return address
        raise CudaError("IpcMapping", f"the handle was not opened for {device.uuid}")

    def close(self) -> None:
        """Close every opened handle."""
        while self._opened:
            device, address = self._opened.pop()
            device.use()
            call("cuIpcCloseMemHandle", address)


def allocate_ipc(device: Device, size: int) -> IpcAllocation:
    """As `handles.allocate`."""
    device.use()
    address = int(call("cuMemAlloc", size))
    try:
        token = bytes(call("cuIpcGetMemHandle", address).reserved).hex()
    except CudaError:
        call("cuMemFree", address)
        raise
    return IpcAllocation(device, address, size, token)


def import_ipc(reach: Sequence[Device], size: int, token: str) -> IpcMapping:
    """As `handles.import_handle`. Which GPU the memory is on, the driver does not say reliably
    here (it may report the one that opened the handle); the header's layout digest does."""
    mapping = IpcMapping()
    try:
        for device in reach:
            mapping.open(device, token)
            _check_range(mapping.address(device), size)
    except CudaError:
        mapping.close()
        raise
    return mapping


def _check_range(address: int, size: int) -> None:
    base, found = call("cuMemGetAddressRange", address)
    if int(base) != address or int(found) < size:
        raise CudaError("import_ipc", f"the handle names {found} bytes, wanted {size}")


def _handle(token: str) -> Any:
    handle = driver().CUipcMemHandle()
    handle.reserved = bytes.fromhex(token)
    return handle
