"""Copy plans for kernels: one place a page on either side, and one step from slab to slab.

In both arrangements the rows of slab s lie `s * step` rows after those of slab 0, and the rows
of a page in one slab follow each other. So row q, counted from the first page's first, is in
slab s of a pool at `base + (pages[q // page_rows] + q % page_rows + s * step) * row_bytes`.
Contiguous staging memory `[slabs][rows][row]` is the same with `pages = 0, page_rows, …`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason
from duplet_memory.layout import PoolDescription
from duplet_memory.plan import RowCopy

MOST_PLACES = 2**31
"""Places are int32: a pool has fewer rows times slabs than this."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows [first_row, first_row + rows) of every slab, to be copied in any order. Places and
    steps count rows."""

    source_pages: NDArray[np.int32]
    """[pages]: the place of each page's first row in slab 0. Owned by the plan, never changed,
    as is `dest_pages`."""
    dest_pages: NDArray[np.int32]
    page_rows: int
    first_row: int
    """Counted from the first page's first."""
    rows: int
    source_step: int
    dest_step: int
    slabs: int
    row_bytes: int

    @property
    def copied_bytes(self) -> int:
        return self.rows * self.slabs * self.row_bytes


def plan_rows(copy: RowCopy) -> RowPlan:
    """Plan a checked copy row by row. Rows outside its range stay untouched.

    Raises:
        InvalidInput: a pool has more rows than a place can say.
    """
    source, dest = copy.source, copy.dest
    return RowPlan(
        _places(source, copy.source_pages),
        _places(dest, copy.dest_pages),
        source.page_rows,
        copy.first_row,
        copy.count,
        source.slab_step * source.page_rows,
        dest.slab_step * dest.page_rows,
        source.slabs,
        source.row_bytes,
    )


def _places(pool: PoolDescription, pages: NDArray[np.int64]) -> NDArray[np.int32]:
    """Of the first row of each of `pages`, in slab 0."""
    pool_rows = pool.pages * pool.slabs * pool.page_rows
    if pool_rows >= MOST_PLACES:
        raise InvalidInput(
            Reason.TRANSFER_FAILED,
            f"copy plan: pool {pool.pool_id} has {pool_rows} rows over all layers, "
            f"most are {MOST_PLACES - 1}",
        )
    places = (pages * (pool.slab_strides[0] * pool.page_rows)).astype(np.int32)
    places.flags.writeable = False
    return places
