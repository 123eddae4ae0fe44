"""The mover: one thread that runs copies, in the order in which they were queued.

The thread owns the mappings of both pools and is the only code of the unit that writes into
another process's pool. The event loop hands it work through one queue and gets each copy's
end back as one CopyDone; whether and when a copy may run was decided in core.

On GPUs several copies are in flight: the thread queues what waits, then blocks on the oldest
one's event. A copy is told OK only after its event synchronised successfully. Any failure on
the way is UNKNOWN, and one that a wait reports poisons the context: everything in flight then
ends as UNKNOWN, nothing is started any more, and the service must leave (S9).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from duplet_core.effects import CopyDone, CopyResult, StartCopy
from duplet_core.errors import InvalidInput, require
from duplet_core.ids import InstanceId
from duplet_kvproxy.choice import Choice
from duplet_kvproxy.head_start import MovedInPart, start_checked
from duplet_kvproxy.transport import MAX_IN_FLIGHT, FlightLike, copy_shared_memory
from duplet_memory.cuda_driver import CudaError
from duplet_memory.cuda_pool import MappedPool
from duplet_memory.plan import check_copy
from duplet_memory.pool import Pool
from duplet_runtime.logs import get_logger

MAX_QUEUED = 65_536
"""Copies that wait; one more is refused, which ends its transfer and nothing else. A prompt has a
copy for each chunk, so this is far beyond what decode's slots allow."""

_log = get_logger("duplet.mover")


@dataclass(slots=True)
class MoveCounts:
    """Written by the mover's thread, read by metrics: whole numbers that only grow."""

    copies: Counter[str]
    """By transport."""
    copied_bytes: int = 0


class Mover:
    """Owns the thread, the queue and, through the thread, every mapping."""

    def __init__(
        self,
        on_done: Callable[[CopyDone], None],
        choice: Choice,
        on_broken: Callable[[str], None],
    ) -> None:
        """`on_done` and `on_broken` are called in the event loop that made the mover; the
        second when a GPU's context has failed, or the thread."""
        self._loop = asyncio.get_running_loop()
        self._on_done = on_done
        self._on_broken = on_broken
        self._choice = choice
        self._work: queue.SimpleQueue[StartCopy | InstanceId | None] = queue.SimpleQueue()
        """Copies, bounded by MAX_QUEUED; mappings to close, by the instances that can be watched;
        and the end. None of the latter may be refused."""
        self._queued = 0
        """Copies in there."""
        self._pools: dict[InstanceId, Pool | MappedPool] = {}
        """Added by the event loop before anyone can name them; removed by the thread."""
        self._flights: deque[tuple[StartCopy, FlightLike]] = deque()
        self._lost_flights = 0
        """Starts that failed half-way: what a transport gave them never comes back."""
        self._used_by_lost: set[InstanceId] = set()
        """Pools that those named: what was queued of them may still run, and nothing tells when
        it has ended."""
        self._begun = 0
        """Number of the newest copy that the thread took; they are taken in order."""
        self._cancelled: set[int] = set()
        """Copies that wait and are not to begin."""
        self._refused: set[int] = set()
        """Copies that were not queued and whose CopyDone is on its way."""
        self._order = threading.Lock()
        """Of `_queued`, `_begun` and `_cancelled`."""
        self._began_ns: dict[int, int] = {}
        """When each copy began that has not ended."""
        self._broken = ""
        """Why no copy is started any more; never cleared."""
        self.counts = MoveCounts(Counter())
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    def add_pool(self, instance: InstanceId, pool: Pool | MappedPool) -> None:
        """Take over a mapping."""
        require(instance not in self._pools, "an instance has one pool")
        self._pools[instance] = pool

    def start_copy(self, copy: StartCopy) -> None:
        """Queue a copy; exactly one CopyDone follows, NOT_STARTED where too many wait."""
        with self._order:
            has_room = self._queued < MAX_QUEUED
            if has_room:
                self._queued += 1
        if has_room:
            self._work.put(copy)
        else:
            detail = f"{MAX_QUEUED} copies wait"
            done = CopyDone(copy.copy, CopyResult.NOT_STARTED, detail, time.monotonic_ns())
            self._refused.add(copy.copy)
            self._loop.call_soon(self._tell_refused, done)

    def _tell_refused(self, done: CopyDone) -> None:
        self._refused.remove(done.copy)
        self._on_done(done)

    def cancel_copy(self, copy: int) -> None:
        """Keep a copy that waits from beginning: its CopyDone says NOT_STARTED."""
        if copy in self._refused:
            return
        with self._order:
            if copy > self._begun:
                self._cancelled.add(copy)

    def close_pool(self, instance: InstanceId) -> None:
        """Unmap a dead instance's pool, after everything that was queued before."""
        self._work.put(instance)

    def close(self) -> None:
        """Run what is queued, unmap everything that no copy can use any more, end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        done = False
        try:
            self._work_off()
            done = True
        finally:
            if not done:  # nobody else would notice: copies in flight are never told
                self._loop.call_soon_threadsafe(self._on_broken, "the mover's thread failed")

    def _work_off(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, StartCopy):
                self._start(work)
            else:
                self._land_all()
                self._unmap(work)
        self._land_all()
        for instance in tuple(self._pools):
            self._unmap(instance)

    def _next(self) -> StartCopy | InstanceId | None:
        """What was queued next; lands copies while there is nothing else to do."""
        while self._flights:
            if len(self._flights) + self._lost_flights < MAX_IN_FLIGHT:
                try:
                    return self._work.get_nowait()
                except queue.Empty:
                    pass
            self._land()
        return self._work.get()

    def _start(self, copy: StartCopy) -> None:
        result: CopyResult | None = CopyResult.UNKNOWN
        detail = "the mover's thread failed"
        try:
            result, detail = self._try_start(copy)
        finally:
            # Also on the way of an exception that ends the thread: an unknown end is told.
            if result is not None:
                self._tell(copy, result, detail)

    def _take(self, copy: int) -> bool:
        """The copy's turn has come; False when it was cancelled before."""
        with self._order:
            self._queued -= 1
            self._begun = copy
            if copy not in self._cancelled:
                return True
            self._cancelled.remove(copy)
            return False

    def _try_start(self, copy: StartCopy) -> tuple[CopyResult | None, str]:
        """The copy's end, or None while it is in flight."""
        if not self._take(copy.copy):
            return CopyResult.NOT_STARTED, "its transfer was over"
        if self._broken:
            return CopyResult.NOT_STARTED, f"the GPU failed before: {self._broken}"
        if self._lost_flights >= MAX_IN_FLIGHT:
            return CopyResult.NOT_STARTED, f"{MAX_IN_FLIGHT} copies failed when they were queued"
        source, dest = self._pools[copy.source], self._pools[copy.dest]
        rows = (copy.start_row, copy.count)
        self._began_ns[copy.copy] = time.monotonic_ns()
        try:
            if isinstance(source, Pool) and isinstance(dest, Pool):
                have, want = source.description, dest.description
                checked = check_copy(have, copy.source_pages, want, copy.dest_pages, *rows)
                copy_shared_memory(checked, source, dest)
                self._count("shm", checked.copied_bytes)
                return CopyResult.OK, ""
            if isinstance(source, Pool) or isinstance(dest, Pool):
                return CopyResult.NOT_STARTED, "one pool is on a GPU and the other is not"
            transport = self._choice.transport_for(source.description, dest.description)
            flight, copied_bytes = start_checked(
                transport, source, copy.source_pages, dest, copy.dest_pages, *rows
            )
            self._flights.append((copy, flight))
        except InvalidInput as error:
            return CopyResult.NOT_STARTED, error.detail
        except (MovedInPart, CudaError, MemoryError, OSError, ValueError) as error:
            self._lost_flights += 1
            self._used_by_lost |= {copy.source, copy.dest}
            return CopyResult.UNKNOWN, f"{type(error).__name__}: {error}"
        self._count(transport.name, copied_bytes)
        return None, ""

    def _land(self) -> None:
        """Block on the oldest copy in flight and tell its end."""
        copy, flight = self._flights.popleft()
        result, detail = CopyResult.UNKNOWN, "the mover's thread failed"
        try:
            if self._broken:
                detail = f"the GPU failed: {self._broken}"
                return
            flight.wait()
            result, detail = CopyResult.OK, ""
        except CudaError as error:
            detail = self._broken = error.detail
            _log.critical("GPU failed", detail=error.detail)
            self._loop.call_soon_threadsafe(self._on_broken, f"a GPU failed: {error.detail}")
        finally:
            self._tell(copy, result, detail)

    def _land_all(self) -> None:
        while self._flights:
            self._land()

    def _unmap(self, instance: InstanceId) -> None:
        pool = self._pools.pop(instance)
        detail = self._broken or ("a start failed" if instance in self._used_by_lost else "")
        if detail and isinstance(pool, MappedPool):
            # Something may still write through it; the process's exit ends both.
            _log.warning("mapping kept", instance=instance, detail=detail)
            return
        pool.close()
        _log.info("mapping closed", instance=instance)

    def _tell(self, copy: StartCopy, result: CopyResult, detail: str) -> None:
        began_ns = self._began_ns.pop(copy.copy, 0)
        done = CopyDone(copy.copy, result, detail, time.monotonic_ns(), began_ns)
        self._loop.call_soon_threadsafe(self._on_done, done)

    def _count(self, transport: str, copied_bytes: int) -> None:
        self.counts.copies[transport] += 1
        self.counts.copied_bytes += copied_bytes
