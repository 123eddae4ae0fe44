"""Decode's machine: credit and admission towards lb, grants and Aborts towards kvproxy.

What happens to one transfer stands in `decode_transfers`; here is who may speak and when:
lb's Admits are taken in arrival order and within the credit it was told; a vanished lb ends
all its requests (S8); a writer that is lost quarantines, a writer that is dead frees.
"""

from __future__ import annotations

from typing import Any, ClassVar

from duplet_core import engine
from duplet_core.decode_state import DecodeConfig, Input, State, pick_rows
from duplet_core.decode_transfers import Transfers
from duplet_core.effects import (
    Count,
    Drained,
    FromEngineEvent,
    LifelineUp,
    Log,
    Send,
    SetHealth,
)
from duplet_core.errors import Reason, RemoteProtocolError, require
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, RequestKey, Role, TransferId
from duplet_core.ledger import PageState
from duplet_core.link import Link
from duplet_core.machine import Machine
from duplet_core.messages import (
    AbortAck,
    Admit,
    Census,
    Credit,
    End,
    Hello,
    Landed,
    Leaving,
    Refused,
    Route,
    Started,
    StepCredit,
    TransferBroken,
    TransferFailed,
)
from duplet_core.step_guard import StepGuard


class DecodeMachine(Machine):
    """Runs in decode's I/O process; owns its transfers and, through them, every page."""

    ROLE = Role.DECODE
    _HANDLERS: ClassVar[dict[tuple[Role, type], str]] = {
        (Role.LB, Admit): "_take_admit",
        (Role.LB, End): "_take_end",
        (Role.KVPROXY, Started): "_take_writer",
        (Role.KVPROXY, Landed): "_take_writer",
        (Role.KVPROXY, TransferFailed): "_take_writer",
        (Role.KVPROXY, TransferBroken): "_take_writer",
        (Role.KVPROXY, AbortAck): "_take_writer",
        (Role.KVPROXY, Leaving): "_take_leaving",
        (Role.KVPROXY, Route): "_take_route",
    }
    _WRITER_INPUTS: ClassVar[dict[type, Input]] = {
        Started: Input.STARTED,
        Landed: Input.LANDED,
        TransferFailed: Input.FAILED,
        TransferBroken: Input.BROKEN,
        AbortAck: Input.ACK,
    }

    def __init__(self, instance: InstanceId, config: DecodeConfig) -> None:
        super().__init__(
            instance,
            (
                Link(Role.LB, instance, dials=False, needs_lifeline=False),
                Link(Role.KVPROXY, instance, dials=True, needs_lifeline=True),
            ),
        )
        self.config = config
        self.transfers = Transfers(config, self)
        floor = config.floor_rows_per_s
        self.guard = StepGuard(floor, config.step_times) if floor else None
        self.aborts_resent = 0
        self._admits_seen = 0
        self._told_figures: tuple[Any, ...] = ()
        """What the last Credit on this stream was made of."""
        self._quarantine_red = False
        self._writer_leaves = False
        """The writer whose stream counts was told to leave."""
        self._transport = ""
        """How KV comes here, as the writer said it; for people."""
        self._ends_withheld = 0
        """As the writer said it; for people."""
        self._drained_told = False

    # --- lb -------------------------------------------------------------------

    def _take_admit(self, admit: Admit, now: int) -> None:
        lb = self.links[Role.LB].current
        assert lb is not None
        self._admits_seen += 1
        self._check_quarantine(now)
        key = RequestKey(lb.instance, admit.request_id)
        refusal = self._refusal(key, admit)
        count = self.transfers.pages_for(admit.prompt_rows + admit.max_rows)
        writer = self.links[Role.KVPROXY].current
        if refusal is None:
            assert writer is not None
            pages = self.transfers.ledger.grant(admit.transfer, count, writer.instance)
            if pages is not None:
                self.transfers.grant(key, admit, writer.instance, pages, now)
                return
            refusal = (Reason.OVERLOADED, f"{count} pages needed, fewer are free")
        if refusal[0] is not Reason.DRAINING:
            self.emit(Count("admits_refused_within_credit"))
        self.send(Role.LB, Refused(admit.request_id, admit.transfer, *refusal))

    def _refusal(self, key: RequestKey, admit: Admit) -> tuple[Reason, str] | None:
        if admit.prompt_rows < 1 or admit.max_rows < 1:
            raise RemoteProtocolError("Admit: prompt_rows and max_rows are at least 1")
        refusing = self._refusing()
        if refusing is not None:
            return refusing, "decode takes nothing new"
        if key in self.transfers.by_key or admit.transfer in self.transfers.by_transfer:
            return Reason.DUPLICATE_REQUEST, "request or transfer id is live"
        rows = admit.prompt_rows + admit.max_rows
        if rows > self.config.longest_sequence:
            return Reason.PROMPT_TOO_LONG, f"{rows} rows, {self.config.longest_sequence} fit"
        if self._free_slots() < 1:
            return Reason.OVERLOADED, "no free stream slot"
        return None

    def _take_end(self, end: End, now: int) -> None:
        t = self.transfers.by_transfer.get(end.transfer)
        if t is not None and t.key.lb == self.instance_of(Role.LB):
            self.transfers.step(t, Input.END, end, now)

    # --- the writer -------------------------------------------------------------

    def _take_writer(self, message: Any, now: int) -> None:
        writer = self.links[Role.KVPROXY].current
        assert writer is not None
        t = self.transfers.by_transfer.get(message.transfer)
        if t is None or t.writer != writer.instance:
            # S2: a report about pages that this writer holds no grant for changes nothing.
            self.emit(Count("reports_ignored"))
            return
        self.transfers.step(t, self._WRITER_INPUTS[type(message)], message, now)

    def _take_leaving(self, leaving: Leaving, now: int) -> None:
        self._writer_leaves = True

    def _take_route(self, route: Route, now: int) -> None:
        self._transport = route.transport
        self._ends_withheld = route.ends_withheld
        self._tell_up(self.links[Role.KVPROXY], route.transport)

    def _on_up(self, peer: Role, instance: InstanceId, hello: Hello, now: int) -> None:
        if peer is Role.KVPROXY:
            self._writer_leaves = False
            self._transport = hello.transport

    def _own_hello(self, peer: Role, number: int, to: InstanceId | None) -> Hello:
        held: tuple[TransferId, ...] = ()
        spec = ""
        credit = None
        if peer is Role.KVPROXY:
            mine = [t for t in self.transfers.by_transfer.values() if t.writer == to]
            require(
                all(t.state is not State.GRANTED for t in mine),
                "what was granted on an older stream is quarantined before the next Hello",
            )
            held = tuple(t.transfer for t in mine if t.state is State.QUARANTINED)
            self.aborts_resent += len(held)
            self.emit(Count("aborts_resent", len(held)))
        else:
            self._admits_seen = 0
            spec = self.config.spec
            credit = self._credit()
            self._told_figures = self._figures()
        return Hello(Role.DECODE, self.instance, PROTOCOL_VERSION, number, to, held, spec, credit)

    def _on_lost(self, peer: Role, instance: InstanceId, now: int) -> None:
        if peer is Role.KVPROXY:
            self._transport, self._ends_withheld = "", 0
        for t in list(self.transfers.by_transfer.values()):
            if peer is Role.KVPROXY and t.writer == instance:
                self.transfers.step(t, Input.WRITER_LOST, None, now)
            elif peer is Role.LB and t.key.lb == instance:
                self.transfers.step(t, Input.END, None, now)

    def _on_died(self, peer: Role, instance: InstanceId, now: int) -> None:
        if peer is Role.KVPROXY:
            for t in list(self.transfers.by_transfer.values()):
                if t.writer == instance:
                    self.transfers.step(t, Input.WRITER_DIED, None, now)

    # --- the engine ---------------------------------------------------------------

    def _on_other(self, event: Any, now: int) -> None:
        if not isinstance(event, FromEngineEvent):
            super()._on_other(event, now)
            return
        message = event.message
        if isinstance(message, engine.StepDone):
            self._take_step(message, now)
        elif isinstance(message, engine.Verified):
            self.transfers.step_seq(
                message.seq, Input.VERIFIED if message.ok else Input.MISMATCH, message, now
            )
        elif isinstance(message, engine.SeqFailed):
            self.transfers.step_seq(message.seq, Input.ENGINE_FAILED, message, now)
        elif isinstance(message, engine.Stopped):
            self.transfers.step_seq(message.seq, Input.STOPPED, message, now)
        else:
            require(False, f"decode's engine sent {type(message).__name__}")

    def _take_step(self, done: engine.StepDone, now: int) -> None:
        lb = self.links[Role.LB].current
        live: list[int] = []
        context_rows = 0
        for index, seq in enumerate(done.seqs):
            t = self.transfers.by_seq.get(seq)
            require(t is not None, "a step names open sequences only")
            assert t is not None
            context_rows += t.prompt_rows + t.report.output_rows
            if t.state is State.RUNNING:
                t.report.output_rows += 1
                t.report.step_ends_ns.append(done.done_ns)
                if lb is not None and t.key.lb == lb.instance:
                    live.append(index)
        if lb is not None and live:
            self.emit(Send(Role.LB, lb.stream, pick_rows(done, live)))
        if self.guard is not None:
            pages = context_rows // self.config.page_rows
            self.guard.observe(len(done.seqs), pages, done.started_ns, done.done_ns)
        for seq, stop in done.ends:
            self.transfers.step_seq(seq, Input.ENGINE_END, (stop, done), now)

    # --- credit, bounds, timers -----------------------------------------------------

    def _free_slots(self) -> int:
        return self.config.slots - self.transfers.streams()

    def _step_credit(self) -> StepCredit | None:
        """lb counts against it; an Admit that crosses a new fit is not refused for it."""
        if self.guard is None:
            return None
        return self.guard.credit(self.transfers.streams(), self.transfers.reserved_pages())

    def _refusing(self) -> Reason | None:
        if self.draining:
            return Reason.DRAINING
        if self._quarantine_red:
            return Reason.QUARANTINE
        if self._writer_leaves or self.links[Role.KVPROXY].current is None:
            return Reason.WRITER_LOST
        return None

    def _credit(self) -> Credit:
        ledger = self.transfers.ledger
        census = Census(
            ledger.count(PageState.GRANTED),
            ledger.count(PageState.LIVE),
            ledger.count(PageState.QUARANTINED),
            self.transfers.kv_checks,
            self.transfers.kv_mismatches,
            self.transfers.pending_aborts(),
            self.aborts_resent,
            self.links[Role.KVPROXY].living,
            self._transport,
            self.config.damaged_pages,
            self._ends_withheld,
        )
        free = ledger.count(PageState.FREE)
        slots = self._free_slots()
        if self.guard is not None:
            slots = min(slots, self.guard.streams_believed() - self.transfers.streams())
        limits = (ledger.total, free, max(0, slots), self._admits_seen)
        return Credit(*limits, self._refusing(), census, self._step_credit())

    def _figures(self) -> tuple[Any, ...]:
        """What a Credit says, without making one: it seldom changes from event to event."""
        transfers = self.transfers
        checks = (transfers.kv_checks, transfers.kv_mismatches)
        aborts = (transfers.pending_aborts(), self.aborts_resent)
        writer = (self.links[Role.KVPROXY].living, self._transport, self._ends_withheld)
        streams = transfers.streams()
        fits = 0 if self.guard is None else self.guard.fits
        limits = (streams, self._admits_seen, self._refusing(), fits)
        return (*limits, *transfers.ledger.counts(), *checks, *aborts, *writer)

    def next_timer(self) -> int | None:
        return self.transfers.next_timer()

    def _on_timer(self, now: int) -> None:
        self.transfers.expire(now)

    def _on_watched(self, event: LifelineUp, now: int) -> None:
        self.emit(Log("writer watched", detail=event.instance))

    def _settle(self, now: int) -> None:
        self._check_quarantine(now)
        lb = self.links[Role.LB].current
        if lb is not None:
            figures = self._figures()
            if figures != self._told_figures:
                self._told_figures = figures
                self.emit(Send(Role.LB, lb.stream, self._credit()))
        if self.draining and not self._drained_told and self.transfers.streams() == 0:
            self._drained_told = True
            self.emit(Drained())

    def _check_quarantine(self, now: int) -> None:
        held = self.transfers.count_overdue(now)
        red = held * 100 > self.config.quarantine_percent * self.transfers.ledger.total
        if red != self._quarantine_red:
            self._quarantine_red = red
            self.emit(
                SetHealth("quarantine", not red, f"{held} of {self.transfers.ledger.total} pages")
            )
