"""Copy plans for kernels: page numbers, one step from page to page and one from slab to slab.

In both arrangements the rows of slab s lie `s * step` rows after those of slab 0, and the rows
of a page in one slab follow each other. So row q, counted from the first page's first, is in
slab s of a pool at row `pages[q // page_rows] * page_step + q % page_rows + s * step`.
Contiguous staging memory `[slabs][rows][row]` is the same with `pages = 0, 1, …` and
`page_step = page_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason
from duplet_memory.layout import PoolDescription
from duplet_memory.plan import RowCopy

MOST_ROWS = 2**31
"""Steps are int32: a pool has fewer rows times slabs than this."""


@dataclass(slots=True)  # not frozen: made for every copy, and that takes three times as long
class RowPlan:
    """Rows [first_row, first_row + rows) of every slab, to be copied in any order. Steps count
    rows. Never changed."""

    source_pages: NDArray[np.int64]
    """[pages]: the copy's, as are `dest_pages`."""
    dest_pages: NDArray[np.int64]
    page_rows: int
    first_row: int
    """Counted from the first page's first."""
    rows: int
    source_page_step: int
    """From a page to the next, in slab 0."""
    dest_page_step: int
    source_step: int
    """From a slab to the next."""
    dest_step: int
    slabs: int
    row_bytes: int

    @property
    def copied_bytes(self) -> int:
        return self.rows * self.slabs * self.row_bytes


def plan_rows(copy: RowCopy) -> RowPlan:
    """Plan a checked copy row by row. Rows outside its range stay untouched.

    Raises:
        InvalidInput: a pool has more rows than a step can say.
    """
    source, dest = copy.source, copy.dest
    page_rows, slabs = source.page_rows, source.slabs
    for pool in (source, dest):
        if pool.pages * slabs * page_rows >= MOST_ROWS:
            raise _refuse_size(pool)
    return RowPlan(
        copy.source_pages,
        copy.dest_pages,
        page_rows,
        copy.first_row,
        copy.count,
        source.slab_strides[0] * page_rows,
        dest.slab_strides[0] * page_rows,
        source.slab_step * page_rows,
        dest.slab_step * page_rows,
        slabs,
        source.row_bytes,
    )


def _refuse_size(pool: PoolDescription) -> InvalidInput:
    rows = pool.pages * pool.slabs * pool.page_rows
    return InvalidInput(
        Reason.TRANSFER_FAILED,
        f"copy plan: pool {pool.pool_id} has {rows} rows over all layers, most are {MOST_ROWS - 1}",
    )
