"""`move_rows` against plain torch indexing. Run by test_kernels_interpreted.py."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from duplet_core.errors import InvalidInput
from duplet_kvproxy.kernel_build import RowShape
from duplet_kvproxy.kernel_move_rows import move_rows
from duplet_kvproxy.move_staged import split_chunks
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import RowCopy, check_copy
from duplet_memory.row_plan import RowPlan, plan_rows
from duplet_pages.engine_config import Arrangement

WORD_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16}
ARRANGEMENTS: tuple[Arrangement, ...] = ("page-major", "layer-major")
MAP_NORESERVE = 0x4000
"""Python's `mmap` names it from 3.13 on."""
SPLITS = 2
"""Programs that share the slabs of a block of rows: fewer than slabs, so that they walk."""
MOST_WALKERS = 2
"""Programs that share the blocks of rows: fewer than blocks where there are many."""


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
    pages: tuple[torch.Tensor, torch.Tensor],
    rows: tuple[int, int, int],
    slabs: int,
    steps: tuple[int, int, int, int],
) -> None:
    """`rows`: rows of a page, first row, rows to move. `steps`: from page to page, then from slab
    to slab, the source's first."""
    block_rows = min(shape.block_rows, 8)
    walkers = min(MOST_WALKERS, -(-rows[2] // block_rows))
    move_rows[(walkers * SPLITS,)](
        source,
        dest,
        *pages,
        *rows,
        slabs,
        *steps,
        walkers,
        ROW_WORDS=shape.row_words,
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=shape.block_words,
    )


def moved(case: Case) -> torch.Tensor:
    """The destination after the kernel."""
    plan, result = case.plan, case.dest.clone()
    pages = torch.tensor(plan.source_pages), torch.tensor(plan.dest_pages)
    rows = (plan.page_rows, plan.first_row, plan.rows)
    steps = (plan.source_page_step, plan.dest_page_step, plan.source_step, plan.dest_step)
    launch(case.shape, case.source, result, pages, rows, plan.slabs, steps)
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


def make_untouched(pool: PoolDescription) -> torch.Tensor:
    """A pool's words, zero; takes memory only where it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, pool.pages * pool.page_bytes, flags=flags)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.int16))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("large", ["source", "dest"])
def test_a_pool_of_more_words_than_32_bits_count(arrangement: Arrangement, large: str) -> None:
    sizes = {"layers": 4, "page_rows": 16, "kv_heads": 1, "head_dim": 3}
    pools = [
        describe_pool(**sizes, dtype="bfloat16", pages=pages, arrangement=arrangement)
        for pages in ((6_000_000, 8) if large == "source" else (8, 6_000_000))
    ]
    assert max(pool.pages * pool.page_bytes // 2 for pool in pools) > 2**31 + 2**30 // 8
    pages = [[pool.pages - 1, 0, pool.pages - 3] for pool in pools]
    words = [make_untouched(pool) for pool in pools]
    views = [by_row(each, pool) for each, pool in zip(words, pools, strict=True)]
    new = torch.randint(1, 30_000, views[0][pages[0]].shape).to(torch.int16)
    views[0][pages[0]] = new
    plan = plan_rows(check_copy(pools[0], pages[0], pools[1], pages[1], 5, 40))
    tables = torch.tensor(plan.source_pages), torch.tensor(plan.dest_pages)
    rows = (plan.page_rows, plan.first_row, plan.rows)
    steps = (plan.source_page_step, plan.dest_page_step, plan.source_step, plan.dest_step)
    launch(RowShape.of(pools[0].row_bytes), words[0], words[1], tables, rows, plan.slabs, steps)
    new[0, :5] = new[2, 45 % 16 :] = 0
    assert torch.equal(views[1][pages[1]], new)


@pytest.mark.parametrize("chunk_rows", [3, 12, 1000])
@pytest.mark.parametrize(("start", "count"), [(1, 14), (3, 12), (2, 1), (5, 2)])
def test_staged_chunks_gather_and_scatter(chunk_rows: int, start: int, count: int) -> None:
    """What `staged` does, chunk by chunk, with staging memory in between."""
    case = make_case(("layer-major", "page-major"), 3, start, count)
    plan, words = case.plan, case.shape.row_words
    chunk_bytes = chunk_rows * plan.row_bytes
    result = case.dest.clone()
    for chunk in split_chunks(plan, chunk_bytes):
        step = chunk.pages * plan.page_rows
        items = chunk.slabs * step * words
        assert items * case.shape.word_bytes <= chunk_bytes
        stage = torch.full((items,), -1, dtype=result.dtype)
        pages = slice(chunk.first_page, chunk.first_page + chunk.pages)
        rows = (plan.page_rows, chunk.first_row, chunk.rows)
        identity = torch.arange(chunk.pages)
        from_pages = torch.tensor(plan.source_pages[pages]), identity
        skipped = chunk.first_slab * plan.source_step * words
        steps = (plan.source_page_step, plan.page_rows, plan.source_step, step)
        launch(case.shape, case.source[skipped:], stage, from_pages, rows, chunk.slabs, steps)
        to_pages = identity, torch.tensor(plan.dest_pages[pages])
        skipped = chunk.first_slab * plan.dest_step * words
        steps = (plan.page_rows, plan.dest_page_step, step, plan.dest_step)
        launch(case.shape, stage, result[skipped:], to_pages, rows, chunk.slabs, steps)
    assert torch.equal(result, expected_dest(case))


def test_a_page_that_no_stage_holds_is_refused() -> None:
    case = make_case(("layer-major", "page-major"), 3, 0, 3)
    with pytest.raises(InvalidInput, match="staged: 3 rows a page of 24 bytes, a stage has 48"):
        next(split_chunks(case.plan, 48))
