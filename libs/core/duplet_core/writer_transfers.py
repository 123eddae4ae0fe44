"""The writer's transfers: when a copy may start, and when a transfer's end may be told.

    GRANTED   decode's permission is here, no Move yet
    WAITING   Moves are here, no permission: they wait, without a timer, and write nothing
    MOVING    both are here; copies are queued as Moves arrive
    ENDING    the transfer is over, but a copy of it is outstanding: nothing is told yet

A transfer writes only with a grant. Every end deletes the grant, and the grant is never sent
again, so no copy can start after it. An end is told (AbortAck or TransferFailed to decode,
SourceReleased to prefill) only when no copy is outstanding, each observed as completed
*successfully*: an error or an unknown result may still be writing (S3, S6). Landing is the
good end: all granted rows copied and the last Move's handoff present.

What landed is remembered: prefill, whose stream may have broken over the news, asks again.

Rows of a transfer arrive in order. A Move that does not begin at the next row has lost its
predecessor; taking it would land an incomplete KV, so it ends the transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from duplet_core.effects import CancelCopy, CopyDone, Count, Log, StartCopy
from duplet_core.errors import require
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.machine import Outlet
from duplet_core.messages import (
    AbortAck,
    Grant,
    Landed,
    Move,
    SourceReleased,
    Started,
    TransferBroken,
    TransferFailed,
)
from duplet_core.writer_state import Input, Pool, State, Transfer


class Transfers:
    """Owner of every grant and of every copy's bookkeeping."""

    def __init__(self, out: Outlet, pool_of: Callable[[InstanceId], Pool]) -> None:
        self.by_id: dict[TransferId, Transfer] = {}
        self._landed: dict[InstanceId, dict[TransferId, None]] = {}
        """By source, what landed and may be asked for again, oldest first. Whoever asks holds
        pages for it and for all that landed later, so a pool has no more of them than pages."""
        self.ending: dict[TransferId, Transfer] = {}
        """Those of `by_id` that are over but not quiet, the longest ago first."""
        self._by_copy: dict[int, Transfer] = {}
        self._next_copy = 1
        self._out = out
        self._pool_of = pool_of

    def step(self, t: Transfer, what: Input, message: Any, now: int) -> None:
        """Apply one input to one transfer, by the table."""
        self.TABLE[t.state][what](self, t, message, now)

    def step_copy(self, done: CopyDone, what: Input, now: int) -> None:
        """The same for the mover's word on a copy."""
        t = self._by_copy.pop(done.copy, None)
        require(t is not None and done.copy in t.outstanding, "a copy ends once")
        assert t is not None
        if what is not Input.COPY_UNKNOWN:
            t.outstanding.remove(done.copy)
        self.step(t, what, done, now)

    def open_grant(self, grant: Grant, dest: InstanceId) -> None:
        """A grant for a transfer that is not known here."""
        self.by_id[grant.transfer] = Transfer(
            grant.transfer, State.GRANTED, dest, grant.pages, grant.rows
        )

    def open_move(self, move: Move, source: InstanceId, now: int) -> None:
        """A first Move for a transfer that is not known here."""
        t = Transfer(move.transfer, State.WAITING, source=source)
        self.by_id[move.transfer] = t
        self._queue(t, move, now)

    def release_unknown(self, transfer: TransferId, source: InstanceId) -> None:
        """Answer a prefill about a transfer that is over, or was never known here."""
        landed = transfer in self._landed.get(source, {})
        self._out.send(Role.PREFILL, SourceReleased(transfer, landed), only=source)

    def forget_landed(self, source: InstanceId, held: tuple[TransferId, ...] = ()) -> None:
        """This prefill asks for nothing but `held` any more."""
        known = self._landed.pop(source, {})
        kept = {transfer: None for transfer in known if transfer in held}
        if kept:
            self._landed[source] = kept

    def copies_of(self, instance: InstanceId) -> int:
        """Transfers with copies outstanding that touch this instance's pool."""
        return sum(
            1 for t in self.by_id.values() if t.outstanding and instance in (t.source, t.dest)
        )

    # --- transitions: one method each, named in the table below ----------------------

    def _ignore(self, t: Transfer, message: Any, now: int) -> None:
        """Decided: changes nothing."""

    def _ignore_grant(self, t: Transfer, message: Any, now: int) -> None:
        # A grant is sent once; a second one for the same transfer permits nothing.
        self._out.emit(Count("grants_ignored"))

    def _impossible(self, t: Transfer, message: Any, now: int) -> None:
        require(False, f"{type(message).__name__} for a transfer that is {t.state}")

    def _permit(self, t: Transfer, grant: tuple[Grant, InstanceId], now: int) -> None:
        message, dest = grant
        t.dest, t.dest_pages, t.rows = dest, message.pages, message.rows
        t.state = State.MOVING
        if not self._pools_fit(t):
            self._end(t, "the pools' pages differ in rows", now)
            return
        while t.waiting:
            move = t.waiting.popleft()
            if move.start_row + move.count > t.rows:
                self._end(t, "more rows than granted", now)
                return
            self._copy(t, move)

    def _queue(self, t: Transfer, move: Move, now: int) -> None:
        t.waiting.append(move)
        self._advance(t, move, now)

    def _wait(self, t: Transfer, message: tuple[Move, InstanceId], now: int) -> None:
        self._queue(t, message[0], now)

    def _move(self, t: Transfer, message: tuple[Move, InstanceId], now: int) -> None:
        move, source = message
        t.source = source
        t.state = State.MOVING
        if not self._pools_fit(t):
            self._end(t, "the pools' pages differ in rows", now)
            return
        self._advance(t, move, now)
        self._copy(t, move)

    def _bad_move(self, t: Transfer, message: tuple[Move, InstanceId], now: int) -> None:
        move, source = message
        if t.source is None:
            t.source = source
        detail = f"move of row {move.start_row} + {move.count}, next is {t.next_row} of {t.rows}"
        self._end(t, detail, now)

    def _abort(self, t: Transfer, message: Any, now: int) -> None:
        t.owes_ack = True
        self._end(t, None, now)

    def _ack_unheld(self, t: Transfer, message: Any, now: int) -> None:
        # No grant here: it was never received or is already consumed. None can start.
        self._out.send(Role.DECODE, AbortAck(t.transfer))

    def _ack_later(self, t: Transfer, message: Any, now: int) -> None:
        t.owes_ack = True

    def _drop(self, t: Transfer, source: InstanceId, now: int) -> None:
        t.source = source
        self._end(t, "prefill dropped it", now)

    def _copied(self, t: Transfer, done: CopyDone, now: int) -> None:
        t.last_copy_ns = done.done_ns
        if t.outstanding or t.handoff is None:
            return
        if t.next_row != t.rows:
            self._end(t, f"{t.next_row} rows moved, {t.rows} granted", now)
            return
        assert t.source is not None
        # An earlier part's copy may be what ends last.
        began_ns = max(done.started_ns, t.handed_ns)
        stamps = (*t.handoff.stamps, t.handed_ns, began_ns, t.last_copy_ns)
        handoff = replace(t.handoff, stamps=stamps)
        del self.by_id[t.transfer]  # the grant is consumed before anyone is told
        self._remember_landed(t.transfer, t.source)
        self._out.send(Role.PREFILL, SourceReleased(t.transfer, landed=True), only=t.source)
        self._out.send(Role.DECODE, Landed(t.transfer, t.rows, handoff), only=t.dest)
        self._out.emit(Count("transfers_landed"))

    def _copy_refused(self, t: Transfer, done: CopyDone, now: int) -> None:
        self._end(t, f"copy refused: {done.detail}", now)

    def _copy_unknown(self, t: Transfer, done: CopyDone, now: int) -> None:
        t.unknown = True
        self._out.emit(Count("copies_unknown"))
        self._out.emit(Log("copy unknown", transfer=t.transfer, detail=done.detail))
        self._end(t, f"copy failed: {done.detail}", now)

    def _quieter(self, t: Transfer, done: CopyDone, now: int) -> None:
        if not t.outstanding:
            self._tell_end(t)

    def _never_quiet(self, t: Transfer, done: CopyDone, now: int) -> None:
        t.unknown = True
        self._out.emit(Count("copies_unknown"))

    def _source_back(self, t: Transfer, message: Any, now: int) -> None:
        """Parts may have been lost with the old stream: only a complete one may go on."""
        if t.handoff is None:
            self._end(t, "prefill's stream broke between parts", now)

    def _source_back_waiting(self, t: Transfer, message: Any, now: int) -> None:
        self._end(t, "prefill's stream broke before the grant", now)

    def _source_died(self, t: Transfer, message: Any, now: int) -> None:
        if t.handoff is None:
            self._end(t, "prefill has exited", now)

    def _dest_gone(self, t: Transfer, message: Any, now: int) -> None:
        """decode ended the request when its stream broke; its Abort follows where it is due."""
        self._end(t, "decode's stream broke", now)

    TABLE: ClassVar[dict[State, dict[Input, Callable[..., None]]]]
    """What an input does to a transfer in a state; below the class."""

    # --- what transitions are made of ---------------------------------------------

    def _advance(self, t: Transfer, move: Move, now: int) -> None:
        t.next_row = move.start_row + move.count
        if move.handoff is not None:
            t.handoff = move.handoff
            t.handed_ns = now

    def _pools_fit(self, t: Transfer) -> bool:
        assert t.source is not None and t.dest is not None
        return self._pool_of(t.source).page_rows == self._pool_of(t.dest).page_rows

    def _copy(self, t: Transfer, move: Move) -> None:
        assert t.source is not None and t.dest is not None
        page_rows = self._pool_of(t.dest).page_rows
        first = move.start_row // page_rows
        dest_pages = t.dest_pages[first : first + len(move.pages)]
        copy = self._next_copy
        self._next_copy += 1
        t.outstanding.add(copy)
        self._by_copy[copy] = t
        rows = (move.start_row, move.count)
        source, dest = (t.source, move.pages), (t.dest, dest_pages)
        self._out.emit(StartCopy(copy, t.transfer, *source, *dest, *rows))
        if move.start_row == 0:
            self._out.send(Role.DECODE, Started(t.transfer), only=t.dest)

    def _remember_landed(self, transfer: TransferId, source: InstanceId) -> None:
        landed = self._landed.setdefault(source, {})
        landed[transfer] = None
        if len(landed) > self._pool_of(source).pages:
            del landed[next(iter(landed))]

    def _end(self, t: Transfer, failed: str | None, now: int) -> None:
        """The transfer is over: delete the grant, start nothing more, tell when it is quiet."""
        t.waiting.clear()
        t.owes_failed = failed
        t.ending_since_ns = now
        if t.outstanding:
            t.state = State.ENDING
            self.ending[t.transfer] = t
            for copy in sorted(t.outstanding):
                self._out.emit(CancelCopy(copy))
            if failed is not None and t.dest is not None:
                self._out.send(Role.DECODE, TransferBroken(t.transfer, failed), only=t.dest)
        else:
            self._tell_end(t)

    def _tell_end(self, t: Transfer) -> None:
        require(not t.outstanding, "an end is told when no copy is outstanding")
        del self.by_id[t.transfer]
        self.ending.pop(t.transfer, None)
        if t.source is not None:
            self._out.send(Role.PREFILL, SourceReleased(t.transfer, landed=False), only=t.source)
        if t.dest is not None and t.owes_ack:
            self._out.send(Role.DECODE, AbortAck(t.transfer), only=t.dest)
        elif t.dest is not None and t.owes_failed is not None:
            failed = TransferFailed(t.transfer, t.owes_failed)
            self._out.send(Role.DECODE, failed, only=t.dest)


Transfers.TABLE = {
    State.GRANTED: {
        Input.GRANT: Transfers._ignore_grant,
        Input.ABORT: Transfers._abort,
        Input.MOVE: Transfers._move,
        Input.BAD_MOVE: Transfers._bad_move,
        Input.DROP: Transfers._drop,
        Input.COPY_OK: Transfers._impossible,
        Input.COPY_REFUSED: Transfers._impossible,
        Input.COPY_UNKNOWN: Transfers._impossible,
        Input.SOURCE_BACK: Transfers._drop,  # its first Move was lost with the stream
        Input.SOURCE_DIED: Transfers._impossible,  # no source is known
        Input.DEST_BACK: Transfers._dest_gone,
        Input.DEST_DIED: Transfers._dest_gone,
    },
    State.WAITING: {
        Input.GRANT: Transfers._permit,
        Input.ABORT: Transfers._ack_unheld,
        Input.MOVE: Transfers._wait,
        Input.BAD_MOVE: Transfers._bad_move,
        Input.DROP: Transfers._drop,
        Input.COPY_OK: Transfers._impossible,
        Input.COPY_REFUSED: Transfers._impossible,
        Input.COPY_UNKNOWN: Transfers._impossible,
        Input.SOURCE_BACK: Transfers._source_back_waiting,
        Input.SOURCE_DIED: Transfers._source_back_waiting,
        Input.DEST_BACK: Transfers._impossible,  # no grant, no decode
        Input.DEST_DIED: Transfers._impossible,
    },
    State.MOVING: {
        Input.GRANT: Transfers._ignore_grant,
        Input.ABORT: Transfers._abort,
        Input.MOVE: Transfers._move,
        Input.BAD_MOVE: Transfers._bad_move,
        Input.DROP: Transfers._drop,
        Input.COPY_OK: Transfers._copied,
        Input.COPY_REFUSED: Transfers._copy_refused,
        Input.COPY_UNKNOWN: Transfers._copy_unknown,
        Input.SOURCE_BACK: Transfers._source_back,
        Input.SOURCE_DIED: Transfers._source_died,
        Input.DEST_BACK: Transfers._dest_gone,
        Input.DEST_DIED: Transfers._dest_gone,
    },
    State.ENDING: {
        Input.GRANT: Transfers._ignore_grant,
        Input.ABORT: Transfers._ack_later,
        Input.MOVE: Transfers._ignore,
        Input.BAD_MOVE: Transfers._ignore,
        Input.DROP: Transfers._ignore,
        Input.COPY_OK: Transfers._quieter,
        Input.COPY_REFUSED: Transfers._quieter,
        Input.COPY_UNKNOWN: Transfers._never_quiet,
        Input.SOURCE_BACK: Transfers._ignore,
        Input.SOURCE_DIED: Transfers._ignore,
        Input.DEST_BACK: Transfers._ignore,
        Input.DEST_DIED: Transfers._ignore,
    },
}
