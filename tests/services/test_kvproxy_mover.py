"""The mover: order, cancelled copies, refusals; on shared memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest

from duplet_core.effects import CopyDone, CopyResult, StartCopy
from duplet_core.ids import InstanceId, TransferId
from duplet_kvproxy import mover
from duplet_kvproxy.choice import Choice
from duplet_kvproxy.mover import Mover
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.pool import Pool, create_pool

SOURCE, DEST = InstanceId("5" * 32), InstanceId("d" * 32)


def describe(page_rows: int = 4) -> PoolDescription:
    return describe_pool(
        layers=2,
        page_rows=page_rows,
        kv_heads=1,
        head_dim=8,
        dtype="float32",
        pages=6,
        arrangement="page-major",
    )


class Place:
    """A mover over two pools, and what it told."""

    def __init__(
        self,
        dest: PoolDescription | None = None,
        on_broken: Callable[[str], None] = lambda detail: None,
    ) -> None:
        self.told: asyncio.Queue[CopyDone] = asyncio.Queue()
        self.source: Pool = create_pool(describe())
        self.dest: Pool = create_pool(dest or describe())
        self.source.array[:] = np.arange(self.source.array.size).reshape(self.source.array.shape)
        self.mover = Mover(self.told.put_nowait, Choice(("shm",)), on_broken)
        self.mover.add_pool(SOURCE, self.source)
        self.mover.add_pool(DEST, self.dest)

    def copy(self, number: int, page: int) -> StartCopy:
        transfer = TransferId(f"{number:032x}")
        return StartCopy(number, transfer, SOURCE, (page,), DEST, (page,), 0, 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an exception that nobody foresaw: the copy's end is unknown, and the service hears."""

    def fail(*args: object) -> None:
        raise IndexError("not foreseen")

    broken: asyncio.Queue[str] = asyncio.Queue()
    place = Place(on_broken=broken.put_nowait)
    monkeypatch.setattr(mover, "check_copy", fail)
    place.mover.start_copy(place.copy(1, page=1))
    assert (await place.told.get()).result is CopyResult.UNKNOWN
    assert "thread" in await broken.get()
    place.mover.close()  # waits for the thread


async def test_a_copy_that_was_cancelled_before_its_turn_never_begins() -> None:
    place = Place()
    place.mover.cancel_copy(2)
    for number in (1, 2, 3):
        place.mover.start_copy(place.copy(number, page=number))
    done = [await place.told.get() for _ in range(3)]
    assert [(d.copy, d.result) for d in done] == [
        (1, CopyResult.OK),
        (2, CopyResult.NOT_STARTED),
        (3, CopyResult.OK),
    ]
    pages = [bool(place.dest.array[page].any()) for page in (1, 2, 3)]
    assert pages == [True, False, True]
    place.mover.close()


async def test_cancelling_what_has_run_changes_nothing() -> None:
    place = Place()
    place.mover.start_copy(place.copy(1, page=1))
    first = await place.told.get()
    place.mover.cancel_copy(1)
    place.mover.start_copy(place.copy(2, page=2))
    second = await place.told.get()
    assert (first.result, second.result) == (CopyResult.OK, CopyResult.OK)
    place.mover.close()


async def test_more_copies_than_may_wait_are_refused_and_nothing_else_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover, "MAX_QUEUED", 2)
    place = Place()
    gate = threading.Event()
    take = place.mover._take

    def wait_and_take(copy: int) -> bool:
        gate.wait()
        return take(copy)

    monkeypatch.setattr(place.mover, "_take", wait_and_take)
    for number in (1, 2, 3, 4):
        place.mover.start_copy(place.copy(number, page=number))
    place.mover.cancel_copy(4)
    refused = [await place.told.get() for _ in range(2)]
    assert [(d.copy, d.result) for d in refused] == [
        (3, CopyResult.NOT_STARTED),
        (4, CopyResult.NOT_STARTED),
    ]
    gate.set()
    assert [(await place.told.get()).result for _ in range(2)] == [CopyResult.OK] * 2
    place.mover.start_copy(place.copy(5, page=5))
    assert (await place.told.get()).result is CopyResult.OK, "there is room again"
    assert place.mover._cancelled == set(), "nothing is kept of a copy that never waited"
    place.mover.close_pool(DEST)
    place.mover.close()


async def test_a_copy_between_pools_that_do_not_fit_is_refused_before_it_begins() -> None:
    place = Place(dest=describe(page_rows=8))
    place.mover.start_copy(place.copy(1, page=1))
    done = await place.told.get()
    assert done.result is CopyResult.NOT_STARTED
    assert "page_rows" in done.detail
    assert not place.dest.array.any()
    place.mover.close()
