"""`staged`: gather into contiguous memory, one peer copy, scatter; in chunks that overlap.

    source GPU   gather 0 │ gather 1 │ gather 2 …
    copy engine           │ copy 0   │ copy 1   …
    dest GPU                         │ scatter 0 …

A chunk is some slabs of some pages, `[slabs][pages][page_rows][row]` in staging memory. Only the
copy engine crosses the link, in one long run a chunk: what a PCIe link needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from duplet_core.errors import InvalidInput, Reason
from duplet_kvproxy.gpu_queue import (
    PAGE_NUMBER_BYTES,
    Flight,
    GpuEvent,
    GpuQueue,
    PageTable,
    queue_copy,
)
from duplet_kvproxy.kernel_build import LaunchedRows, MoveRows, RowShape
from duplet_kvproxy.transport import MAX_IN_FLIGHT, GpuPool, TransportName
from duplet_memory.cuda_driver import Device
from duplet_memory.handle_cumem import allocate_shared
from duplet_memory.plan import RowCopy
from duplet_memory.row_plan import RowPlan, plan_rows

CHUNK_BYTES = 32 << 20
STAGES = 4
"""Chunks on their way at once: one at each of the three steps, and one to spare."""
FIRST_TABLE_PAGES = 4096
PROGRAMS_PER_SM = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slabs [first_slab, first_slab + slabs) of pages [first_page, first_page + pages): of them
    rows [first_row, first_row + rows), counted from `first_page`'s first."""

    first_slab: int
    slabs: int
    first_page: int
    pages: int
    first_row: int
    rows: int


def split_chunks(plan: RowPlan, chunk_bytes: int) -> Iterator[Chunk]:
    """Cut a copy into chunks whose pages take at most `chunk_bytes`.

    Raises:
        InvalidInput: one page of one slab is larger.
    """
    slab_bytes = plan.page_rows * plan.row_bytes
    if slab_bytes > chunk_bytes:
        raise InvalidInput(
            Reason.TRANSFER_FAILED,
            f"staged: {plan.page_rows} rows a page of {plan.row_bytes} bytes, a stage has "
            f"{chunk_bytes}",
        )
    pages, end_row = len(plan.source_pages), plan.first_row + plan.rows
    most_pages = min(pages, chunk_bytes // slab_bytes)
    for first_page in range(0, pages, most_pages):
        count = min(most_pages, pages - first_page)
        before = first_page * plan.page_rows
        first_row = max(0, plan.first_row - before)
        rows = min(end_row - before, count * plan.page_rows) - first_row
        most_slabs = min(plan.slabs, chunk_bytes // (count * slab_bytes))
        for first_slab in range(0, plan.slabs, most_slabs):
            slabs = min(most_slabs, plan.slabs - first_slab)
            yield Chunk(first_slab, slabs, first_page, count, first_row, rows)


class _Side:
    """What staging needs on one GPU. Owns its stream, staging memory and identity table."""

    def __init__(self, device: Device, reach: tuple[Device, ...]) -> None:
        self.device = device
        self.queue = GpuQueue(device)
        self._memory = allocate_shared(device, reach, STAGES * CHUNK_BYTES)
        self._identity = PageTable(device, FIRST_TABLE_PAGES)
        self._identity_pages = 0
        self._identity_address = 0
        self._kernels: dict[int, MoveRows] = {}

    def stage(self, index: int) -> int:
        """Address of one staging buffer."""
        return self._memory.start + index * CHUNK_BYTES

    def kernel(self, row_bytes: int) -> MoveRows:
        """The kernel for rows of so many bytes; compiled at first use."""
        if row_bytes not in self._kernels:
            shape = RowShape.of(row_bytes)
            self._kernels[row_bytes] = MoveRows(shape, self.device, PROGRAMS_PER_SM)
        return self._kernels[row_bytes]

    def identity(self, pages: int) -> int:
        """Address of the numbers 0, 1, … of at least so many pages. A table that changes waits
        for this GPU's stream, whose launches read the old one."""
        if pages > self._identity_pages:
            self.device.use()
            done = GpuEvent(self.device)
            self.queue.record(done)
            done.wait()
            written = max(2 * pages, FIRST_TABLE_PAGES)
            self._identity_pages = 0  # whatever fails from here on, no launch takes the old one
            (self._identity_address,) = self._identity.write(np.arange(written, dtype=np.int64))
            self._identity_pages = written
        return self._identity_address


class StagedMover:
    """Three streams and two rings of staging buffers. Owns them; a buffer is used again only
    behind the event of the step that read it last."""

    name: TransportName = "staged"

    def __init__(self, source: Device, dest: Device) -> None:
        reach = (source,) if source is dest else (source, dest)
        self._from, self._to = _Side(source, reach), _Side(dest, reach)
        self._link = GpuQueue(source)
        self._stages = cycle(range(STAGES))
        self._gathered = [GpuEvent(source) for _ in range(STAGES)]
        self._copied = [GpuEvent(source) for _ in range(STAGES)]
        self._scattered = [GpuEvent(dest) for _ in range(STAGES)]
        self._free = [
            (
                GpuEvent(dest),
                PageTable(source, FIRST_TABLE_PAGES),
                PageTable(dest, FIRST_TABLE_PAGES),
            )
            for _ in range(MAX_IN_FLIGHT)
        ]

    def start(self, copy: RowCopy, source: GpuPool, dest: GpuPool) -> Flight:
        """As `GpuTransport.start`."""
        plan = plan_rows(copy)
        chunks = list(split_chunks(plan, CHUNK_BYTES))
        event, from_table, to_table = slot = self._free.pop()
        (from_pages,) = from_table.write(plan.source_pages)
        (to_pages,) = to_table.write(plan.dest_pages)
        from_base = source.address(self._from.device) + source.description.offset
        to_base = dest.address(self._to.device) + dest.description.offset
        for chunk in chunks:
            stage = next(self._stages)
            self._gather(plan, chunk, stage, from_base, from_pages)
            self._carry(plan, chunk, stage)
            self._scatter(plan, chunk, stage, to_base, to_pages)
        self._to.queue.record(event)
        return Flight(event, lambda: self._free.append(slot))

    def _gather(self, plan: RowPlan, chunk: Chunk, stage: int, base: int, pages: int) -> None:
        side = self._from
        identity = side.identity(chunk.pages)
        side.queue.wait_for(self._copied[stage])
        skipped = chunk.first_slab * plan.source_step * plan.row_bytes
        side.kernel(plan.row_bytes).launch(
            side.queue.handle,
            LaunchedRows(
                base + skipped,
                side.stage(stage),
                pages + PAGE_NUMBER_BYTES * chunk.first_page,
                identity,
                plan.page_rows,
                chunk.first_row,
                chunk.rows,
                chunk.slabs,
                plan.source_page_step,
                plan.page_rows,
                plan.source_step,
                chunk.pages * plan.page_rows,
            ),
        )
        side.queue.record(self._gathered[stage])

    def _carry(self, plan: RowPlan, chunk: Chunk, stage: int) -> None:
        self._link.wait_for(self._gathered[stage])
        self._link.wait_for(self._scattered[stage])
        size = chunk.slabs * chunk.pages * plan.page_rows * plan.row_bytes
        queue_copy(self._link, self._to.stage(stage), self._from.stage(stage), size)
        self._link.record(self._copied[stage])

    def _scatter(self, plan: RowPlan, chunk: Chunk, stage: int, base: int, pages: int) -> None:
        side = self._to
        identity = side.identity(chunk.pages)
        side.queue.wait_for(self._copied[stage])
        skipped = chunk.first_slab * plan.dest_step * plan.row_bytes
        side.kernel(plan.row_bytes).launch(
            side.queue.handle,
            LaunchedRows(
                side.stage(stage),
                base + skipped,
                identity,
                pages + PAGE_NUMBER_BYTES * chunk.first_page,
                plan.page_rows,
                chunk.first_row,
                chunk.rows,
                chunk.slabs,
                plan.page_rows,
                plan.dest_page_step,
                chunk.pages * plan.page_rows,
                plan.dest_step,
            ),
        )
        side.queue.record(self._scattered[stage])
