"""Tables of pages in pinned memory: what a launch is given is always the table that was written,
also when the driver has no memory for a larger one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from duplet_kvproxy import gpu_queue
from duplet_kvproxy.gpu_queue import Flight, PageTable
from duplet_kvproxy.move_staged import FIRST_TABLE_PAGES, _Side
from duplet_memory.cuda_driver import CudaError

NO_MEMORY = CudaError("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY")


class PinnedMemory:
    """The driver's pinned memory. What was given back stays mapped, so that a test can look."""

    def __init__(self) -> None:
        self.live: dict[int, Any] = {}
        self._kept: list[Any] = []
        self.is_full = False

    def call(self, name: str, *arguments: int) -> int | None:
        if name == "cuMemFreeHost":
            del self.live[arguments[0]]
            return None
        assert name == "cuMemHostAlloc"
        if self.is_full:
            raise NO_MEMORY
        memory = (ctypes.c_byte * arguments[0])()
        self._kept.append(memory)
        self.live[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def read(self, address: int, pages: int) -> list[int]:
        """Page numbers at an address, which lie in live memory."""
        for start, memory in self.live.items():
            if start <= address and address + 8 * pages <= start + len(memory):
                return list((ctypes.c_int64 * pages).from_address(address))
        raise AssertionError("a launch would read memory that was given back")


class StillDevice:
    def use(self) -> None: ...


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    memory = PinnedMemory()
    monkeypatch.setattr(gpu_queue, "call", memory.call)
    return memory


def make_table(pages: int) -> PageTable:
    device: Any = StillDevice()
    return PageTable(device, pages)


def test_a_table_that_cannot_grow_stays_what_it_was(pinned: PinnedMemory) -> None:
    table = make_table(10)
    pinned.is_full = True
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        table.write(np.arange(5000, dtype=np.int64))
    (address,) = table.write(np.arange(3, dtype=np.int64) + 7)
    assert pinned.read(address, 3) == [7, 8, 9]
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        table.write(np.arange(5000, dtype=np.int64))
    pinned.is_full = False
    (address,) = table.write(np.arange(5000, dtype=np.int64))
    assert pinned.read(address, 5000) == list(range(5000))
    assert len(pinned.live) == 1, "the smaller one was given back"


def make_side(monkeypatch: pytest.MonkeyPatch) -> _Side:
    class Event:
        def __init__(self, device: Any) -> None: ...

        def wait(self) -> None: ...

    class Queue:
        def record(self, event: Any) -> None: ...

    monkeypatch.setattr("duplet_kvproxy.move_staged.GpuEvent", Event)
    monkeypatch.setattr("duplet_kvproxy.move_staged.GpuQueue", lambda device: Queue())
    monkeypatch.setattr("duplet_kvproxy.move_staged.allocate_shared", lambda *_: None)
    device: Any = StillDevice()
    return _Side(device, (device,))


@pytest.mark.parametrize("pages", [3, FIRST_TABLE_PAGES, FIRST_TABLE_PAGES + 1])
def test_staging_pages_are_never_those_of_a_table_that_failed(
    monkeypatch: pytest.MonkeyPatch, pinned: PinnedMemory, pages: int
) -> None:
    """A gather writes where this table says: a wrong one lets a copy write anywhere."""
    side = make_side(monkeypatch)
    assert pinned.read(side.identity(3), 3) == [0, 1, 2]
    pinned.is_full = True
    for _ in range(2):
        try:
            address = side.identity(pages)
        except CudaError:
            assert pages > FIRST_TABLE_PAGES, "no memory was needed"
        else:
            assert pinned.read(address, pages) == list(range(pages))
    assert pinned.read(side.identity(3), 3) == [0, 1, 2]
    pinned.is_full = False
    address = side.identity(pages)
    assert pinned.read(address, pages) == list(range(pages))


def test_a_copy_that_failed_gives_nothing_back() -> None:
    """Whether its launches have read their tables, nobody knows."""

    class Event:
        def wait(self) -> None:
            raise CudaError("cuEventSynchronize", "CUDA_ERROR_LAUNCH_FAILED")

    given_back: list[str] = []
    event: Any = Event()
    with pytest.raises(CudaError):
        Flight(event, lambda: given_back.append("a table")).wait()
    assert given_back == []
