"""Mutants of what happens to a transfer: each turns one rule of the core off and names the
invariant that must break.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from duplet_core import decode_transfers, prefill_jobs, writer_transfers
from duplet_core.decode import DecodeMachine
from duplet_core.decode_state import Input as DecodeInput
from duplet_core.decode_state import State as DecodeState
from duplet_core.effects import SetHealth
from duplet_core.errors import Reason
from duplet_core.ids import PROTOCOL_VERSION, Role
from duplet_core.ledger import Ledger, PageState
from duplet_core.link import Link
from duplet_core.messages import (
    Abort,
    AbortAck,
    Grant,
    Hello,
    Landed,
    SourceReleased,
    TransferFailed,
)
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_state import Input as PrefillInput
from duplet_core.prefill_state import State as PrefillState
from duplet_core.writer import WriterMachine
from duplet_core.writer_state import Input as WriterInput
from duplet_core.writer_state import State as WriterState
from duplet_sim.mutant import Mutants, cell, method

Decode = decode_transfers.Transfers
Writer = writer_transfers.Transfers
Jobs = prefill_jobs.Jobs


MUTANTS = Mutants()
mutant = MUTANTS.add


# --- decode ------------------------------------------------------------------------


def _fail_and_free(self: Any, t: Any, message: Any, now: int) -> None:
    self._fail(t, Reason.TRANSFER_DEADLINE, "given up")
    self._free_proven(t)


def _abort_and_free(self: Any, t: Any, message: Any, now: int) -> None:
    self._out.send(Role.KVPROXY, Abort(t.transfer), only=t.writer)
    self._free_proven(t)


@mutant("free on deadline", "late-write")
def free_on_deadline(stack: ExitStack) -> None:
    cell(stack, Decode, DecodeState.GRANTED, DecodeInput.DEADLINE, _fail_and_free)


@mutant("free on lost health checks", "late-write")
def free_on_lost(stack: ExitStack) -> None:
    cell(stack, Decode, DecodeState.GRANTED, DecodeInput.WRITER_LOST, _fail_and_free)


@mutant("free on abort", "late-write")
def free_on_abort(stack: ExitStack) -> None:
    cell(stack, Decode, DecodeState.GRANTED, DecodeInput.END, _abort_and_free)


@mutant("page freed while an overlapped step still names it", "step-write")
def free_before_stopped(stack: ExitStack) -> None:
    stop = Decode.TABLE[DecodeState.RUNNING][DecodeInput.END]

    def early(self: Any, t: Any, message: Any, now: int) -> None:
        stop(self, t, message, now)
        self.ledger.free_live(t.transfer)

    def late(self: Any, t: Any, message: Any, now: int) -> None:
        if t.transfer in self.ledger._holdings:
            self.ledger.free_live(t.transfer)
        del self.by_seq[t.seq]
        self._forget(t)

    cell(stack, Decode, DecodeState.RUNNING, DecodeInput.END, early)
    cell(stack, Decode, DecodeState.STOPPING, DecodeInput.STOPPED, late)


@mutant("instance change taken as death", "late-write", timed={"zombie": 6})
def change_is_death(stack: ExitStack) -> None:
    up = DecodeMachine._on_watched

    def watched(self: Any, event: Any, now: int) -> None:
        up(self, event, now)
        for t in list(self.transfers.by_transfer.values()):
            if t.writer != event.instance:
                if t.state is DecodeState.GRANTED:
                    self.transfers.step(t, DecodeInput.WRITER_LOST, None, now)
                self.transfers.step(t, DecodeInput.WRITER_DIED, None, now)

    method(stack, DecodeMachine, "_on_watched", watched)


def _without_held(owner: Any, stack: ExitStack) -> None:
    own = owner._own_hello

    def without(self: Any, peer: Role, number: int, to: Any) -> Hello:
        hello: Hello = own(self, peer, number, to)
        return replace(hello, held=())

    method(stack, owner, "_own_hello", without)


@mutant("abort not sent again after a break", "liveness")
def abort_once(stack: ExitStack) -> None:
    _without_held(DecodeMachine, stack)


@mutant("a restart of the writer is noticed with traffic only", "liveness")
def lazy_deaths(stack: ExitStack) -> None:
    died, admit = DecodeMachine._on_died, DecodeMachine._take_admit
    waiting: list[Any] = []

    def later(self: Any, *event: Any) -> None:
        waiting.append((self, event))

    def first(self: Any, message: Any, now: int) -> None:
        for machine, event in [w for w in waiting if w[0] is self]:
            died(machine, *event)
            waiting.remove((machine, event))
        admit(self, message, now)

    method(stack, DecodeMachine, "_on_died", later)
    method(stack, DecodeMachine, "_take_admit", first)


@mutant("drain that needs a free page", "liveness")
def drain_needs_page(stack: ExitStack) -> None:
    quarantine = Decode._quarantine

    def needy(self: Any, t: Any, now: int) -> None:
        if self.ledger.count(PageState.FREE) > 0:
            quarantine(self, t, now)
            return
        self._set_aside(t, now)

    method(stack, Decode, "_quarantine", needy)


@mutant("a page still in quarantine is granted", "conservation")
def grants_quarantined(stack: ExitStack) -> None:
    """It is free for the next one from the quarantine on; the books add up at any rest."""
    quarantine, free = Ledger.quarantine, Ledger._free_from

    def lend(self: Any, transfer: Any) -> None:
        quarantine(self, transfer)
        pages = self._holdings[transfer].pages
        self._free.extend(pages)
        self._counts[PageState.FREE] += len(pages)

    def forget(self: Any, transfer: Any, state: Any) -> None:
        if state is PageState.QUARANTINED:
            self._counts[state] -= len(self._holdings.pop(transfer).pages)
        else:
            free(self, transfer, state)

    method(stack, Ledger, "quarantine", lend)
    method(stack, Ledger, "_free_from", forget)


@mutant("quarantine never refuses", "bound")
def no_bound(stack: ExitStack) -> None:
    method(
        stack,
        DecodeMachine,
        "_check_quarantine",
        lambda self, now: self.transfers.count_overdue(now),
    )


# --- the writer ----------------------------------------------------------------------


@mutant("ack before the event", "ack")
def ack_early(stack: ExitStack) -> None:
    def abort(self: Any, t: Any, message: Any, now: int) -> None:
        self._out.send(Role.DECODE, AbortAck(t.transfer))
        self._end(t, None, now)

    cell(stack, Writer, WriterState.MOVING, WriterInput.ABORT, abort)


@mutant("ack after an error event", "ack", chances={"unknown": 0.3}, timed={"storm": 6})
def ack_after_error(stack: ExitStack) -> None:
    def quiet(self: Any, t: Any, done: Any, now: int) -> None:
        if t.owes_ack:
            self._out.send(Role.DECODE, AbortAck(t.transfer))

    cell(stack, Writer, WriterState.ENDING, WriterInput.COPY_UNKNOWN, quiet)


@mutant("failure told after an error event", "proof", chances={"unknown": 0.3})
def fail_after_error(stack: ExitStack) -> None:
    def failed(self: Any, t: Any, done: Any, now: int) -> None:
        self._out.send(Role.DECODE, TransferFailed(t.transfer, done.detail))
        self._end(t, done.detail, now)

    cell(stack, Writer, WriterState.MOVING, WriterInput.COPY_UNKNOWN, failed)


@mutant("a copy of unknown end is over", "release", chances={"unknown": 0.3})
def unknown_is_over(stack: ExitStack) -> None:
    step = Writer.step_copy

    def forgetful(self: Any, done: Any, what: WriterInput, now: int) -> None:
        t = self._by_copy.get(done.copy)
        if t is not None and what is WriterInput.COPY_UNKNOWN:
            t.outstanding.remove(done.copy)
            self._by_copy.pop(done.copy)
            self.step(t, what, done, now)
            return
        step(self, done, what, now)

    method(stack, Writer, "step_copy", forgetful)


@mutant("grant that survives its abort", "ack")
def grant_survives(stack: ExitStack) -> None:
    def abort(self: Any, t: Any, message: Any, now: int) -> None:
        self._out.send(Role.DECODE, AbortAck(t.transfer))

    cell(stack, Writer, WriterState.GRANTED, WriterInput.ABORT, abort)


@mutant("grant used twice", "late-write")
def grant_twice(stack: ExitStack) -> None:
    """A consumed grant serves the next transfer that has none yet."""
    copied, open_move = Writer.TABLE[WriterState.MOVING][WriterInput.COPY_OK], Writer.open_move
    used: dict[int, tuple[Any, Any]] = {}

    def keep(self: Any, t: Any, done: Any, now: int) -> None:
        copied(self, t, done, now)
        if t.transfer not in self.by_id:
            used[id(self)] = (Grant(t.transfer, t.dest_pages, t.rows), t.dest)

    def again(self: Any, move: Any, source: Any, now: int) -> None:
        open_move(self, move, source, now)
        grant = used.pop(id(self), None)
        if grant is not None and grant[1] == self._out.instance_of(Role.DECODE):
            self.step(self.by_id[move.transfer], WriterInput.GRANT, grant, 0)

    cell(stack, Writer, WriterState.MOVING, WriterInput.COPY_OK, keep)
    method(stack, Writer, "open_move", again)


@mutant("move out of row order accepted", "release", search="parts")
def any_row(stack: ExitStack) -> None:
    """Two guards stand one behind the other: prefill gives up at a break, kvproxy refuses rows
    that are not the next. Both are off here. The rows before were given up, and their pages
    released: the copy of the rest is the first thing that is wrong, before incomplete KV lands."""
    take = WriterMachine._take_move

    def lax(self: Any, move: Any, now: int) -> None:
        t = self.transfers.by_id.get(move.transfer)
        if t is not None:
            t.next_row = move.start_row
        take(self, move, now)

    method(stack, WriterMachine, "_take_move", lax)
    cell(stack, Jobs, PrefillState.COMPUTING, PrefillInput.WRITER_LOST, Jobs._ignore)


@mutant("a transfer may begin in its middle", "release", timed={"orphan": 6})
def begins_anywhere(stack: ExitStack) -> None:
    take = WriterMachine._take_move

    def lax(self: Any, move: Any, now: int) -> None:
        if move.transfer in self.transfers.by_id:
            take(self, move, now)
        else:
            self.transfers.open_move(move, self._speaker(Role.PREFILL), now)

    method(stack, WriterMachine, "_take_move", lax)


@mutant("move written before its grant", "late-write")
def before_grant(stack: ExitStack) -> None:
    open_move = Writer.open_move

    def eager(self: Any, move: Any, source: Any, now: int) -> None:
        open_move(self, move, source, now)
        decode = self._out.instance_of(Role.DECODE)
        if decode is not None:
            t = self.by_id[move.transfer]
            t.dest, t.dest_pages = decode, move.pages
            self._copy(t, move)

    method(stack, Writer, "open_move", eager)


@mutant("source pages released while a copy reads", "release")
def release_early(stack: ExitStack) -> None:
    def drop(self: Any, t: Any, source: Any, now: int) -> None:
        self._out.send(Role.PREFILL, SourceReleased(t.transfer, landed=False))
        self._end(t, "dropped", now)

    cell(stack, Writer, WriterState.MOVING, WriterInput.DROP, drop)


@mutant("drop unanswered", "liveness")
def no_answer(stack: ExitStack) -> None:
    def drop(self: Any, t: Any, source: Any, now: int) -> None:
        t.source = None
        self._end(t, "dropped", now)

    for state in (WriterState.GRANTED, WriterState.WAITING, WriterState.MOVING):
        cell(stack, Writer, state, WriterInput.DROP, drop)


@mutant("mapping closed under a copy", "unmapped", timed={"kill": 6})
def unmap_early(stack: ExitStack) -> None:
    method(stack, Writer, "copies_of", lambda self, instance: 0)


@mutant("a withheld ack never leads to an exit", "liveness", chances={"hang": 0.3})
def never_exits(stack: ExitStack) -> None:
    method(stack, WriterMachine, "_check_withheld", lambda self, now: None)


@mutant("withheld acks leave health green", "bound", chances={"hang": 0.3})
def green(stack: ExitStack) -> None:
    """The writer exits in time, and nobody could see it coming."""
    emit = WriterMachine.emit

    def quiet(self: Any, effect: Any) -> None:
        if not isinstance(effect, SetHealth) or effect.name != "writer":
            emit(self, effect)

    method(stack, WriterMachine, "emit", quiet)


@mutant("quiescent from an old protocol version trusted", "ack", old_writer=True)
def old_version(stack: ExitStack) -> None:
    check = Link.check_hello

    def lax(self: Any, stream: int, hello: Hello) -> Any:
        return check(self, stream, replace(hello, version=PROTOCOL_VERSION))

    method(stack, Link, "check_hello", lax)


# --- prefill and lb ------------------------------------------------------------------------


@mutant("source lost with a broken stream", "liveness")
def source_lost(stack: ExitStack) -> None:
    _without_held(PrefillMachine, stack)


@mutant("source pages reused at the end of the request", "source-reused")
def source_free(stack: ExitStack) -> None:
    def end(self: Any, job: Any, message: Any, now: int) -> None:
        self._drop(job)
        job.owed = False
        self._end_request(job)
        self._free(job)

    cell(stack, Jobs, PrefillState.HANDED, PrefillInput.END, end)


@mutant("a prompt overtakes an earlier one", "order")
def overtake(stack: ExitStack) -> None:
    start = Jobs.start_queued

    def any_order(self: Any, now: int) -> None:
        start(self, now)
        for job in list(self.queue)[1:]:
            self.queue.remove(job)
            self.queue.appendleft(job)
            start(self, now)

    method(stack, Jobs, "start_queued", any_order)


@mutant("a lost handoff is nobody's business", "liveness", search="handoff")
def no_doubt(stack: ExitStack) -> None:
    cell(stack, Jobs, PrefillState.HANDED, PrefillInput.WRITER_LOST, Jobs._ignore)


# --- canaries ------------------------------------------------------------------------------


@mutant("canary: a landing is never told", "liveness", every=True, seeds=50)
def canary(stack: ExitStack) -> None:
    send = WriterMachine.send

    def silent(self: Any, peer: Role, message: Any, only: Any = None) -> bool:
        return not isinstance(message, Landed) and send(self, peer, message, only)

    method(stack, WriterMachine, "send", silent)


@mutant("canary: a page is lost with every stream", "conservation", every=True, seeds=50)
def leaky(stack: ExitStack) -> None:
    free = Ledger._free_from

    def leak(self: Any, transfer: Any, state: Any) -> None:
        free(self, transfer, state)
        self._free.pop(0)

    method(stack, Ledger, "_free_from", leak)


class OldWriter(WriterMachine):
    """A kvproxy of an older protocol: its ack says that it queues nothing more."""

    def _own_hello(self, peer: Role, number: int, to: Any) -> Hello:
        return replace(super()._own_hello(peer, number, to), version=0)

    def _take_abort(self, abort: Abort, now: int) -> None:
        self.send(Role.DECODE, AbortAck(abort.transfer))
