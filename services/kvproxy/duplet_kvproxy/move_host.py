"""`host`: whole pages between GPUs that cannot reach each other, through pinned host memory.

    source's copy engine   out 0 │ out 1 │ out 2 …
    dest's copy engine           │ in 0  │ in 1  …

GeForce cards have no peer access with the stock driver: this is their way. Chunks go through a
ring of stages, so that both PCIe links work at once. Copy engines alone: no kernel of ours
waits for a time slice, and no GPU touches the other one's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from duplet_kvproxy.gpu_queue import PORTABLE, Flight, GpuEvent, GpuQueue, queue_copies
from duplet_kvproxy.transport import MAX_IN_FLIGHT, GpuPool, TransportName
from duplet_memory.cuda_driver import Device, call
from duplet_memory.plan import RowCopy, plan_pages

STAGE_BYTES = 8 << 20
STAGES = 4


def split_ranges(
    ranges: NDArray[np.int64], stage_bytes: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Cut a copy into chunks of at most `stage_bytes`, in order.

    Args:
        ranges: int64 [n, 3] of source offset, destination offset, bytes.

    Yields:
        Two int64 [m, 3] of offset from, offset to, bytes: from the source into a stage, and from
        the stage to the destination. The pieces of one stage do not overlap.
    """
    pieces: list[tuple[int, int, int, int]] = []
    used = 0
    for source, dest, size in ranges.tolist():
        done = 0
        while done < size:
            piece = min(size - done, stage_bytes - used)
            pieces.append((source + done, dest + done, used, piece))
            used, done = used + piece, done + piece
            if used == stage_bytes:
                yield _two_ways(pieces)
                pieces, used = [], 0
    if pieces:
        yield _two_ways(pieces)


def _two_ways(
    pieces: list[tuple[int, int, int, int]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    columns = np.array(pieces, np.int64)
    return columns[:, [0, 2, 3]], columns[:, [2, 1, 3]]


class _Stage:
    """One buffer of pinned host memory. Owns it for the process's life, and the events of the
    copies that filled and emptied it last."""

    def __init__(self, source: Device, dest: Device) -> None:
        source.use()
        self.address = int(call("cuMemHostAlloc", STAGE_BYTES, PORTABLE))
        self.filled = GpuEvent(source)
        self.emptied = GpuEvent(dest)


class HostMover:
    """A stream of each GPU and the ring between them. Owns them; a stage is filled again only
    behind the event of the copy that emptied it."""

    name: TransportName = "host"

    def __init__(self, source: Device, dest: Device) -> None:
        self._source, self._dest = source, dest
        self._out, self._in = GpuQueue(source), GpuQueue(dest)
        self._stages = cycle([_Stage(source, dest) for _ in range(STAGES)])
        self._events = [GpuEvent(dest) for _ in range(MAX_IN_FLIGHT)]

    def start(self, copy: RowCopy, source: GpuPool, dest: GpuPool) -> Flight:
        """As `GpuTransport.start`. Rounds out to whole pages. The flight's event follows every
        copy in, each of which follows its copy out: once it has happened, none is outstanding."""
        ranges = plan_pages(copy).ranges
        from_address, to_address = source.address(self._source), dest.address(self._dest)
        event = self._events.pop()
        for out_ranges, in_ranges in split_ranges(ranges, STAGE_BYTES):
            stage = next(self._stages)
            self._out.wait_for(stage.emptied)
            queue_copies(self._out, out_ranges, from_address, stage.address)
            self._out.record(stage.filled)
            self._in.wait_for(stage.filled)
            queue_copies(self._in, in_ranges, stage.address, to_address)
            self._in.record(stage.emptied)
        self._in.record(event)
        return Flight(event, lambda: self._events.append(event))
