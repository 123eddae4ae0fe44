"""`pages`: whole pages between page-major pools, one batch a copy, by the copy engine.

The copy engine needs no time slice of a GPU that works for other processes, and disturbs
nobody's kernels; a kernel launched from here would wait for its turn.
"""

from __future__ import annotations

from duplet_kvproxy.gpu_queue import Flight, GpuEvent, GpuQueue, queue_copies
from duplet_kvproxy.transport import MAX_IN_FLIGHT, GpuPool, TransportName
from duplet_memory.cuda_driver import Device
from duplet_memory.plan import RowCopy, plan_pages


class PageMover:
    """One stream of the source's GPU, whose copy engine writes across the link; reading from
    the other end measured the same. Owns the stream and one event a flight."""

    name: TransportName = "pages"

    def __init__(self, source: Device) -> None:
        self._device = source
        self._queue = GpuQueue(source)
        self._events = [GpuEvent(source) for _ in range(MAX_IN_FLIGHT)]

    def start(self, copy: RowCopy, source: GpuPool, dest: GpuPool) -> Flight:
        """As `GpuTransport.start`. Rounds out to whole pages."""
        plan = plan_pages(copy)
        event = self._events.pop()
        from_address, to_address = source.address(self._device), dest.address(self._device)
        queue_copies(self._queue, plan.ranges, from_address, to_address)
        self._queue.record(event)
        return Flight(event, lambda: self._events.append(event))
