"""`staged`: gather into contiguous memory, one peer copy, scatter; in chunks that overlap.

    source GPU   gather 0 │ gather 1 │ gather 2 …
    copy engine           │ copy 0   │ copy 1   …
    dest GPU                         │ scatter 0 …

A chunk is some slabs of some rows, `[slabs][rows][row]` in staging memory. Only the copy engine
crosses the link, in one long run a chunk: what a PCIe link needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from duplet_kvproxy.gpu_queue import Flight, GpuEvent, GpuQueue, PlaceTable, queue_copy
from duplet_kvproxy.kernel_build import LaunchedRows, MoveRows, RowShape
from duplet_kvproxy.transport import MAX_IN_FLIGHT, GpuPool, TransportName
from duplet_memory.cuda_driver import Device
from duplet_memory.handle_cumem import allocate_shared
from duplet_memory.plan import RowCopy
from duplet_memory.row_plan import RowPlan, plan_rows

CHUNK_BYTES = 32 << 20
STAGES = 4
"""Chunks on their way at once: one at each of the three steps, and one to spare."""
FIRST_TABLE_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slabs [first_slab, first_slab + slabs) of rows [first_row, first_row + rows)."""

    first_slab: int
    slabs: int
    first_row: int
    rows: int


def split_chunks(rows: int, slabs: int, row_bytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Cut a copy into chunks of at most `chunk_bytes`, which holds at least 4 rows. Row starts
    are multiples of 4, so that tables stay aligned."""
    most_rows = min(rows, chunk_bytes // row_bytes // 4 * 4) if rows > 4 else rows
    for first_row in range(0, rows, most_rows):
        count = min(most_rows, rows - first_row)
        most_slabs = min(slabs, max(1, chunk_bytes // (count * row_bytes)))
        for first_slab in range(0, slabs, most_slabs):
            yield Chunk(first_slab, min(most_slabs, slabs - first_slab), first_row, count)


class _Side:
    """What staging needs on one GPU. Owns its stream, staging memory and identity table."""

    def __init__(self, device: Device, reach: tuple[Device, ...]) -> None:
        self.device = device
        self.queue = GpuQueue(device)
        self._memory = allocate_shared(device, reach, STAGES * CHUNK_BYTES)
        self._identity = PlaceTable(device, FIRST_TABLE_ROWS)
        self._identity_rows = 0
        self._identity_address = 0
        self._kernels: dict[int, MoveRows] = {}

    def stage(self, index: int) -> int:
        """Address of one staging buffer."""
        return self._memory.start + index * CHUNK_BYTES

    def kernel(self, row_bytes: int) -> MoveRows:
        """The kernel for rows of so many bytes; compiled at first use."""
        if row_bytes not in self._kernels:
            self._kernels[row_bytes] = MoveRows(RowShape.of(row_bytes), self.device)
        return self._kernels[row_bytes]

    def identity(self, rows: int) -> int:
        """Address of the places 0, 1, … up to at least `rows`. A table that grows waits for
        this GPU's stream, whose launches read the old one."""
        if rows > self._identity_rows:
            self.device.use()
            done = GpuEvent(self.device)
            self.queue.record(done)
            done.wait()
            self._identity_rows = max(2 * rows, FIRST_TABLE_ROWS)
            places: NDArray[np.int32] = np.arange(self._identity_rows, dtype=np.int32)
            (self._identity_address,) = self._identity.write(places)
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
                PlaceTable(source, FIRST_TABLE_ROWS),
                PlaceTable(dest, FIRST_TABLE_ROWS),
            )
            for _ in range(MAX_IN_FLIGHT)
        ]

    def start(self, copy: RowCopy, source: GpuPool, dest: GpuPool) -> Flight:
        """As `GpuTransport.start`."""
        plan = plan_rows(copy)
        event, from_table, to_table = slot = self._free.pop()
        (from_places,) = from_table.write(plan.source_places)
        (to_places,) = to_table.write(plan.dest_places)
        from_base = source.address(self._from.device) + source.description.offset
        to_base = dest.address(self._to.device) + dest.description.offset
        for chunk in split_chunks(plan.rows, plan.slabs, plan.row_bytes, CHUNK_BYTES):
            stage = next(self._stages)
            self._gather(plan, chunk, stage, from_base, from_places)
            self._carry(plan, chunk, stage)
            self._scatter(plan, chunk, stage, to_base, to_places)
        self._to.queue.record(event)
        return Flight(event, lambda: self._free.append(slot))

    def _gather(self, plan: RowPlan, chunk: Chunk, stage: int, base: int, places: int) -> None:
        side = self._from
        identity = side.identity(chunk.rows)
        side.queue.wait_for(self._copied[stage])
        skipped = chunk.first_slab * plan.source_step * plan.row_bytes
        side.kernel(plan.row_bytes).launch(
            side.queue.handle,
            LaunchedRows(
                base + skipped,
                side.stage(stage),
                places + 4 * chunk.first_row,
                identity,
                chunk.rows,
                chunk.slabs,
                plan.source_step,
                chunk.rows,
            ),
        )
        side.queue.record(self._gathered[stage])

    def _carry(self, plan: RowPlan, chunk: Chunk, stage: int) -> None:
        self._link.wait_for(self._gathered[stage])
        self._link.wait_for(self._scattered[stage])
        size = chunk.slabs * chunk.rows * plan.row_bytes
        queue_copy(self._link, self._to.stage(stage), self._from.stage(stage), size)
        self._link.record(self._copied[stage])

    def _scatter(self, plan: RowPlan, chunk: Chunk, stage: int, base: int, places: int) -> None:
        side = self._to
        identity = side.identity(chunk.rows)
        side.queue.wait_for(self._copied[stage])
        skipped = chunk.first_slab * plan.dest_step * plan.row_bytes
        side.kernel(plan.row_bytes).launch(
            side.queue.handle,
            LaunchedRows(
                side.stage(stage),
                base + skipped,
                identity,
                places + 4 * chunk.first_row,
                chunk.rows,
                chunk.slabs,
                chunk.rows,
                plan.dest_step,
            ),
        )
        side.queue.record(self._scattered[stage])
