"""Decode's machine: it grants pages, takes landed KV, runs streams, and frees on proof only.

A transfer is one request's stay in decode. Its states:

    GRANTED      the writer may write; nothing has landed
    VERIFYING    landed; the engine checks the digests
    RUNNING      the engine generates rows
    STOPPING     the request is over, the engine has not yet let go of the pages
    QUARANTINED  the request is over, the writer has not yet proven that it stopped

A request may end at any moment, and its client hears at once (S7). Its pages follow the two
lifetimes they have: the engine's (left with `Stopped`) and the writer's (left with Landed,
TransferFailed, AbortAck or the writer's death). Time, closed streams and missed health checks
end requests; they never free a page (S5). An Abort stays pending until proof arrives: it is
sent once on each stream, when it arises or within the next Hello (S8).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

from duplet_core import engine
from duplet_core.decode_state import (
    ENGINE_INPUTS,
    WRITER_INPUTS,
    DecodeConfig,
    Input,
    State,
    Transfer,
)
from duplet_core.effects import Count, Log, ToEngineEffect
from duplet_core.errors import Reason, require
from duplet_core.ids import InstanceId, RequestKey, Role, TransferId
from duplet_core.ledger import Ledger
from duplet_core.machine import Outlet
from duplet_core.messages import (
    Abort,
    Accepted,
    Admit,
    Failed,
    Finished,
    Grant,
    Landed,
    Started,
    TransferBroken,
    TransferFailed,
)


class Transfers:
    """Owner of the ledger and of every transfer that holds pages of decode's pool."""

    def __init__(self, config: DecodeConfig, out: Outlet) -> None:
        self.config = config
        self.ledger = Ledger(config.pages)
        self.kv_checks = 0
        self.kv_mismatches = 0
        self.by_transfer: dict[TransferId, Transfer] = {}
        self.by_key: dict[RequestKey, Transfer] = {}
        """Requests that are not over; their ids are taken."""
        self.by_seq: dict[int, Transfer] = {}
        """Transfers whose pages the engine may name."""
        self._count_at: dict[TransferId, int] = {}
        """Quarantined too short a time to count against the line, and from when they will."""
        self._overdue_pages = 0
        self._aborts = 0
        self._deadlines: dict[TransferId, int] = {}
        """Of transfers whose copies are queued, in ns, the next one first."""
        self._out = out
        self._next_seq = 1

    def grant(
        self,
        key: RequestKey,
        admit: Admit,
        writer: InstanceId,
        pages: tuple[int, ...],
        now: int,
    ) -> None:
        """Enter a transfer whose pages the ledger has granted to `writer`."""
        t = Transfer(
            key, admit.transfer, writer, admit.prompt_rows, admit.max_rows, admit.sampling, pages
        )
        t.report.admitted_ns = now
        self.by_transfer[admit.transfer] = t
        self.by_key[key] = t
        prompt_pages = pages[: self.pages_for(admit.prompt_rows)]
        self._out.send(Role.KVPROXY, Grant(admit.transfer, prompt_pages, admit.prompt_rows))

    def step(self, t: Transfer, what: Input, message: Any, now: int) -> None:
        """Apply one input to one transfer, by the table."""
        self.TABLE[t.state][what](self, t, message, now)

    def step_seq(self, seq: int, what: Input, message: Any, now: int) -> None:
        """The same for the engine's word on a sequence."""
        t = self.by_seq.get(seq)
        require(t is not None, "the engine speaks of open sequences only")
        assert t is not None
        self.step(t, what, message, now)

    def streams(self) -> int:
        """Transfers that hold a slot: granted to stopping, not quarantined."""
        return len(self.by_transfer) - self._aborts

    def reserved_pages(self) -> int:
        """Pages of the transfers that hold a slot."""
        held = self.by_transfer.values()
        return sum(len(t.pages) for t in held if t.state is not State.QUARANTINED)

    def pending_aborts(self) -> int:
        """Transfers that wait for a proof."""
        return self._aborts

    def count_overdue(self, now: int) -> int:
        """Pages that have been in quarantine for longer than the grace time."""
        while self._count_at and next(iter(self._count_at.values())) <= now:
            transfer = next(iter(self._count_at))
            del self._count_at[transfer]
            self._overdue_pages += len(self.by_transfer[transfer].pages)
        return self._overdue_pages

    def next_timer(self) -> int | None:
        """When `expire` or `count_overdue` will have more to say."""
        due = (*islice(self._deadlines.values(), 1), *islice(self._count_at.values(), 1))
        return min(due, default=None)

    def expire(self, now: int) -> None:
        """End what takes too long."""
        for transfer in [t for t, due in self._deadlines.items() if due <= now]:
            self.step(self.by_transfer[transfer], Input.DEADLINE, None, now)

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.config.page_rows)

    # --- transitions: one method each, named in the table below ----------------------

    def _ignore(self, t: Transfer, message: Any, now: int) -> None:
        """Decided: changes nothing."""

    def _impossible(self, t: Transfer, message: Any, now: int) -> None:
        require(False, f"{type(message).__name__} for a transfer that is {t.state}")

    def _arm(self, t: Transfer, message: Started, now: int) -> None:
        # S5: queueing is not a stuck write; the deadline counts from the first queued copy.
        self._deadlines[t.transfer] = now + self.config.transfer_deadline_ns

    def _land(self, t: Transfer, message: Landed, now: int) -> None:
        digests = len(message.handoff.digests)
        if message.rows != t.prompt_rows or digests != self.pages_for(t.prompt_rows):
            detail = f"{message.rows} rows and {digests} digests for {t.prompt_rows} rows"
            self._fail(t, Reason.TRANSFER_FAILED, detail)
            self._free_proven(t)
            return
        self.ledger.land(t.transfer)
        self._deadlines.pop(t.transfer, None)
        t.handoff = message.handoff
        t.report.stamps = (*message.handoff.stamps, now)
        t.report.cached_rows = message.handoff.cached_rows
        t.seq = self._next_seq
        self._next_seq += 1
        self.by_seq[t.seq] = t
        t.state = State.VERIFYING
        pages = t.pages[: self.pages_for(t.prompt_rows)]
        self._out.emit(
            ToEngineEffect(
                engine.Verify(t.seq, t.transfer, pages, t.prompt_rows, message.handoff.digests)
            )
        )

    def _fail_free(self, t: Transfer, message: Any, now: int) -> None:
        detail = message.detail if isinstance(message, TransferFailed) else "kvproxy has exited"
        reason = Reason.TRANSFER_FAILED if message is not None else Reason.WRITER_LOST
        self._fail(t, reason, detail)
        self._free_proven(t)

    def _fail_quarantine(self, t: Transfer, message: Any, now: int) -> None:
        if isinstance(message, TransferBroken):
            self._fail(t, Reason.TRANSFER_FAILED, message.detail)
        else:
            self._fail(t, Reason.WRITER_LOST, "the stream to kvproxy ended")
        self._quarantine(t, now)

    def _deadline_quarantine(self, t: Transfer, message: Any, now: int) -> None:
        self._fail(t, Reason.TRANSFER_DEADLINE, "the KV did not land in time")
        self._quarantine(t, now)

    def _end_quarantine(self, t: Transfer, message: Any, now: int) -> None:
        self._quarantine(t, now)

    def _prove(self, t: Transfer, message: Any, now: int) -> None:
        self._free_proven(t)

    def _stop(self, t: Transfer, message: Any, now: int) -> None:
        self._out.emit(ToEngineEffect(engine.Stop(t.seq)))
        self._end_request(t, State.STOPPING)

    def _start(self, t: Transfer, message: engine.Verified, now: int) -> None:
        assert t.handoff is not None
        self.kv_checks += 1
        t.report.stamps = (*t.report.stamps, now)
        t.report.output_rows = 1  # the handoff's first row
        self._out.emit(
            ToEngineEffect(
                engine.Start(
                    t.seq, t.pages, t.handoff.first_row, t.prompt_rows, t.max_rows, t.sampling
                )
            )
        )
        t.state = State.RUNNING
        self._tell(t, Accepted(t.key.request_id, t.transfer, t.seq, t.handoff.first_row))

    def _mismatch(self, t: Transfer, message: engine.Verified, now: int) -> None:
        self.kv_checks += 1
        self.kv_mismatches += 1
        self._out.emit(Count("kv_mismatches"))
        self._out.emit(Log("kv mismatch", t.key.request_id, t.transfer, message.detail))
        self._fail(t, Reason.KV_MISMATCH, message.detail)
        self._stop(t, message, now)

    def _checked_late(self, t: Transfer, message: engine.Verified, now: int) -> None:
        # The request ended while the engine checked; the check counts all the same.
        self.kv_checks += 1
        if not message.ok:
            self.kv_mismatches += 1
            self._out.emit(Count("kv_mismatches"))
            self._out.emit(Log("kv mismatch", t.key.request_id, t.transfer, message.detail))

    def _finish(self, t: Transfer, message: tuple[bool, engine.StepDone], now: int) -> None:
        stop, done = message
        self._tell(t, t.report.finished(t.key.request_id, t.transfer, stop, done.done_ns))
        self._end_request(t, State.STOPPING)

    def _engine_failed(self, t: Transfer, message: engine.SeqFailed, now: int) -> None:
        self._fail(t, Reason.ENGINE_FAILED, message.detail)
        self._end_request(t, State.STOPPING)

    def _let_go(self, t: Transfer, message: engine.Stopped, now: int) -> None:
        if message.kv_ok is not None:
            self.kv_checks += 1
            if not message.kv_ok:
                self.kv_mismatches += 1
                self._out.emit(Count("kv_mismatches"))
                self._out.emit(Log("kv mismatch", t.key.request_id, t.transfer, "at the end"))
        self.ledger.free_live(t.transfer)
        del self.by_seq[t.seq]
        self._forget(t)

    TABLE: ClassVar[dict[State, dict[Input, Callable[..., None]]]]
    """What an input does to a transfer in a state; below the class."""

    # --- what transitions are made of ---------------------------------------------

    def _quarantine(self, t: Transfer, now: int) -> None:
        self._set_aside(t, now)
        # Without a stream to that writer the next Hello carries it (S8).
        self._out.send(Role.KVPROXY, Abort(t.transfer), only=t.writer)

    def _set_aside(self, t: Transfer, now: int) -> None:
        self.ledger.quarantine(t.transfer)
        self._aborts += 1
        self._deadlines.pop(t.transfer, None)
        self._count_at[t.transfer] = now + self.config.quarantine_grace_ns
        self._end_request(t, State.QUARANTINED)

    def _free_proven(self, t: Transfer) -> None:
        if t.state is State.QUARANTINED:
            self._aborts -= 1
            if self._count_at.pop(t.transfer, None) is None:
                self._overdue_pages -= len(t.pages)
        self._deadlines.pop(t.transfer, None)
        self.ledger.free_proven(t.transfer)
        self._forget(t)

    def _forget(self, t: Transfer) -> None:
        del self.by_transfer[t.transfer]
        if self.by_key.get(t.key) is t:
            del self.by_key[t.key]

    def _end_request(self, t: Transfer, state: State) -> None:
        """The request is over and its id may return; its pages are not free yet."""
        del self.by_key[t.key]
        t.state = state

    def _tell(self, t: Transfer, message: Accepted | Finished | Failed) -> None:
        self._out.send(Role.LB, message, only=t.key.lb)

    def _fail(self, t: Transfer, reason: Reason, detail: str) -> None:
        self._out.emit(Log("failed", t.key.request_id, t.transfer, f"{reason}: {detail}"))
        self._tell(t, Failed(t.key.request_id, t.transfer, reason, detail))


Transfers.TABLE = {
    State.GRANTED: {
        Input.STARTED: Transfers._arm,
        Input.LANDED: Transfers._land,
        Input.FAILED: Transfers._fail_free,
        Input.BROKEN: Transfers._fail_quarantine,
        Input.ACK: Transfers._ignore,  # nothing was aborted: not an answer to anything of ours
        Input.WRITER_LOST: Transfers._fail_quarantine,
        Input.WRITER_DIED: Transfers._fail_free,
        Input.END: Transfers._end_quarantine,
        Input.DEADLINE: Transfers._deadline_quarantine,
        **dict.fromkeys(ENGINE_INPUTS, Transfers._impossible),
    },
    State.VERIFYING: {
        # The grant is consumed: nothing the writer says or suffers matters any more.
        **dict.fromkeys(WRITER_INPUTS, Transfers._ignore),
        Input.END: Transfers._stop,
        Input.DEADLINE: Transfers._impossible,
        Input.VERIFIED: Transfers._start,
        Input.MISMATCH: Transfers._mismatch,
        Input.ENGINE_END: Transfers._impossible,
        Input.ENGINE_FAILED: Transfers._engine_failed,
        Input.STOPPED: Transfers._impossible,
    },
    State.RUNNING: {
        **dict.fromkeys(WRITER_INPUTS, Transfers._ignore),
        Input.END: Transfers._stop,
        Input.DEADLINE: Transfers._impossible,
        Input.VERIFIED: Transfers._impossible,
        Input.MISMATCH: Transfers._impossible,
        Input.ENGINE_END: Transfers._finish,
        Input.ENGINE_FAILED: Transfers._engine_failed,
        Input.STOPPED: Transfers._impossible,
    },
    State.STOPPING: {
        **dict.fromkeys(WRITER_INPUTS, Transfers._ignore),
        Input.END: Transfers._ignore,
        Input.DEADLINE: Transfers._impossible,
        Input.VERIFIED: Transfers._checked_late,
        Input.MISMATCH: Transfers._checked_late,
        Input.ENGINE_END: Transfers._ignore,  # crossed our Stop
        Input.ENGINE_FAILED: Transfers._ignore,
        Input.STOPPED: Transfers._let_go,
    },
    State.QUARANTINED: {
        Input.STARTED: Transfers._ignore,
        Input.LANDED: Transfers._prove,
        Input.FAILED: Transfers._prove,
        Input.BROKEN: Transfers._ignore,
        Input.ACK: Transfers._prove,
        Input.WRITER_LOST: Transfers._ignore,
        Input.WRITER_DIED: Transfers._prove,
        Input.END: Transfers._ignore,
        Input.DEADLINE: Transfers._impossible,
        **dict.fromkeys(ENGINE_INPUTS, Transfers._impossible),
    },
}
