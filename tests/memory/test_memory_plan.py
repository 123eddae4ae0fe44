from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from duplet_core.errors import InvalidInput, InvariantError
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import execute, plan_copy
from duplet_memory.pool import create_pool
from duplet_pages.engine_config import Arrangement

ARRANGEMENTS: tuple[Arrangement, ...] = ("page-major", "layer-major")
LAYERS, PAGE_ROWS = 2, 4


def describe(
    arrangement: Arrangement, pages: int = 6, dtype: str = "float32", head_dim: int = 8
) -> PoolDescription:
    return describe_pool(
        layers=LAYERS,
        page_rows=PAGE_ROWS,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        pages=pages,
        arrangement=arrangement,
    )


def row_view(description: PoolDescription, array: np.ndarray, page: int, row: int) -> np.ndarray:
    """All layers' keys and values of one row: [layers, 2, heads, dim]."""
    if description.arrangement == "page-major":
        return array[page, :, :, row]
    return array[:, :, page * PAGE_ROWS + row]


@pytest.mark.parametrize(("source_order", "dest_order"), list(product(ARRANGEMENTS, ARRANGEMENTS)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exactly_the_named_rows_are_copied(
    source_order: Arrangement, dest_order: Arrangement, dtype: str
) -> None:
    rng = np.random.default_rng(11)
    source = create_pool(describe(source_order, 7, dtype))
    dest = create_pool(describe(dest_order, 9, dtype))
    for start_row in range(2 * PAGE_ROWS + 1):
        for count in range(1, 3 * PAGE_ROWS):
            pages = -(-(start_row % PAGE_ROWS + count) // PAGE_ROWS)
            source_pages = rng.permutation(7)[:pages].tolist()
            dest_pages = rng.permutation(9)[:pages].tolist()
            source.memory[4096:] = rng.integers(0, 256, source.memory.size - 4096)
            dest.memory[4096:] = rng.integers(0, 256, dest.memory.size - 4096)
            # As bits: random bytes may be a NaN, which equals nothing.
            bits = np.uint32 if dtype == "float32" else np.uint16
            expected = dest.array.copy().view(bits)
            for index in range(start_row % PAGE_ROWS, start_row % PAGE_ROWS + count):
                page, row = divmod(index, PAGE_ROWS)
                row_view(dest.description, expected, dest_pages[page], row)[:] = row_view(
                    source.description, source.array.view(bits), source_pages[page], row
                )
            plan = plan_copy(
                source.description, source_pages, dest.description, dest_pages, start_row, count
            )
            execute(plan, source.memory, dest.memory)
            assert (dest.array.view(bits) == expected).all()
            assert plan.copied_bytes == count * LAYERS * 2 * source.description.row_bytes
    source.close()
    dest.close()


def test_whole_pages_are_single_ranges_between_page_major_pools() -> None:
    source, dest = describe("page-major"), describe("page-major")
    plan = plan_copy(source, [5, 0, 3], dest, [1, 4, 2], 0, 3 * PAGE_ROWS)
    size = source.page_bytes
    expected = [
        [source.offset + 5 * size, dest.offset + 1 * size, size],
        [source.offset + 0 * size, dest.offset + 4 * size, size],
        [source.offset + 3 * size, dest.offset + 2 * size, size],
    ]
    assert plan.ranges.tolist() == expected


def test_pages_that_follow_each_other_in_both_pools_are_one_range() -> None:
    source, dest = describe("page-major"), describe("page-major")
    plan = plan_copy(source, [1, 2], dest, [3, 4], 0, 2 * PAGE_ROWS)
    assert plan.ranges[:, 2].tolist() == [2 * source.page_bytes]
    source, dest = describe("layer-major"), describe("layer-major")
    plan = plan_copy(source, [1, 2], dest, [3, 4], 0, 2 * PAGE_ROWS)
    assert plan.ranges[:, 2].tolist() == [2 * source.slab_bytes] * (LAYERS * 2)


def test_ragged_ends_touch_their_rows_only() -> None:
    source, dest = describe("page-major"), describe("page-major")
    plan = plan_copy(source, [0, 1, 2], dest, [0, 2, 4], 3, 6)
    sizes = sorted(plan.ranges[:, 2].tolist())
    row = source.row_bytes
    assert sizes == [row] * (2 * LAYERS * 2) + [source.page_bytes]


def test_no_two_ranges_write_the_same_byte() -> None:
    plan = plan_copy(describe("layer-major"), [4, 1, 2], describe("page-major"), [0, 5, 3], 2, 9)
    spans = sorted((dest, dest + size) for _, dest, size in plan.ranges.tolist())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.parametrize(
    ("source_pages", "dest_pages", "start_row", "count", "message"),
    [
        ([0], [0], 0, 0, "count 0"),
        ([0], [0], -1, 2, "start_row -1"),
        ([0], [0], 0, 5, "1 source pages for rows that lie in 2"),
        ([0, 1], [0], 3, 2, "1 destination pages for rows that lie in 2"),
        ([0, 1, 2], [0, 1, 2], 0, 8, "3 source pages"),
        ([6], [0], 0, 1, "source page 6 is not in a pool of 6"),
        ([0], [-1], 0, 1, "destination page -1"),
        ([0, 1], [3, 3], 0, 8, "stands twice"),
    ],
)
def test_pages_that_do_not_fit_are_refused(
    source_pages: list[int], dest_pages: list[int], start_row: int, count: int, message: str
) -> None:
    source, dest = describe("page-major"), describe("page-major")
    with pytest.raises(InvalidInput, match=message):
        plan_copy(source, source_pages, dest, dest_pages, start_row, count)


def test_a_source_page_may_stand_twice() -> None:
    source, dest = describe("page-major"), describe("page-major")
    plan = plan_copy(source, [1, 1], dest, [0, 1], 0, 8)
    assert plan.copied_bytes == 2 * source.page_bytes


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (describe("page-major", dtype="bfloat16"), "dtype"),
        (describe("page-major", head_dim=16), "head_dim"),
    ],
)
def test_pools_of_other_rows_are_refused(other: PoolDescription, field: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field} is"):
        plan_copy(describe("page-major"), [0], other, [0], 0, 1)


def test_a_plan_runs_on_its_own_pools_only() -> None:
    source, dest = describe("page-major"), describe("page-major")
    plan = plan_copy(source, [0], dest, [0], 0, 1)
    short = np.zeros(source.total_bytes - 1, dtype=np.uint8)
    whole = np.zeros(source.total_bytes, dtype=np.uint8)
    with pytest.raises(InvariantError, match="source of"):
        execute(plan, short, whole)
    with pytest.raises(InvariantError, match="destination of"):
        execute(plan, whole, short)
