"""`move_rows` against plain torch indexing. Run by test_kernels_interpreted.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from duplet_kvproxy.kernel_build import RowShape
from duplet_kvproxy.kernel_move_rows import move_rows
from duplet_kvproxy.move_staged import split_chunks
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import RowCopy, check_copy
from duplet_memory.row_plan import RowPlan, plan_rows
from duplet_pages.engine_config import Arrangement

WORD_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16}
ARRANGEMENTS: tuple[Arrangement, ...] = ("page-major", "layer-major")
SPLITS = 2
"""Programs that share the slabs of a block of rows: fewer than slabs, so that they walk."""


@dataclass(frozen=True)
class Case:
    """A pair of pools with random content, and rows to move between them."""

    copy: RowCopy
    plan: RowPlan
    shape: RowShape
    source: torch.Tensor
    """Words, in the source's arrangement; as is `dest`."""
    dest: torch.Tensor


def make_case(
    arrangements: tuple[Arrangement, Arrangement],
    page_rows: int,
    start: int,
    count: int,
    kv_heads: int = 2,
    head_dim: int = 6,
) -> Case:
    pages = 7 if page_rows > 2 else 64
    pools = [
        describe_pool(
            layers=3,
            page_rows=page_rows,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype="bfloat16",
            pages=pages,
            arrangement=arrangement,
        )
        for arrangement in arrangements
    ]
    chance = torch.Generator().manual_seed(start * 1000 + count)
    wanted = -(-(start % page_rows + count) // page_rows)
    lists = [torch.randperm(pages, generator=chance)[:wanted].tolist() for _ in range(2)]
    copy = check_copy(pools[0], lists[0], pools[1], lists[1], start, count)
    shape = RowShape.of(pools[0].row_bytes)
    dtype = WORD_DTYPES[shape.word_bytes]
    words = [
        torch.randint(0, 30_000, (p.pages * p.page_bytes // shape.word_bytes,), generator=chance)
        for p in pools
    ]
    return Case(copy, plan_rows(copy), shape, words[0].to(dtype), words[1].to(dtype))


def by_row(words: torch.Tensor, pool: PoolDescription) -> torch.Tensor:
    """A view [pages, page_rows, slabs, row words] of a pool in either arrangement."""
    if pool.arrangement == "page-major":
        return words.view(pool.pages, pool.slabs, pool.page_rows, -1).transpose(1, 2)
    return words.view(pool.slabs, pool.pages, pool.page_rows, -1).permute(1, 2, 0, 3)


def expected_dest(case: Case) -> torch.Tensor:
    """The destination after the copy, by plain indexing of whole pages and a mask of rows."""
    copy = case.copy
    result = case.dest.clone()
    rows = torch.arange(len(copy.source_pages) * copy.source.page_rows)
    moved = (rows >= copy.first_row) & (rows < copy.first_row + copy.count)
    to_pages, from_pages = torch.tensor(copy.dest_pages), torch.tensor(copy.source_pages)
    there = by_row(result, copy.dest)
    new = by_row(case.source, copy.source)[from_pages]
    mask = moved.view(len(to_pages), -1, 1, 1)
    there[to_pages] = torch.where(mask, new, there[to_pages])
    return result


def launch(
    shape: RowShape,
    source: torch.Tensor,
    dest: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    slabs: int,
    steps: tuple[int, int],
) -> None:
    block_rows = min(shape.block_rows, 8)
    move_rows[(-(-len(places[0]) // block_rows) * SPLITS,)](
        source,
        dest,
        *places,
        len(places[0]),
        slabs,
        *steps,
        ROW_WORDS=shape.row_words,
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=shape.block_words,
    )


def moved(case: Case) -> torch.Tensor:
    """The destination after the kernel."""
    plan, result = case.plan, case.dest.clone()
    places = torch.tensor(plan.source_places), torch.tensor(plan.dest_places)
    steps = (plan.source_step, plan.dest_step)
    launch(case.shape, case.source, result, places, plan.slabs, steps)
    return result


@pytest.mark.parametrize("source", ARRANGEMENTS)
@pytest.mark.parametrize("dest", ARRANGEMENTS)
@pytest.mark.parametrize(
    ("page_rows", "start", "count"),
    [(1, 0, 9), (3, 0, 9), (3, 4, 7), (16, 0, 33), (16, 15, 2), (16, 5, 1), (64, 60, 70)],
)
def test_rows_move_and_nothing_else(
    source: Arrangement, dest: Arrangement, page_rows: int, start: int, count: int
) -> None:
    case = make_case((source, dest), page_rows, start, count)
    assert not torch.equal(case.dest, expected_dest(case))
    assert torch.equal(moved(case), expected_dest(case))


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 1), (1, 3), (3, 2), (1, 8), (2, 32)])
def test_odd_row_widths(kv_heads: int, head_dim: int) -> None:
    case = make_case(("page-major", "layer-major"), 3, 2, 8, kv_heads, head_dim)
    assert torch.equal(moved(case), expected_dest(case))


@pytest.mark.parametrize("chunk_rows", [4, 12, 1000])
def test_staged_chunks_gather_and_scatter(chunk_rows: int) -> None:
    """What `staged` does, chunk by chunk, with staging memory in between."""
    case = make_case(("layer-major", "page-major"), 3, 1, 14)
    plan, words = case.plan, case.shape.row_words
    chunk_bytes = chunk_rows * plan.row_bytes
    result = case.dest.clone()
    for chunk in split_chunks(plan.rows, plan.slabs, plan.row_bytes, chunk_bytes):
        items = chunk.slabs * chunk.rows * words
        assert items * case.shape.word_bytes <= chunk_bytes
        stage = torch.full((items,), -1, dtype=result.dtype)
        rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
        identity = torch.arange(chunk.rows, dtype=torch.int32)
        from_places = torch.tensor(plan.source_places[rows]), identity
        skipped = chunk.first_slab * plan.source_step * words
        steps = (plan.source_step, chunk.rows)
        launch(case.shape, case.source[skipped:], stage, from_places, chunk.slabs, steps)
        to_places = identity, torch.tensor(plan.dest_places[rows])
        skipped = chunk.first_slab * plan.dest_step * words
        steps = (chunk.rows, plan.dest_step)
        launch(case.shape, stage, result[skipped:], to_places, chunk.slabs, steps)
    assert torch.equal(result, expected_dest(case))
