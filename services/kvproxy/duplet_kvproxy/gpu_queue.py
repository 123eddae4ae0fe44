"""Streams, events and place tables of the GPU movers, over CUDA's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import require
from duplet_memory.cuda_driver import Device, call, driver

_NON_BLOCKING = 1


class GpuEvent:
    """A point in a queue. Owned by the mover's thread for the process's life, recorded again
    and again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.use()
        flags = driver().CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.handle = call("cuEventCreate", flags)

    def wait(self) -> None:
        """Block until everything before the last record has completed.

        Raises:
            CudaError: it, or anything in the context, failed. Whether writes have ended is then
                unknown.
        """
        self._device.use()
        call("cuEventSynchronize", self.handle)


class GpuQueue:
    """One stream of one GPU: work runs in the order in which it is queued. Owns the stream for
    the process's life."""

    def __init__(self, device: Device) -> None:
        self.device = device
        device.use()
        self.handle = call("cuStreamCreate", _NON_BLOCKING)

    def record(self, event: GpuEvent) -> None:
        """Let `event` stand for everything queued until now."""
        self.device.use()
        call("cuEventRecord", event.handle, self.handle)

    def wait_for(self, event: GpuEvent) -> None:
        """Queue nothing further before `event`, of any GPU, has happened."""
        self.device.use()
        call("cuStreamWaitEvent", self.handle, event.handle, 0)


class Flight:
    """One copy on its way."""

    def __init__(self, event: GpuEvent, quiet: Callable[[], None]) -> None:
        """`quiet` gives back what the copy used, once it has completed."""
        self._event = event
        self._quiet = quiet

    def wait(self) -> None:
        """Block until the copy has completed successfully.

        Raises:
            CudaError: it failed, or nobody knows; nothing that it used is given back.
        """
        self._event.wait()
        self._quiet()


class PlaceTable:
    """Row places on one GPU: pinned memory here, memory there, and an upload between them.

    Owns both, and grows when a copy has more rows. Belongs to one flight at a time, so nothing
    uses it while it grows.
    """

    def __init__(self, device: Device, rows: int) -> None:
        self._device = device
        self._rows = 0
        self._host: NDArray[np.int32]
        self._host_address = 0
        self._address = 0
        self._grow(rows)

    def upload(self, queue: GpuQueue, *places: NDArray[np.int32]) -> list[int]:
        """Queue the upload; the address of each array on the GPU, 16-byte aligned."""
        rows = max(-(-len(p) // 4) * 4 for p in places)
        if rows > self._rows:
            self._grow(2 * rows)
        require(len(places) <= 2, "a table holds two arrays")
        for index, values in enumerate(places):
            start = index * self._rows
            self._host[start : start + len(values)] = values
        self._device.use()
        used = ((len(places) - 1) * self._rows + rows) * 4
        call("cuMemcpyHtoDAsync", self._address, self._host_address, used, queue.handle)
        return [self._address + index * self._rows * 4 for index in range(len(places))]

    def _grow(self, rows: int) -> None:
        self._device.use()
        if self._rows:
            call("cuMemFree", self._address)
            call("cuMemFreeHost", self._host_address)
        self._rows = -(-rows // 1024) * 1024
        size = 2 * self._rows * 4
        self._host_address = int(call("cuMemHostAlloc", size, 1))
        self._address = int(call("cuMemAlloc", size))
        view = (ctypes.c_byte * size).from_address(self._host_address)
        self._host = np.ctypeslib.as_array(view).view(np.int32)


def queue_copy(queue: GpuQueue, dest: int, source: int, size: int) -> None:
    """Queue one copy between two addresses of any GPUs."""
    queue.device.use()
    call("cuMemcpyDtoDAsync", dest, source, size, queue.handle)


def queue_copies(queue: GpuQueue, ranges: NDArray[Any], source: int, dest: int) -> None:
    """Queue `ranges`, int64 [n, 3] of source offset, destination offset, bytes, as one batch
    for the copy engine; they may run in any order among themselves."""
    module = driver()
    pointer = module.CUdeviceptr
    sources = [pointer(p) for p in (ranges[:, 0] + source).tolist()]
    dests = [pointer(p) for p in (ranges[:, 1] + dest).tolist()]
    attributes = module.CUmemcpyAttributes()
    order = module.CUmemcpySrcAccessOrder
    attributes.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    attributes.flags = module.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE.value
    queue.device.use()
    sizes = ranges[:, 2].tolist()
    count = len(sizes)
    call("cuMemcpyBatchAsync", dests, sources, sizes, count, [attributes], [0], 1, queue.handle)
