"""Plans for kernels and copy engines name exactly the bytes that the ranges of a CPU plan name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duplet_core.errors import InvalidInput
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import CopyPlan, check_copy, plan_pages, plan_ranges
from duplet_memory.row_plan import plan_rows
from duplet_pages.engine_config import Arrangement

ARRANGEMENTS: tuple[Arrangement, ...] = ("page-major", "layer-major")


def describe(arrangement: Arrangement, page_rows: int = 3, pages: int = 9) -> PoolDescription:
    return describe_pool(
        layers=2,
        page_rows=page_rows,
        kv_heads=1,
        head_dim=4,
        dtype="bfloat16",
        pages=pages,
        arrangement=arrangement,
    )


def pairs_of_bytes(plan: CopyPlan) -> Iterator[tuple[int, int]]:
    """Source and destination offset of every byte."""
    for source, dest, size in plan.ranges.tolist():
        yield from zip(range(source, source + size), range(dest, dest + size), strict=True)


@pytest.mark.parametrize("source", ARRANGEMENTS)
@pytest.mark.parametrize("dest", ARRANGEMENTS)
@pytest.mark.parametrize(("page_rows", "start", "count"), [(1, 4, 6), (3, 2, 8), (5, 5, 10)])
def test_rows_and_ranges_name_the_same_bytes(
    source: Arrangement, dest: Arrangement, page_rows: int, start: int, count: int
) -> None:
    pools = describe(source, page_rows), describe(dest, page_rows)
    wanted = -(-(start % page_rows + count) // page_rows)
    from_pages, to_pages = list(range(8, 8 - wanted, -1)), list(range(wanted))
    copy = check_copy(pools[0], from_pages, pools[1], to_pages, start, count)
    rows = plan_rows(copy)
    assert rows.copied_bytes == copy.copied_bytes == plan_ranges(copy).copied_bytes
    named = set()
    for slab in range(rows.slabs):
        for row in range(rows.first_row, rows.first_row + rows.rows):
            page, in_page = divmod(row, rows.page_rows)
            from_page = int(rows.source_pages[page]) * rows.source_page_step
            to_page = int(rows.dest_pages[page]) * rows.dest_page_step
            from_place = from_page + in_page + slab * rows.source_step
            to_place = to_page + in_page + slab * rows.dest_step
            here = pools[0].offset + from_place * rows.row_bytes
            there = pools[1].offset + to_place * rows.row_bytes
            named |= {(here + byte, there + byte) for byte in range(rows.row_bytes)}
    assert named == set(pairs_of_bytes(plan_ranges(copy)))


def test_whole_pages_hold_the_range_and_one_range_a_page() -> None:
    pools = describe("page-major"), describe("page-major")
    copy = check_copy(pools[0], [7, 2, 5], pools[1], [1, 2, 0], 4, 6)
    plan = plan_pages(copy)
    page = pools[0].page_bytes
    places = [(p * page, q * page) for p, q in ((7, 1), (2, 2), (5, 0))]
    assert plan.ranges.tolist() == [
        [pools[0].offset + p, pools[1].offset + q, page] for p, q in places
    ]
    assert set(pairs_of_bytes(plan_ranges(copy))) < set(pairs_of_bytes(plan))


@pytest.mark.parametrize(
    ("source_pages", "dest_pages", "runs"),
    [
        ([3, 4, 5], [1, 2, 3], [3]),
        ([3, 4, 5], [1, 2, 4], [2, 1]),
        ([3, 4, 5], [4, 3, 2], [1, 1, 1]),
        ([3, 5, 6], [1, 2, 3], [1, 2]),
        ([3], [0], [1]),
    ],
)
def test_pages_that_follow_each_other_in_both_pools_go_together(
    source_pages: list[int], dest_pages: list[int], runs: list[int]
) -> None:
    pools = describe("page-major"), describe("page-major")
    rows = len(source_pages) * pools[0].page_rows
    copy = check_copy(pools[0], source_pages, pools[1], dest_pages, 0, rows)
    plan = plan_pages(copy)
    assert (plan.ranges[:, 2] // pools[0].page_bytes).tolist() == runs
    assert set(pairs_of_bytes(plan)) == set(pairs_of_bytes(plan_ranges(copy)))


@pytest.mark.parametrize(("source", "dest"), [ARRANGEMENTS, ARRANGEMENTS[::-1]])
def test_whole_pages_are_for_page_major_pools(source: Arrangement, dest: Arrangement) -> None:
    copy = check_copy(describe(source), [0], describe(dest), [1], 0, 3)
    with pytest.raises(InvalidInput, match="whole pages of a layer-major"):
        plan_pages(copy)


def test_ranges_that_overlap_are_refused() -> None:
    pool, other = describe("page-major"), describe("page-major")
    with pytest.raises(InvalidInput, match="a destination page stands twice"):
        check_copy(pool, [0, 1], other, [4, 4], 0, 6)
    with pytest.raises(InvalidInput, match="a page of one pool is source and destination"):
        check_copy(pool, [0, 1], pool, [2, 1], 0, 6)
    check_copy(pool, [0, 1], pool, [2, 3], 0, 6)
    check_copy(pool, [1, 1], other, [2, 3], 0, 6)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_steps_stay_within_32_bits(arrangement: Arrangement) -> None:
    huge = describe(arrangement, page_rows=64, pages=2**23)
    small = describe("page-major", page_rows=64)
    for source, dest in ((huge, small), (small, huge)):
        copy = check_copy(source, [0], dest, [0], 0, 1)
        with pytest.raises(InvalidInput, match="rows over all layers, most are 2147483647"):
            plan_rows(copy)
    largest = describe(arrangement, page_rows=64, pages=2**23 - 1)
    plan = plan_rows(check_copy(largest, [0], small, [0], 0, 1))
    assert max(plan.source_page_step, plan.source_step) < 2**31
