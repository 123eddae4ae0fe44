"""The mover: one thread that runs copies, in the order in which they were queued.

The thread owns the mappings of both pools and is the only code of the unit that writes into
another process's pool. The event loop hands it work through one queue and gets each copy's
end back as one CopyDone; whether and when a copy may run was decided in core.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

from duplet_core.effects import CopyDone, CopyResult, StartCopy
from duplet_core.errors import InvalidInput, require
from duplet_core.ids import InstanceId
from duplet_memory.plan import CopyPlan, execute, plan_copy
from duplet_memory.pool import Pool
from duplet_runtime.logs import get_logger

MAX_QUEUED = 65_536
"""Copies that wait. Grants bound them: each transfer has at most one a granted row."""

_log = get_logger("duplet.mover")


class Mover:
    """Owns the thread, the queue and, through the thread, every mapping."""

    def __init__(self, on_done: Callable[[CopyDone], None], delay_s: float = 0.0) -> None:
        """`on_done` is called in the event loop that made the mover. `delay_s` (fault tests):
        every copy stops half-way for so long, so that faults meet copies in flight."""
        self._loop = asyncio.get_running_loop()
        self._on_done = on_done
        self._delay_s = delay_s
        self._work: queue.Queue[StartCopy | InstanceId | None] = queue.Queue(MAX_QUEUED)
        self._pools: dict[InstanceId, Pool] = {}
        """Added by the event loop before anyone can name them; removed by the thread."""
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    def add_pool(self, instance: InstanceId, pool: Pool) -> None:
        """Take over a mapping."""
        require(instance not in self._pools, "an instance has one pool")
        self._pools[instance] = pool

    def start_copy(self, copy: StartCopy) -> None:
        """Queue a copy; exactly one CopyDone follows."""
        self._work.put_nowait(copy)

    def close_pool(self, instance: InstanceId) -> None:
        """Unmap a dead instance's pool, after everything that was queued before."""
        self._work.put_nowait(instance)

    def close(self) -> None:
        """Run what is queued, unmap everything and end the thread."""
        self._work.put_nowait(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, StartCopy):
                self._copy(work)
            else:
                self._pools.pop(work).close()
                _log.info("mapping closed", instance=work)
        for pool in self._pools.values():
            pool.close()

    def _copy(self, copy: StartCopy) -> None:
        result, detail = CopyResult.UNKNOWN, "the mover's thread failed"
        try:
            result, detail = self._try_copy(copy)
        finally:
            # Also on the way of an exception that ends the thread: an unknown end is told.
            done = CopyDone(copy.copy, result, detail, time.monotonic_ns())
            self._loop.call_soon_threadsafe(self._on_done, done)

    def _try_copy(self, copy: StartCopy) -> tuple[CopyResult, str]:
        source, dest = self._pools[copy.source], self._pools[copy.dest]
        try:
            plan = plan_copy(
                source.description,
                copy.source_pages,
                dest.description,
                copy.dest_pages,
                copy.start_row,
                copy.count,
            )
        except InvalidInput as error:
            return CopyResult.NOT_STARTED, error.detail
        try:
            self._execute(plan, source, dest)
        except (MemoryError, OSError, ValueError) as error:
            return CopyResult.UNKNOWN, f"{type(error).__name__}: {error}"
        return CopyResult.OK, ""

    def _execute(self, plan: CopyPlan, source: Pool, dest: Pool) -> None:
        if not self._delay_s:
            execute(plan, source.memory, dest.memory)
            return
        middle = len(plan.ranges) // 2
        for ranges in (plan.ranges[:middle], plan.ranges[middle:]):
            part = CopyPlan(ranges, plan.source_bytes, plan.dest_bytes)
            execute(part, source.memory, dest.memory)
            time.sleep(self._delay_s / 2)
