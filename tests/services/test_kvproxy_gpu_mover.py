"""The mover with copies in flight: what it tells when a GPU fails. Transports are scripted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from duplet_core.effects import CopyDone, CopyResult, StartCopy
from duplet_core.errors import InvalidInput, Reason
from duplet_core.ids import InstanceId, TransferId
from duplet_kvproxy.head_start import HEAD_PAGES, LEAST_HEADS
from duplet_kvproxy.mover import Mover
from duplet_kvproxy.transport import MAX_IN_FLIGHT
from duplet_memory.cuda_driver import CudaError
from duplet_memory.cuda_pool import MappedPool
from duplet_memory.layout import PoolDescription, describe_pool

SOURCE, DEST = InstanceId("5" * 32), InstanceId("d" * 32)
PAGES = 2048


def describe() -> PoolDescription:
    described = describe_pool(
        layers=2,
        page_rows=4,
        kv_heads=1,
        head_dim=8,
        dtype="bfloat16",
        pages=PAGES,
        arrangement="page-major",
    )
    return replace(described, handle="cumem-fd", device="GPU-0")


class Mapping:
    """Says whether it was closed."""

    closed = False

    def address(self, device: Any) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


class Flight:
    """Ends when the test lets it, as the test says."""

    def __init__(self, script: Script, error: CudaError | None) -> None:
        self._script = script
        self.let_go = threading.Event()
        self._error = error

    def wait(self) -> None:
        assert self.let_go.wait(30)
        if self._error is not None:
            raise self._error
        self._script.slots += 1


class Script:
    """Choice and transport at once. Page n of a copy says what happens to it."""

    name = "pages"

    def __init__(self) -> None:
        self.flights: list[Flight] = []
        self.begun = threading.Semaphore(0)
        self.open = threading.Event()
        """Nothing begins before it is set."""
        self.open.set()
        self.wait_errors: dict[int, CudaError] = {}
        self.start_errors: dict[int, Exception] = {}
        self.slots = MAX_IN_FLIGHT
        """A transport has so many, and gives none back that a failed start had."""

    def transport_for(self, source: PoolDescription, dest: PoolDescription) -> Script:
        return self

    def start(self, copy: Any, source: Any, dest: Any) -> Flight:
        page = int(copy.source_pages[0])
        assert self.open.wait(30)
        if self.slots == 0:
            raise IndexError("pop from empty list")
        self.slots -= 1
        if page in self.start_errors:
            raise self.start_errors[page]
        self.flights.append(Flight(self, self.wait_errors.get(page)))
        self.begun.release()
        return self.flights[-1]


class Place:
    """A mover over two mapped pools, and what it told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[CopyDone] = asyncio.Queue()
        self.broken: asyncio.Queue[str] = asyncio.Queue()
        self.script = Script()
        self.mappings = Mapping(), Mapping()
        choice: Any = self.script
        self.mover = Mover(self.told.put_nowait, choice, self.broken.put_nowait)
        device: Any = None
        for name, mapping in zip((SOURCE, DEST), self.mappings, strict=True):
            self.mover.add_pool(name, MappedPool(describe(), device, [device], mapping))

    def start(self, *pages: int) -> None:
        for page in pages:
            transfer = TransferId(f"{page:032x}")
            copy = StartCopy(page, transfer, SOURCE, (page,), DEST, (page,), 0, 4)
            self.mover.start_copy(copy)

    async def begun(self, count: int) -> None:
        """Wait until so many more copies are in flight."""
        for _ in range(count):
            assert await asyncio.to_thread(self.script.begun.acquire, timeout=30)

    async def ends(self, count: int) -> dict[int, CopyDone]:
        async with asyncio.timeout(30):
            told = [await self.told.get() for _ in range(count)]
        return {done.copy: done for done in told}


@asynccontextmanager
async def mover_place() -> AsyncIterator[Place]:
    place = Place()
    yield place
    for flight in place.script.flights:
        flight.let_go.set()
    await asyncio.to_thread(place.mover.close)


async def test_several_copies_are_in_flight_and_land_in_order() -> None:
    async with mover_place() as place:
        place.start(*range(1, MAX_IN_FLIGHT + 3))
        # The second copy begins while the first, which nobody lets go, is still in flight.
        await place.begun(1)
        flights = place.script.flights
        flights[0].let_go.set()
        await place.begun(1)
        for _ in range(MAX_IN_FLIGHT):
            for flight in list(flights):
                flight.let_go.set()
            await place.begun(1)
        for flight in list(flights):
            flight.let_go.set()
        ends = await place.ends(MAX_IN_FLIGHT + 2)
        assert list(ends) == list(range(1, MAX_IN_FLIGHT + 3))
        assert {done.result for done in ends.values()} == {CopyResult.OK}
        assert place.mover.counts.copies["pages"] == MAX_IN_FLIGHT + 2


async def test_a_failed_wait_makes_everything_in_flight_unknown() -> None:
    async with mover_place() as place:
        place.script.wait_errors[1] = CudaError("cuEventSynchronize", "CUDA_ERROR_LAUNCH_FAILED")
        place.start(1, 2, 3)
        await place.begun(1)
        place.script.flights[0].let_go.set()
        ends = await place.ends(3)
        # What had begun is unknown; what had not begun never will.
        in_flight = len(place.script.flights)
        assert [ends[n].result for n in range(1, in_flight + 1)] == [CopyResult.UNKNOWN] * in_flight
        assert all(ends[n].result is CopyResult.NOT_STARTED for n in range(in_flight + 1, 4))
        assert "CUDA_ERROR_LAUNCH_FAILED" in await place.broken.get()
        place.start(4)
        (end,) = (await place.ends(1)).values()
        assert end.result is CopyResult.NOT_STARTED
        assert place.broken.empty(), "told once"
    assert not any(mapping.closed for mapping in place.mappings), "something may still write"


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (CudaError("cuMemcpyBatchAsync", "CUDA_ERROR_INVALID_VALUE"), CopyResult.UNKNOWN),
        (InvalidInput(Reason.TRANSFER_FAILED, "does not fit"), CopyResult.NOT_STARTED),
    ],
)
async def test_a_start_that_fails(error: Exception, result: CopyResult) -> None:
    async with mover_place() as place:
        place.script.start_errors[1] = error
        place.start(1, 2)
        await place.begun(1)
        place.script.flights[0].let_go.set()
        ends = await place.ends(2)
        assert ends[1].result is result
        assert ends[2].result is CopyResult.OK, "the next copy is not concerned"
    unknown = result is CopyResult.UNKNOWN
    assert [m.closed for m in place.mappings] == [not unknown] * 2, "part of it may still run"


async def test_what_a_failed_start_did_not_name_is_closed() -> None:
    other, mapping = InstanceId("e" * 32), Mapping()
    async with mover_place() as place:
        device: Any = None
        place.mover.add_pool(other, MappedPool(describe(), device, [device], mapping))
        error = CudaError("cuMemcpyBatchAsync", "CUDA_ERROR_INVALID_VALUE")
        place.script.start_errors[1] = error
        place.start(1)
        await place.ends(1)
    assert mapping.closed
    assert not any(kept.closed for kept in place.mappings)


async def test_what_failed_starts_keep_is_not_asked_for_again() -> None:
    """A transport with nothing left to give would end the thread, and with it every copy."""
    async with mover_place() as place:
        error = CudaError("cuMemcpyBatchAsync", "CUDA_ERROR_OUT_OF_MEMORY")
        place.script.start_errors = dict.fromkeys((1, 30, 31, 32, 33, 34, 35, 36), error)
        place.script.open.clear()
        place.start(*range(1, MAX_IN_FLIGHT + 3))
        place.script.open.set()
        await place.begun(MAX_IN_FLIGHT - 1)
        assert len(place.script.flights) == MAX_IN_FLIGHT - 1, "what the first had is lost"
        for _ in range(2):
            for flight in place.script.flights:
                flight.let_go.set()
            await place.begun(1)
        for flight in place.script.flights:
            flight.let_go.set()
        ends = await place.ends(MAX_IN_FLIGHT + 2)
        assert ends.pop(1).result is CopyResult.UNKNOWN
        assert {done.result for done in ends.values()} == {CopyResult.OK}
        place.start(30, 31, 32, 33, 34, 35, 36, 40)
        ends = await place.ends(8)
        assert ends.pop(40).result is CopyResult.NOT_STARTED
        assert {done.result for done in ends.values()} == {CopyResult.UNKNOWN}


async def test_pages_outside_the_pool_are_refused_before_anything_is_queued() -> None:
    async with mover_place() as place:
        place.start(PAGES)
        (end,) = (await place.ends(1)).values()
        assert end.result is CopyResult.NOT_STARTED
        assert f"source page {PAGES} is not in a pool of {PAGES}" in end.detail
        assert not place.script.flights


async def test_a_copy_that_is_refused_after_its_head_has_an_unknown_end() -> None:
    """At once: the thread waits for nothing but what is in flight. What the head had is lost, as
    after a start that failed, so that nothing writes over a table that it may still read."""
    async with mover_place() as place:
        place.script.name = "push"
        pages = (*range(LEAST_HEADS * HEAD_PAGES), 0)
        for number in range(1, MAX_IN_FLIGHT + 1):
            transfer = TransferId(f"{number:032x}")
            copy = StartCopy(number, transfer, SOURCE, pages, DEST, pages, 0, 4 * len(pages))
            place.mover.start_copy(copy)
        ends = await place.ends(MAX_IN_FLIGHT)  # nobody has let a head go
        assert {done.result for done in ends.values()} == {CopyResult.UNKNOWN}
        assert all("a destination page stands twice" in done.detail for done in ends.values())
        assert len(place.script.flights) == MAX_IN_FLIGHT
        assert place.script.slots == 0, "no head's came back"
        place.start(50)
        (end,) = (await place.ends(1)).values()
        assert end.result is CopyResult.NOT_STARTED
