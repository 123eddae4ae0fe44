"""Copy plans for kernels: one place a row on either side, and one step from slab to slab.

In both arrangements the rows of slab s lie `s * step` rows after those of slab 0, so row r of
slab s of a pool is at `base + (places[r] + s * step) * row_bytes`. Contiguous staging memory
`[slabs][rows][row]` is the same with `places = 0..rows` and `step = rows`.
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
    """Every row of every slab, to be copied in any order. Places and steps count rows."""

    source_places: NDArray[np.int32]
    """[rows], of slab 0; owned by the plan, never changed, as is `dest_places`."""
    dest_places: NDArray[np.int32]
    source_step: int
    dest_step: int
    slabs: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return len(self.source_places)

    @property
    def copied_bytes(self) -> int:
        return self.rows * self.slabs * self.row_bytes


def plan_rows(copy: RowCopy) -> RowPlan:
    """Plan a checked copy row by row. Rows outside its range stay untouched.

    Raises:
        InvalidInput: a pool has more rows than a place can say.
    """
    rows = slice(copy.first_row, copy.first_row + copy.count)
    return RowPlan(
        _places(copy.source, copy.source_pages)[rows],
        _places(copy.dest, copy.dest_pages)[rows],
        copy.source.slab_step * copy.source.page_rows,
        copy.dest.slab_step * copy.dest.page_rows,
        copy.source.slabs,
        copy.source.row_bytes,
    )


def _places(pool: PoolDescription, pages: NDArray[np.int64]) -> NDArray[np.int32]:
    """Of every row of `pages`, in slab 0."""
    if pool.pages * pool.slabs * pool.page_rows >= MOST_PLACES:
        raise InvalidInput(
            Reason.TRANSFER_FAILED,
            f"copy plan: pool {pool.pool_id} has {pool.pages * pool.slabs * pool.page_rows} "
            f"rows over all layers, most are {MOST_PLACES - 1}",
        )
    first = (pages * (pool.slab_strides[0] * pool.page_rows)).astype(np.int32)
    in_page: NDArray[np.int32] = np.arange(pool.page_rows, dtype=np.int32)
    places = np.add(first[:, np.newaxis], in_page, dtype=np.int32).reshape(-1)
    places.flags.writeable = False
    return places
