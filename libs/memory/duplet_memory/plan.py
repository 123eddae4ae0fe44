"""Copy plans: which bytes of one pool go where in another.

A plan is made by whoever knows both layouts and executed by whatever moves bytes: `execute`
here on a CPU, a copy engine or a kernel on GPUs. Its ranges are as long as both layouts
allow: a whole page between page-major pools, one slab's rows otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason, require
from duplet_memory.layout import PoolDescription

_SHARED_FIELDS = ("layers", "kv", "page_rows", "kv_heads", "head_dim", "dtype")


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies that may run in any order: no two write the same byte."""

    ranges: NDArray[np.int64]
    """[n, 3]: source offset, destination offset, bytes; offsets count from the allocation's
    first byte. Owned by the plan, never changed."""
    source_bytes: int
    """Size of the source allocation."""
    dest_bytes: int
    """Size of the destination allocation."""

    @property
    def copied_bytes(self) -> int:
        return int(self.ranges[:, 2].sum())


def plan_copy(
    source: PoolDescription,
    source_pages: Sequence[int],
    dest: PoolDescription,
    dest_pages: Sequence[int],
    start_row: int,
    count: int,
) -> CopyPlan:
    """Plan the copy of rows [start_row, start_row + count) of a sequence.

    Both page lists are for the same rows, one for one; the first page of each holds row
    `start_row - start_row % page_rows`. Rows of these pages outside the range stay untouched.

    Raises:
        InvalidInput: the pools do not hold the same kind of rows, or the pages do not fit.
    """
    for field in _SHARED_FIELDS:
        have, want = getattr(source, field), getattr(dest, field)
        if have != want:
            raise _refuse(f"{field} is {have!r} in the source and {want!r} in the destination")
    page_rows = source.page_rows
    if start_row < 0 or count < 1:
        raise _refuse(f"start_row {start_row}, count {count}")
    first = start_row % page_rows
    wanted = -(-(first + count) // page_rows)
    from_pages = _check_pages("source", source_pages, source, wanted)
    to_pages = _check_pages("destination", dest_pages, dest, wanted)
    if len(set(dest_pages)) != wanted:
        raise _refuse(f"a destination page stands twice in {list(dest_pages)}")

    row_starts = np.zeros(wanted, dtype=np.int64)
    row_starts[0] = first
    row_ends = np.full(wanted, page_rows, dtype=np.int64)
    row_ends[-1] = first + count - (wanted - 1) * page_rows
    ranges = np.stack(
        [
            _offsets(source, from_pages, row_starts),
            _offsets(dest, to_pages, row_starts),
            np.broadcast_to(
                ((row_ends - row_starts) * source.row_bytes)[:, None, None],
                (wanted, source.layers, source.kv),
            ),
        ],
        axis=-1,
    )
    if source.arrangement == dest.arrangement == "layer-major":
        # Here a run goes on from page to page, not from layer to layer.
        ranges = ranges.transpose(1, 2, 0, 3)
    merged = _merge(ranges.reshape(-1, 3))
    return CopyPlan(merged, source.total_bytes, dest.total_bytes)


def execute(plan: CopyPlan, source: NDArray[np.uint8], dest: NDArray[np.uint8]) -> None:
    """Run the plan on the CPU. `source` and `dest` are whole allocations (`Pool.memory`), lent
    for the call. May run in a thread: NumPy lets go of the GIL for copies of this size.
    """
    require(source.dtype == np.uint8 and dest.dtype == np.uint8, "buffers are uint8")
    require(source.size == plan.source_bytes, f"source of {source.size} bytes")
    require(dest.size == plan.dest_bytes, f"destination of {dest.size} bytes")
    for source_offset, dest_offset, size in plan.ranges.tolist():
        dest[dest_offset : dest_offset + size] = source[source_offset : source_offset + size]


def _refuse(detail: str) -> InvalidInput:
    return InvalidInput(Reason.TRANSFER_FAILED, f"copy plan: {detail}")


def _check_pages(
    name: str, pages: Sequence[int], description: PoolDescription, wanted: int
) -> NDArray[np.int64]:
    if len(pages) != wanted:
        raise _refuse(f"{len(pages)} {name} pages for rows that lie in {wanted}")
    for page in pages:
        if not 0 <= page < description.pages:
            raise _refuse(f"{name} page {page} is not in a pool of {description.pages}")
    return np.asarray(pages, dtype=np.int64)


def _offsets(
    description: PoolDescription, pages: NDArray[np.int64], row_starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Byte offsets [pages, layers, 2] of the first row to copy in each slab."""
    page_stride, layer_stride, kv_stride = description.slab_strides
    slabs = (
        pages[:, None, None] * page_stride
        + np.arange(description.layers)[None, :, None] * layer_stride
        + np.arange(description.kv)[None, None, :] * kv_stride
    )
    offsets: NDArray[np.int64] = (
        description.offset
        + slabs * description.slab_bytes
        + row_starts[:, None, None] * description.row_bytes
    )
    return offsets


def _merge(ranges: NDArray[Any]) -> NDArray[np.int64]:
    """Join ranges that continue their predecessor on both sides."""
    ends = ranges[:-1, :2] + ranges[:-1, 2:]
    joined = np.all(ranges[1:, :2] == ends, axis=1)
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    merged = ranges[heads].astype(np.int64)
    merged[:, 2] = np.add.reduceat(ranges[:, 2], heads)
    merged.flags.writeable = False
    return merged
