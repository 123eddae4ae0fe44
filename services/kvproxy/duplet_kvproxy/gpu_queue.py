"""Streams, events and page tables of the GPU movers, over CUDA's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import require
from duplet_memory.cuda_driver import Device, call, call_quickly, driver

_NON_BLOCKING = 1
_FIRST = -1000
"""A priority beyond the highest: the driver takes the highest there is."""
PORTABLE = 1
"""Pinned for every GPU's context, not only for the one that allocates."""

PAGE_NUMBER_BYTES = 8

FIRST_GROUP_COPIES = 8
GROUP_GROWTH = 4
"""A copy of a page takes several times as long as queueing one: while a group runs, the next,
so many times as large, is queued."""


class GpuEvent:
    """A point in a queue. Owned by the mover's thread for the process's life, recorded again
    and again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.use()
        flags = driver().CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.handle = int(call("cuEventCreate", flags))

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
    the process's life.

    Of the highest priority, which counts for kernels only: a move lasts about a millisecond and
    somebody waits for it, while an engine's kernels follow each other without end.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        device.use()
        self.handle = int(call("cuStreamCreateWithPriority", _NON_BLOCKING, _FIRST))

    def record(self, event: GpuEvent) -> None:
        """Let `event` stand for everything queued until now."""
        self.device.use()
        call_quickly("cuEventRecord", event.handle, self.handle)

    def wait_for(self, event: GpuEvent) -> None:
        """Queue nothing further before `event`, of any GPU, has happened."""
        self.device.use()
        call_quickly("cuStreamWaitEvent", self.handle, event.handle, 0)


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


class PageTable:
    """Page numbers in pinned host memory, where kernels of any GPU read them: each program
    once, which costs less than an upload and a wait for it.

    Owns the memory, and grows when a copy has more pages. Belongs to one flight at a time, so
    nothing reads it while it is written or grows.
    """

    def __init__(self, device: Device, pages: int) -> None:
        self._device = device
        self._pages = 0
        self._numbers: NDArray[np.int64]
        self._address = 0
        self._grow(pages)

    def write(self, *lists: NDArray[np.int64]) -> list[int]:
        """Set the table; the address of each list."""
        pages = max(len(p) for p in lists)
        if pages > self._pages:
            self._grow(2 * pages)
        require(len(lists) <= 2, "a table holds two lists")
        for index, numbers in enumerate(lists):
            start = index * self._pages
            self._numbers[start : start + len(numbers)] = numbers
        each = self._pages * PAGE_NUMBER_BYTES
        return [self._address + index * each for index in range(len(lists))]

    def _grow(self, pages: int) -> None:
        """Any call may fail. The table is then what it was, and never one without memory, for a
        kernel writes where its pages say."""
        self._device.use()
        pages = -(-pages // 1024) * 1024
        size = 2 * pages * PAGE_NUMBER_BYTES
        address = int(call("cuMemHostAlloc", size, PORTABLE))
        old, self._address = self._address, address
        view = (ctypes.c_byte * size).from_address(address)
        self._numbers = np.ctypeslib.as_array(view).view(np.int64)
        self._pages = pages
        if old:
            call("cuMemFreeHost", old)


def queue_copy(queue: GpuQueue, dest: int, source: int, size: int) -> None:
    """Queue one copy between two addresses of any GPUs."""
    queue.device.use()
    call_quickly("cuMemcpyDtoDAsync", dest, source, size, queue.handle)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, location hints of source and destination, flags."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("dest_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER, _OVERLAP_WITH_COMPUTE = 1, 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""
_ATTRIBUTES = _Attributes(access_order=_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
_FIRST_INDEX = ctypes.c_size_t(0)
_ALL_ALIKE = (ctypes.addressof(_ATTRIBUTES), ctypes.addressof(_FIRST_INDEX), 1)
"""One set of attributes for all copies from the first one on; read by the driver alone."""


def _groups(count: int) -> Iterator[tuple[int, int]]:
    """Start and length of the groups in which `count` copies go out: small ones first."""
    start, size = 0, FIRST_GROUP_COPIES
    while start < count:
        yield start, min(size, count - start)
        start, size = start + size, GROUP_GROWTH * size


def queue_copies(queue: GpuQueue, ranges: NDArray[Any], source: int, dest: int) -> None:
    """Queue `ranges`, int64 [n, 3] of source offset, destination offset, bytes, for the copy
    engine. They may run in any order among themselves; the array may go once this returns.

    Goes out in groups, so that the first copies run while the last are still being queued.

    Raises:
        CudaError: a group was refused; groups before it may run.
    """
    columns = np.ascontiguousarray(np.add(ranges, (source, dest, 0)).T)
    sources, column_bytes = columns.ctypes.data, columns.strides[0]
    dests, sizes = sources + column_bytes, sources + 2 * column_bytes
    queue.device.use()
    for start, count in _groups(len(ranges)):
        at = 8 * start
        places = (dests + at, sources + at, sizes + at)
        call_quickly("cuMemcpyBatchAsync", *places, count, *_ALL_ALIKE, queue.handle)
