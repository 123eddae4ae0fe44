"""`push` and `pull`: one kernel reads the source's rows and writes the destination's.

`push` runs on the source's GPU and writes across the link, `pull` on the destination's and
reads across it.
"""

from __future__ import annotations

from typing import Literal

from duplet_kvproxy.gpu_queue import Flight, GpuEvent, GpuQueue, PageTable
from duplet_kvproxy.kernel_build import LaunchedRows, MoveRows, RowShape
from duplet_kvproxy.transport import MAX_IN_FLIGHT, GpuPool, TransportName
from duplet_memory.cuda_driver import Device
from duplet_memory.plan import RowCopy
from duplet_memory.row_plan import plan_rows

FIRST_TABLE_PAGES = 4096
PROGRAMS_PER_SM = 2
"""Idle, a push of 147,456 fragments took 0.99, 0.89, 0.89 and 0.89 ms by 1, 2, 4 and 8, a pull
0.89 by each of them. Under MPS with both GPUs busy a push took 1.00, 1.12, 1.29 and 1.42 ms, a
pull 0.94, 0.93, 0.92 and 0.93 (docs/measurements/kv_move.md, `launches`)."""


class DirectMover:
    """One stream of the GPU that works. Owns it, and one event and table a flight."""

    def __init__(
        self,
        name: Literal["push", "pull"],
        source: Device,
        dest: Device,
        programs_per_sm: int = PROGRAMS_PER_SM,
    ) -> None:
        """`programs_per_sm`: as in MoveRows."""
        self.name: TransportName = name
        self._device = source if name == "push" else dest
        self._programs_per_sm = programs_per_sm
        self._queue = GpuQueue(self._device)
        self._free = [
            (GpuEvent(self._device), PageTable(self._device, FIRST_TABLE_PAGES))
            for _ in range(2 * MAX_IN_FLIGHT)  # a copy may have a head
        ]
        self._kernels: dict[int, MoveRows] = {}
        """By bytes a row; a unit's pools all have one number."""

    def prepare(self, row_bytes: int) -> MoveRows:
        """The kernel for rows of so many bytes; compiled at first use."""
        if row_bytes not in self._kernels:
            shape = RowShape.of(row_bytes)
            self._kernels[row_bytes] = MoveRows(shape, self._device, self._programs_per_sm)
        return self._kernels[row_bytes]

    def start(self, copy: RowCopy, source: GpuPool, dest: GpuPool) -> Flight:
        """As `GpuTransport.start`."""
        plan = plan_rows(copy)
        kernel = self.prepare(plan.row_bytes)
        event, table = slot = self._free.pop()
        source_pages, dest_pages = table.write(plan.source_pages, plan.dest_pages)
        arguments = LaunchedRows(
            source.address(self._device) + source.description.offset,
            dest.address(self._device) + dest.description.offset,
            source_pages,
            dest_pages,
            plan.page_rows,
            plan.first_row,
            plan.rows,
            plan.slabs,
            plan.source_page_step,
            plan.dest_page_step,
            plan.source_step,
            plan.dest_step,
        )
        kernel.launch(self._queue.handle, arguments)
        self._queue.record(event)
        return Flight(event, lambda: self._free.append(slot))
