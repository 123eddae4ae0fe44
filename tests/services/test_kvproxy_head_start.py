"""A head goes ahead of its copy only where the copy can be right, covers with the rest exactly the
rows that were asked for, and is never forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from duplet_core.errors import InvalidInput
from duplet_kvproxy.head_start import LEAST_HEADS, HeadAndRest, MovedInPart, start_checked
from duplet_kvproxy.transport import BY_ONE_KERNEL, GPU_TRANSPORTS
from duplet_memory.cuda_driver import CudaError
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import RowCopy, check_copy, plan_ranges

PAGES = 64
HEAD = 5


@dataclass
class Pool:
    description: PoolDescription

    def address(self, device: Any) -> int:
        return 0


def make_pool(page_rows: int) -> Pool:
    described = describe_pool(
        layers=2,
        page_rows=page_rows,
        kv_heads=1,
        head_dim=8,
        dtype="bfloat16",
        pages=PAGES,
        arrangement="layer-major",
    )
    return Pool(described)


@dataclass
class Flight:
    waits: int = 0

    def wait(self) -> None:
        self.waits += 1


@dataclass
class Transport:
    """Keeps what it was asked for. Start number `failing` fails with `error`."""

    name: Any = "pull"
    failing: int = 0
    error: Exception | None = None
    copies: list[RowCopy] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)

    def start(self, copy: RowCopy, source: Any, dest: Any) -> Flight:
        self.copies.append(copy)
        if self.error is not None and len(self.copies) == self.failing:
            raise self.error
        self.flights.append(Flight())
        return self.flights[-1]


def moved(copies: list[RowCopy]) -> set[tuple[int, int]]:
    """Source and destination of each row of each slab, none twice."""
    pairs = [
        (source + at, dest + at)
        for copy in copies
        for source, dest, size in plan_ranges(copy).ranges.tolist()
        for at in range(0, size, copy.source.row_bytes)
    ]
    assert len(set(pairs)) == len(pairs)
    return set(pairs)


@pytest.mark.parametrize("name", GPU_TRANSPORTS)
@pytest.mark.parametrize("pages", [1, HEAD, LEAST_HEADS * HEAD - 1, LEAST_HEADS * HEAD, 50])
@pytest.mark.parametrize(("page_rows", "first", "short"), [(1, 0, 0), (3, 0, 0), (3, 7, 1)])
def test_head_and_rest_are_the_copy(
    name: str, pages: int, page_rows: int, first: int, short: int
) -> None:
    source, dest, transport = make_pool(page_rows), make_pool(page_rows), Transport(name)
    rows = pages * page_rows - first % page_rows - short
    lists = [(7 * n) % PAGES for n in range(pages)], [(5 * n + 3) % PAGES for n in range(pages)]
    flight, size = start_checked(transport, source, lists[0], dest, lists[1], first, rows, HEAD)
    copy = check_copy(source.description, lists[0], dest.description, lists[1], first, rows)
    assert size == copy.copied_bytes == sum(part.copied_bytes for part in transport.copies)
    assert moved(transport.copies) == moved([copy])
    has_head = name in BY_ONE_KERNEL and pages >= LEAST_HEADS * HEAD
    assert len(transport.copies) == 1 + has_head
    assert isinstance(flight, HeadAndRest) is has_head
    flight.wait()
    assert [each.waits for each in transport.flights] == [1] * (1 + has_head)


@pytest.mark.parametrize(
    ("place", "page", "rows"),
    [
        (0, PAGES, 50),  # outside, in the head
        (1, 2, 50),  # twice, in the head
        (None, 0, 49),  # a page too many
        (None, 0, 51),  # one too few
        (None, 0, 0),
    ],
)
def test_what_the_head_can_show_is_refused_before_it_starts(
    place: int | None, page: int, rows: int
) -> None:
    transport, numbers = Transport(), list(range(2, 52))
    if place is not None:
        numbers[place] = page
    pools = make_pool(1), make_pool(1)
    with pytest.raises(InvalidInput):
        start_checked(transport, pools[0], numbers, pools[1], numbers, 0, rows, HEAD)
    assert not transport.copies


@pytest.mark.parametrize("page", [PAGES, -1, 2, 30])
def test_what_is_refused_later_is_not_called_refused(page: int) -> None:
    """Nor waited for: only a copy that the mover keeps in flight is, and may be told OK."""
    transport, numbers = Transport(), list(range(2, 52))
    numbers[-1] = page
    pools = make_pool(1), make_pool(1)
    with pytest.raises(MovedInPart, match="after its head was started"):
        start_checked(transport, pools[0], numbers, pools[1], numbers, 0, 50, HEAD)
    assert [flight.waits for flight in transport.flights] == [0]
    assert transport.copies[0].dest_pages.tolist() == list(range(2, 2 + HEAD))


def test_pages_that_lists_disagree_about_are_refused_whole() -> None:
    transport, numbers = Transport(), list(range(50))
    pools = make_pool(1), make_pool(1)
    with pytest.raises(InvalidInput, match="49 destination pages"):
        start_checked(transport, pools[0], numbers, pools[1], numbers[1:], 0, 50, HEAD)
    assert not transport.copies


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_call_stays_one(failing: int) -> None:
    """Whether the head or the rest was queued, nobody knows then."""
    error = CudaError("cuLaunchKernel", "CUDA_ERROR_UNKNOWN")
    transport, numbers = Transport("push", failing, error), list(range(50))
    pools = make_pool(1), make_pool(1)
    with pytest.raises(CudaError):
        start_checked(transport, pools[0], numbers, pools[1], numbers, 0, 50, HEAD)
    assert len(transport.copies) == failing
