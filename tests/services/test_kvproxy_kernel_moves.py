"""`push`, `pull` and `staged` on a driver that plays streams in random legal orders, over real
memory: kernels read their tables of pages when they run, not when they are queued, and any call
may fail. Whatever happens, a copy that was told OK is right, and only the pages of copies that
were started are ever written."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from duplet_kvproxy import gpu_queue, move_direct, move_staged
from duplet_kvproxy.head_start import HEAD_PAGES, HeadAndRest, start_checked
from duplet_kvproxy.kernel_build import LaunchedRows
from duplet_kvproxy.move_direct import DirectMover
from duplet_kvproxy.move_staged import StagedMover
from duplet_kvproxy.transport import MAX_IN_FLIGHT
from duplet_memory.cuda_driver import CudaError
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import RowCopy, check_copy, execute, plan_ranges
from duplet_pages.engine_config import Arrangement
from tests.services.test_kvproxy_host_move import Driver

COPIES = 24
TABLE_PAGES = 1024
"""The least that a table has."""
FAILURES = 3


class KernelDriver(Driver):
    """Adds kernels, which run in pieces, and pinned memory that is given back. Call number n of
    those that queue or take memory fails, for each n of `failing`."""

    def __init__(self, seed: int, failing: set[int]) -> None:
        super().__init__(seed)
        self._failing = failing
        self._calls = 0
        self._ahead: deque[tuple[Any, ...]] = deque()
        """The stream that runs on, far before the others: it wants what they have not read yet."""
        self.known: list[tuple[int, int]] = []
        """Start and size of pools and stages."""
        self._pinned: dict[int, int] = {}

    def call(self, name: str, *a: Any) -> Any:
        if name == "cuMemFreeHost":
            del self._pinned[a[0]]
            return None
        if name == "cuMemHostAlloc":
            self._may_fail(name)
            address = super().call(name, *a)
            self._pinned[address] = a[0]
            return address
        return super().call(name, *a)

    def queue(self, name: str, *a: Any) -> None:
        self._may_fail(name)
        if name == "cuLaunchKernel":
            stream, arguments, row_bytes = a
            rows = list(range(arguments.first_row, arguments.first_row + arguments.rows))
            self._chance.shuffle(rows)
            step = -(-len(rows) // 3)
            for at in range(0, len(rows), step):
                piece = ("kernel", arguments, row_bytes, rows[at : at + step])
                self._streams[stream].append(piece)
        elif name == "cuMemcpyDtoDAsync":
            self._streams[a[3]].append(("copy", *a[:3]))
        else:
            super().queue(name, *a)

    def run_all(self) -> None:
        """What was queued and never waited for."""
        while any(self._streams.values()):
            self._run_one()

    def _may_fail(self, name: str) -> None:
        self._calls += 1
        if self._calls in self._failing:
            raise CudaError(name, "CUDA_ERROR_OUT_OF_MEMORY")

    def _run_one(self) -> None:
        ready = [queue for queue in self._streams.values() if queue and self._can_run(queue[0])]
        assert ready, "nothing can run: the streams wait for each other"
        if self._chance.random() < 0.05 or not any(queue is self._ahead for queue in ready):
            self._ahead = self._chance.choice(ready)
        kind, *a = self._ahead.popleft()
        if kind == "kernel":
            self._run_piece(*a)
        elif kind == "record":
            self._happened[a[0]] = a[1]
        elif kind == "copy":
            ctypes.memmove(*a)

    def _run_piece(self, a: LaunchedRows, row_bytes: int, rows: list[int]) -> None:
        for row in rows:
            page, in_page = divmod(row, a.page_rows)
            source = self._page(a.source_pages, page) * a.source_page_step + in_page
            dest = self._page(a.dest_pages, page) * a.dest_page_step + in_page
            for slab in range(a.slabs):
                to = a.dest + (dest + slab * a.dest_step) * row_bytes
                at = a.source + (source + slab * a.source_step) * row_bytes
                self._check_known(row_bytes, at, to)
                ctypes.memmove(to, at, row_bytes)

    def _check_known(self, size: int, *addresses: int) -> None:
        for at in addresses:
            known = any(start <= at and at + size <= start + all_ for start, all_ in self.known)
            assert known, "a kernel leaves the pools and stages"

    def _page(self, table: int, index: int) -> int:
        at = table + 8 * index
        held = any(start <= at < start + size for start, size in self._pinned.items())
        assert held, "a kernel reads a table that was given back"
        return ctypes.c_int64.from_address(at).value


class Kernel:
    """`MoveRows` without a GPU: what a launch was told is kept, as the driver keeps it."""

    def __init__(self, driver: KernelDriver, row_bytes: int) -> None:
        self._driver = driver
        self._row_bytes = row_bytes

    def launch(self, stream: int, arguments: LaunchedRows) -> None:
        self._driver.queue("cuLaunchKernel", stream, arguments, self._row_bytes)


@dataclass
class Pool:
    """A pool in plain memory, with random content."""

    description: PoolDescription
    content: Any
    wanted: Any = field(init=False)
    """The content that copies which were told OK make."""
    lost: set[int] = field(default_factory=set)
    """Pages of copies with an unknown end: they stay in quarantine."""

    def __post_init__(self) -> None:
        self.wanted = self.content.copy()

    def address(self, device: Any) -> int:
        address: int = self.content.ctypes.data
        return address


def make_pools(chance: random.Random, page_rows: int, pages: int) -> tuple[Pool, Pool]:
    made = []
    for _ in range(2):
        arrangement: Arrangement = chance.choice(("page-major", "layer-major"))
        described = describe_pool(
            layers=2,
            page_rows=page_rows,
            kv_heads=1,
            head_dim=2,
            dtype="bfloat16",
            pages=pages,
            arrangement=arrangement,
        )
        chooser = np.random.default_rng(chance.randrange(2**32))
        content = chooser.integers(0, 256, described.total_bytes, np.uint8)
        made.append(Pool(described, content))
    return made[0], made[1]


class Unit:
    """A mover as kvproxy's thread uses one, and pairs of pools. Free pages of a destination are
    those that no copy in flight and no copy with an unknown end names."""

    def __init__(self, name: str, seed: int, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
        self.chance = random.Random(seed)
        self.driver = KernelDriver(seed, set())
        monkeypatch.setattr(gpu_queue, "call", self.driver.call)
        monkeypatch.setattr(gpu_queue, "call_quickly", self.driver.queue)
        self._memory: list[Any] = []
        for module in (move_direct, move_staged):
            monkeypatch.setattr(module, "FIRST_TABLE_PAGES", TABLE_PAGES)
            monkeypatch.setattr(module, "RowShape", SimpleNamespace(of=lambda size: size))
            monkeypatch.setattr(module, "MoveRows", lambda size, *_: Kernel(self.driver, size))
        monkeypatch.setattr(move_staged, "CHUNK_BYTES", 9000)
        monkeypatch.setattr(move_staged, "allocate_shared", self._allocate)
        devices: list[Any] = [SimpleNamespace(use=lambda: None) for _ in range(2)]
        self.mover: Any = (
            StagedMover(*devices) if name == "staged" else DirectMover(name, *devices)  # type: ignore[arg-type]
        )
        if fails:
            begun = self.driver._calls
            self.driver._failing |= {begun + self.chance.randrange(1, 500) for _ in range(FAILURES)}
        self.pairs = [make_pools(self.chance, *shape) for shape in ((4, 60), (1, 2000), (16, 12))]
        for pool in (pool for pair in self.pairs for pool in pair):
            self.driver.known.append((pool.address(None), pool.content.size))
        self.flights: deque[tuple[RowCopy, tuple[Pool, Pool], Any]] = deque()
        self.lost = self.landed = self.heads = 0

    def _allocate(self, device: Any, reach: Any, size: int) -> Any:
        self._memory.append(np.zeros(size, np.uint8))
        start = self._memory[-1].ctypes.data
        self.driver.known.append((start, size))
        return SimpleNamespace(start=start)

    def busy(self, dest: Pool) -> set[int]:
        flying = (c.dest_pages.tolist() for c, pair, _ in self.flights if pair[1] is dest)
        return dest.lost.union(*flying)

    def start(self) -> None:
        pair = source, dest = self.chance.choice(self.pairs)
        page_rows = dest.description.page_rows
        free = sorted(set(range(dest.description.pages)) - self.busy(dest))
        if not free:
            return
        count = self.chance.randint(1, min(len(free), self.chance.choice((3, 40, 1500))))
        to_pages = self.chance.sample(free, count)
        from_pages = self.chance.sample(range(source.description.pages), count)
        first = self.chance.randrange(page_rows)
        rows = max(1, count * page_rows - first - self.chance.randrange(page_rows))
        wanted = -(-(first + rows) // page_rows)
        pages = from_pages[:wanted], to_pages[:wanted]
        copy = check_copy(source.description, pages[0], dest.description, pages[1], first, rows)
        asked = (source, pages[0], dest, pages[1], first, rows)
        head_pages = self.chance.choice((1, 7, HEAD_PAGES))
        try:
            flight, size = start_checked(self.mover, *asked, head_pages)
            assert size == copy.copied_bytes
            self.heads += isinstance(flight, HeadAndRest)
            self.flights.append((copy, pair, flight))
        except CudaError:
            self.lost += 1
            dest.lost |= set(copy.dest_pages.tolist())

    def land(self) -> None:
        copy, (source, dest), flight = self.flights.popleft()
        flight.wait()
        execute(plan_ranges(copy), source.wanted, dest.wanted)
        self.landed += 1
        self.check_pages(dest, copy.dest_pages.tolist())

    def check_pages(self, pool: Pool, numbers: list[int]) -> None:
        d = pool.description
        by_page = (d.pages, -1) if d.arrangement == "page-major" else (d.slabs, d.pages, -1)
        found, wanted = (c[d.offset :].reshape(by_page) for c in (pool.content, pool.wanted))
        if d.arrangement == "page-major":
            assert np.array_equal(found[numbers], wanted[numbers])
        else:
            assert np.array_equal(found[:, numbers], wanted[:, numbers])

    def check_all(self) -> None:
        for source, dest in self.pairs:
            assert np.array_equal(source.content, source.wanted), "a source is only read"
            kept = sorted(set(range(dest.description.pages)) - dest.lost)
            self.check_pages(dest, kept)
            head = slice(0, dest.description.offset)
            assert np.array_equal(dest.content[head], dest.wanted[head])


@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
@pytest.mark.parametrize("name", ["push", "pull", "staged"])
@pytest.mark.parametrize("seed", range(4))
def test_copies_in_flight_keep_apart(
    monkeypatch: pytest.MonkeyPatch, seed: int, name: str, fails: bool
) -> None:
    unit = Unit(name, seed, monkeypatch, fails)
    for _ in range(COPIES):
        while len(unit.flights) + unit.lost >= MAX_IN_FLIGHT or (
            unit.flights and unit.chance.random() < 0.3
        ):
            unit.land()
        unit.start()
    while unit.flights:
        unit.land()
    unit.driver.run_all()
    unit.check_all()
    assert unit.landed > COPIES // 2
    assert (unit.heads > 0) is (name != "staged")
    assert unit.lost <= (FAILURES if fails else 0)
