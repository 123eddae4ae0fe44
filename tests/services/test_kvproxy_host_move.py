"""`host` on a driver that plays streams and events in random legal orders, over real memory."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from duplet_kvproxy import gpu_queue, move_host
from duplet_kvproxy.gpu_queue import GpuQueue
from duplet_kvproxy.move_host import STAGE_BYTES, HostMover, split_ranges
from duplet_kvproxy.trial import build_transport
from duplet_memory.cuda_driver import CudaError
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import RowCopy, check_copy

SEEDS = range(8)
SMALL_STAGE_BYTES = 3000
"""Less than a page and no multiple of anything, so that pages are cut."""


class Driver:
    """Streams whose work runs when somebody waits, each in its order, between them in any.
    Owns the stages' memory."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._streams: dict[int, deque[tuple[Any, ...]]] = {}
        self._records: dict[int, int] = {}
        """Event → how often it was recorded."""
        self._happened: dict[int, int] = {}
        """Event → the newest record that was reached."""
        self._memory: list[NDArray[np.uint8]] = []

    def call(self, name: str, *a: Any) -> Any:
        if name == "cuStreamCreateWithPriority":
            self._streams[len(self._streams) + 1] = deque()
            return len(self._streams)
        if name == "cuEventCreate":
            event = 100 + len(self._records)
            self._records[event] = self._happened[event] = 0
            return event
        if name == "cuMemHostAlloc":
            self._memory.append(np.zeros(a[0], np.uint8))
            return self._memory[-1].ctypes.data
        assert name == "cuEventSynchronize"
        while self._happened[a[0]] < self._records[a[0]]:
            self._run_one()
        return None

    def queue(self, name: str, *a: int) -> None:
        if name == "cuEventRecord":
            self._records[a[0]] += 1
            self._streams[a[1]].append(("record", a[0], self._records[a[0]]))
        elif name == "cuStreamWaitEvent":
            self._streams[a[0]].append(("wait", a[1], self._records[a[1]]))
        else:
            assert name == "cuMemcpyBatchAsync"
            columns = [list((ctypes.c_uint64 * a[3]).from_address(place)) for place in a[:3]]
            copies = list(zip(*columns, strict=True))
            self._chance.shuffle(copies)
            self._streams[a[7]].extend(("copy", *copy) for copy in copies)

    def pending(self) -> list[tuple[int, int, int]]:
        """Destination, source and bytes of every copy that has not run."""
        return [work[1:] for queue in self._streams.values() for work in queue if work[0] == "copy"]

    def _run_one(self) -> None:
        ready = [queue for queue in self._streams.values() if queue and self._can_run(queue[0])]
        assert ready, "nothing can run: the streams wait for each other"
        kind, *a = self._chance.choice(ready).popleft()
        if kind == "record":
            self._happened[a[0]] = a[1]
        elif kind == "copy":
            ctypes.memmove(*a)

    def _can_run(self, work: tuple[Any, ...]) -> bool:
        return bool(work[0] != "wait" or self._happened[work[1]] >= work[2])


class Memory:
    """A pool in plain memory, with random content."""

    def __init__(self, seed: int, pages: int = 24) -> None:
        self.description: PoolDescription = describe_pool(
            layers=3,
            page_rows=4,
            kv_heads=2,
            head_dim=32,
            dtype="bfloat16",
            pages=pages,
            arrangement="page-major",
        )
        size = self.description.total_bytes
        self.content = np.random.default_rng(seed).integers(0, 256, size, np.uint8)

    def address(self, device: Any) -> int:
        return self.content.ctypes.data

    def pages(self, numbers: Any) -> NDArray[np.uint8]:
        d = self.description
        return self.content[d.offset :].reshape(d.pages, d.page_bytes)[list(numbers)]


def play(monkeypatch: pytest.MonkeyPatch, seed: int) -> Driver:
    """Put a driver in the place of CUDA's, and small stages."""
    fake = Driver(seed)
    monkeypatch.setattr(gpu_queue, "call", fake.call)
    monkeypatch.setattr(gpu_queue, "call_quickly", fake.queue)
    monkeypatch.setattr(move_host, "call", fake.call)
    monkeypatch.setattr(move_host, "STAGE_BYTES", SMALL_STAGE_BYTES)
    return fake


@pytest.fixture(params=SEEDS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return play(monkeypatch, request.param)


def make_mover() -> HostMover:
    devices: list[Any] = [SimpleNamespace(use=lambda: None) for _ in range(2)]
    return HostMover(*devices)


def make_copies(source: Memory, dest: Memory, seed: int) -> list[RowCopy]:
    """Three copies whose pages are disjoint, of different sizes."""
    chance = np.random.default_rng(seed)
    lists = [chance.permutation(24).tolist() for _ in range(2)]
    copies = []
    for first, last in ((0, 1), (1, 9), (9, 20)):
        pages = [numbers[first:last] for numbers in lists]
        rows = (last - first) * 4 - 3
        copies.append(check_copy(source.description, pages[0], dest.description, pages[1], 0, rows))
    return copies


def move_all(driver: Driver, seed: int) -> tuple[bool, bool]:
    """Move three copies at once. Whether all pages arrived and nothing else changed, and whether
    each copy was quiet once its event had happened."""
    source, dest = Memory(seed), Memory(seed + 1)
    wanted, d = dest.content.copy(), dest.description
    copies, mover = make_copies(source, dest, seed), make_mover()
    for copy in copies:
        pages = wanted[d.offset :].reshape(d.pages, d.page_bytes)
        pages[copy.dest_pages] = source.pages(copy.source_pages)
    flights = [mover.start(copy, source, dest) for copy in copies]
    quiet = True
    for copy, flight in zip(copies, flights, strict=True):
        flight.wait()
        quiet = quiet and not touches(driver, copy, source, dest)
    return bool(np.array_equal(dest.content, wanted)), quiet


def touches(driver: Driver, copy: RowCopy, source: Memory, dest: Memory) -> bool:
    """Whether a copy that has not run reads or writes pages of `copy`."""
    size = copy.source.page_bytes
    starts = [
        source.address(None) + source.description.offset + p * size for p in copy.source_pages
    ]
    starts += [dest.address(None) + dest.description.offset + p * size for p in copy.dest_pages]
    return any(
        place < start + size and start < place + count
        for to, at, count in driver.pending()
        for place in (to, at)
        for start in starts
    )


def test_pages_arrive_in_any_order_of_streams(driver: Driver) -> None:
    for seed in range(5):
        assert move_all(driver, seed) == (True, True)


@pytest.mark.parametrize("stream", [1, 2], ids=["until it is empty", "until it is full"])
def test_each_wait_for_a_stage_is_needed(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above notices when one of the two is missing."""
    wait_for = GpuQueue.wait_for

    def forget(queue: GpuQueue, event: Any) -> None:
        if queue.handle != stream:
            wait_for(queue, event)

    monkeypatch.setattr(GpuQueue, "wait_for", forget)
    assert not all(move_all(play(monkeypatch, seed), seed)[0] for seed in SEEDS)


@pytest.mark.parametrize("stage_bytes", [1, 7, 64, 1000])
def test_chunks_fit_their_stage_and_cover_every_byte_once(stage_bytes: int) -> None:
    ranges = np.array([[0, 500, 100], [300, 0, 1], [100, 700, 64]])
    seen = []
    for out, back in split_ranges(ranges, stage_bytes):
        assert np.array_equal(out[:, 1], np.cumsum(out[:, 2]) - out[:, 2]), "side by side"
        assert out[:, 2].sum() <= stage_bytes
        assert np.array_equal(out[:, 1:], back[:, [0, 2]])
        seen += [
            (source + i, dest + i)
            for source, dest, size in zip(out[:, 0], back[:, 1], out[:, 2], strict=True)
            for i in range(size)
        ]
    wanted = [(s + i, d + i) for s, d, size in ranges.tolist() for i in range(size)]
    assert seen == wanted


def test_a_stage_holds_a_page_of_the_largest_model_in_few_pieces() -> None:
    page_bytes = 36 * 2 * 16 * 2048
    ranges = np.array([[i * page_bytes, i * page_bytes, page_bytes] for i in range(94)])
    pieces = [len(out) for out, _ in split_ranges(ranges, STAGE_BYTES)]
    assert sum(pieces) < 94 + len(pieces) + 1


def test_only_host_is_built_where_gpus_do_not_reach_each_other(driver: Driver) -> None:
    lonely: Any = SimpleNamespace(use=lambda: None, reaches=lambda other: False)
    other: Any = SimpleNamespace(use=lambda: None, reaches=lambda other: False)
    assert build_transport("host", lonely, other).name == "host"
    for name in ("pages", "push", "pull", "staged"):
        with pytest.raises(CudaError, match="no peer access between these GPUs; `host` needs none"):
            build_transport(name, lonely, other)
