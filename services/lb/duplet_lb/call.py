"""One client's Generate call between core's effects and the gRPC stream."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from duplet_core.effects import Ended
from duplet_core.errors import Reason, Unavailable
from duplet_core.ids import TransferId
from duplet_lb.meter import StreamMeter
from duplet_lb.times import CallTimes

WRITE_MARGIN_NS = 1_000_000_000
"""A write is given up so long after the request's deadline: the machine, which ends what still
runs at its deadline, comes first."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How the client wants its rows: so many in the first message, so many in each later one.

    Only the last message may have fewer; none has more.
    """

    first_rows: int
    rows_per_message: int


class Call:
    """Collects a request's rows until its handler has written them. Lives in the event loop.

    Rows wait here while the client does not read: at most `most_unread` of them beyond the next
    message, then the call counts as a slow reader's and the caller ends it.
    """

    def __init__(
        self,
        transfer: TransferId,
        row_bytes: int,
        wish: Wish,
        most_unread: int,
        deadline_ns: int,
        times: CallTimes,
        meter: StreamMeter,
    ) -> None:
        self.transfer = transfer
        self.times = times
        self.meter = meter
        self.started = False
        self.ended: Ended | None = None
        self._row_bytes = row_bytes
        self._wish = wish
        self._most_unread_bytes = most_unread * row_bytes
        self._give_up_ns = deadline_ns + WRITE_MARGIN_NS
        self._rows = bytearray()
        self.sent_rows = 0
        self._changed = asyncio.Event()
        # Of the write that runs now; a failure cuts it short, for its client may never read.
        self._writing: asyncio.Timeout | None = None

    @property
    def failed(self) -> bool:
        """The request ended otherwise than well."""
        return self.ended is not None and self.ended.reason is not None

    def admit(self, now: int) -> None:
        """Admit and Prefill are on their way."""
        self.times.admitted_ns = now
        self._changed.set()

    def add_rows(self, rows: bytes) -> bool:
        """Keep rows for the client; False when too many wait already."""
        self._rows += rows
        if self._ready():
            self._changed.set()
        return len(self._rows) <= self._next_bytes() + self._most_unread_bytes

    def end(self, ended: Ended) -> None:
        """The request is over. A failure interrupts a write that waits for the client."""
        self.ended = ended
        self._changed.set()
        # One that expires at this moment cannot be moved, and need not be.
        if self.failed and self._writing is not None and not self._writing.expired():
            self._writing.reschedule(asyncio.get_running_loop().time())

    async def write(self, context: Any, response: Any) -> None:
        """Write one message to the client; given up when the request fails meanwhile.

        Raises:
            Unavailable: DEADLINE; the request's time is over and the client has not read.
        """
        if self.failed:
            return  # the handler tells the failure next
        left_s = (self._give_up_ns - time.monotonic_ns()) / 1e9
        try:
            async with asyncio.timeout(max(0.0, left_s)) as self._writing:
                await context.write(response)
        except TimeoutError:
            if not self.failed:
                detail = "the request's deadline passed before its rows were read"
                raise Unavailable(Reason.DEADLINE, detail) from None
        finally:
            self._writing = None

    async def wait(self) -> None:
        """Wait until something can be written: the start, enough rows, or the end."""
        while not (
            self.ended is not None
            or (self.times.admitted_ns and not self.started)
            or (self.started and self._ready())
        ):
            self._changed.clear()
            await self._changed.wait()

    def take_rows(self) -> tuple[int, bytes] | None:
        """(index of the first row, packed rows) of the next message; None: not enough yet."""
        if not self._rows or (self.ended is None and not self._ready()):
            return None
        rows = bytes(self._rows[: self._next_bytes()])
        del self._rows[: len(rows)]
        first = self.sent_rows
        self.sent_rows += len(rows) // self._row_bytes
        return first, rows

    def _next_bytes(self) -> int:
        """Size of the next message that is not the last."""
        wanted = self._wish.rows_per_message if self.sent_rows else self._wish.first_rows
        return wanted * self._row_bytes

    def _ready(self) -> bool:
        return len(self._rows) >= self._next_bytes()
