"""Check a copy and start it; where it has very many pages, its head before the rest is checked.

Writing down and checking thousands of page numbers takes as long as moving a tenth of their rows,
and no GPU works meanwhile. So `push` and `pull` move the head first, checked alone; while it
runs, the whole is checked and the rest started behind it. No byte is written before its own pages
are checked, and a copy that the check of the whole refuses too late is never called one that was
not started. Core has checked the pages of every grant and Move before.
"""

from __future__ import annotations

from collections.abc import Sequence

from duplet_core.errors import InvalidInput, Reason, Unavailable
from duplet_kvproxy.transport import BY_ONE_KERNEL, FlightLike, GpuPool, GpuTransport
from duplet_memory.plan import RowCopy, check_copy

HEAD_PAGES = 256
"""2,048 pages of one row take 36 us until their launch where the host does nothing else, 256 take
17 (bench.kv_move_launch); beside two GPUs both take about twice as long. 256 move in 100 us, and
within those the rest is launched: 54 us after the request where 256 took 17."""
LEAST_HEADS = 4
"""A copy of so many heads has one. With fewer the second launch costs about what it saves."""


class MovedInPart(Unavailable):
    """A copy was refused when its head was already on its way. Nobody waits for that or gets its
    tables back: as after a call that failed."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.TRANSFER_FAILED, f"refused after its head was started: {detail}")


class HeadAndRest:
    """Two copies that are one. Owns both flights."""

    def __init__(self, head: FlightLike, rest: FlightLike) -> None:
        self._head = head
        self._rest = rest

    def wait(self) -> None:
        """As `FlightLike.wait`."""
        self._head.wait()
        self._rest.wait()


def start_checked(
    transport: GpuTransport,
    source: GpuPool,
    source_pages: Sequence[int],
    dest: GpuPool,
    dest_pages: Sequence[int],
    start_row: int,
    count: int,
    head_pages: int = HEAD_PAGES,
) -> tuple[FlightLike, int]:
    """Start rows [start_row, start_row + count) of a sequence, named as for `check_copy`; the
    copy on its way, and its bytes.

    Raises:
        InvalidInput: refused; nothing was queued.
        MovedInPart: refused; the head is on its way.
        CudaError: a call failed; part of the copy may have been queued.
    """
    have, want = source.description, dest.description
    head_rows = head_pages * have.page_rows - start_row % have.page_rows
    pages = -(-(start_row % have.page_rows + count) // have.page_rows)
    # Other numbers of pages than these are for the check of the whole, before anything starts.
    fits = len(source_pages) == len(dest_pages) == pages
    if transport.name not in BY_ONE_KERNEL or pages < LEAST_HEADS * head_pages or not fits:
        copy = check_copy(have, source_pages, want, dest_pages, start_row, count)
        return transport.start(copy, source, dest), copy.copied_bytes
    first_pages = source_pages[:head_pages], dest_pages[:head_pages]
    copy = check_copy(have, first_pages[0], want, first_pages[1], start_row, head_rows)
    head = transport.start(copy, source, dest)
    try:
        copy = check_copy(have, source_pages, want, dest_pages, start_row, count)
        last_pages = copy.source_pages[head_pages:], copy.dest_pages[head_pages:]
        rest = RowCopy(have, last_pages[0], want, last_pages[1], 0, count - head_rows)
        return HeadAndRest(head, transport.start(rest, source, dest)), copy.copied_bytes
    except InvalidInput as error:
        raise MovedInPart(error.detail) from error
