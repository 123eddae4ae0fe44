"""Copy plans: which bytes of one pool go where in another.

A copy is checked once (`check_copy`) and then planned for whatever moves bytes: as ranges for
`execute` here on a CPU, as whole pages for a copy engine, as rows for a kernel
(`duplet_memory.row_plan`). Ranges are as long as both layouts allow: a whole page between
page-major pools, one slab's rows otherwise.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason, require
from duplet_memory.layout import PoolDescription

_SHARED_FIELDS = ("layers", "kv", "page_rows", "kv_heads", "head_dim", "dtype")
_shared_fields = attrgetter(*_SHARED_FIELDS)


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


@dataclass(slots=True)  # not frozen: made for every copy, and that takes three times as long
class RowCopy:
    """A checked copy of consecutive rows, before anyone has chosen how to move them. Never
    changed."""

    source: PoolDescription
    source_pages: NDArray[np.int64]
    """[pages], owned here, never changed; so are `dest_pages`."""
    dest: PoolDescription
    dest_pages: NDArray[np.int64]
    first_row: int
    """The first row to copy, counted from the first page's first."""
    count: int

    @property
    def copied_bytes(self) -> int:
        """Bytes of the rows themselves, in all layers."""
        return self.count * self.source.slabs * self.source.row_bytes


def check_copy(
    source: PoolDescription,
    source_pages: Sequence[int],
    dest: PoolDescription,
    dest_pages: Sequence[int],
    start_row: int,
    count: int,
) -> RowCopy:
    """Check the copy of rows [start_row, start_row + count) of a sequence.

    Both page lists are for the same rows, one for one; the first page of each holds row
    `start_row - start_row % page_rows`.

    Raises:
        InvalidInput: the pools do not hold the same kind of rows, the pages do not fit, or a
            byte would be written twice or be read and written.
    """
    have, want = _shared_fields(source), _shared_fields(dest)
    if have != want:
        field, have_it, want_it = next(
            each for each in zip(_SHARED_FIELDS, have, want, strict=True) if each[1] != each[2]
        )
        raise _refuse(f"{field} is {have_it!r} in the source and {want_it!r} in the destination")
    if start_row < 0 or count < 1:
        raise _refuse(f"start_row {start_row}, count {count}")
    first = start_row % source.page_rows
    wanted = -(-(first + count) // source.page_rows)
    from_pages = _check_pages("source", source_pages, source, wanted)
    to_pages = _check_pages("destination", dest_pages, dest, wanted)
    named = np.zeros(dest.pages, dtype=np.bool_)
    named[to_pages] = True
    if np.count_nonzero(named) != wanted:
        raise _refuse(f"a destination page stands twice in {list(dest_pages)}")
    if source.pool_id == dest.pool_id and set(source_pages) & set(dest_pages):
        raise _refuse("a page of one pool is source and destination")
    return RowCopy(source, from_pages, dest, to_pages, first, count)


def plan_copy(
    source: PoolDescription,
    source_pages: Sequence[int],
    dest: PoolDescription,
    dest_pages: Sequence[int],
    start_row: int,
    count: int,
) -> CopyPlan:
    """As `check_copy`, then `plan_ranges`."""
    return plan_ranges(check_copy(source, source_pages, dest, dest_pages, start_row, count))


def plan_ranges(copy: RowCopy) -> CopyPlan:
    """The copy's exact bytes. Rows of its pages outside the range stay untouched."""
    source, dest, wanted = copy.source, copy.dest, len(copy.source_pages)
    row_starts = np.zeros(wanted, dtype=np.int64)
    row_starts[0] = copy.first_row
    row_ends = np.full(wanted, source.page_rows, dtype=np.int64)
    row_ends[-1] = copy.first_row + copy.count - (wanted - 1) * source.page_rows
    ranges = np.stack(
        [
            _offsets(source, copy.source_pages, row_starts),
            _offsets(dest, copy.dest_pages, row_starts),
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


def plan_pages(copy: RowCopy) -> CopyPlan:
    """The copy rounded out to whole pages, between page-major pools: a range for every run of
    pages that follow each other in both pools.

    The rows beside the range are the same sequence's: those before it are there already and
    are the same on both sides, those after it are written again by the copy that brings them.
    So copies of one transfer run in order, and destination pages belong to it alone.

    Raises:
        InvalidInput: a pool is not page-major.
    """
    source, dest = copy.source, copy.dest
    for name, pool in (("source", source), ("destination", dest)):
        if pool.arrangement != "page-major":
            raise _refuse(f"whole pages of a {pool.arrangement} {name}")
    from_pages, to_pages = copy.source_pages, copy.dest_pages
    sizes: NDArray[np.int64] | int = source.page_bytes
    goes_on = (from_pages[1:] - from_pages[:-1] == 1) & (to_pages[1:] - to_pages[:-1] == 1)
    if goes_on.any():
        heads = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        sizes = np.diff(heads, append=len(from_pages)) * source.page_bytes
        from_pages, to_pages = from_pages[heads], to_pages[heads]
    columns = np.empty((3, len(from_pages)), dtype=np.int64)
    np.multiply(from_pages, source.page_bytes, out=columns[0])
    np.multiply(to_pages, dest.page_bytes, out=columns[1])
    columns[0] += source.offset
    columns[1] += dest.offset
    columns[2] = sizes
    columns.flags.writeable = False
    return CopyPlan(columns.T, source.total_bytes, dest.total_bytes)


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
    # A quarter of the time of np.asarray, and this is on the way of every copy.
    numbers = np.frombuffer(_packing(wanted).pack(*pages), dtype=np.int64)
    if (
        np.maximum.reduce(numbers.view(np.uint64)) >= description.pages
    ):  # as unsigned, a negative one is huge
        foreign = numbers[(numbers < 0) | (numbers >= description.pages)]
        raise _refuse(f"{name} page {foreign[0]} is not in a pool of {description.pages}")
    return numbers


@functools.lru_cache(maxsize=1024)
def _packing(count: int) -> struct.Struct:
    return struct.Struct(f"={count}q")


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
