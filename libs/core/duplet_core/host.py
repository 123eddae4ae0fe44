"""The host's machine: prefill and decode in one, towards lb as if they were two.

lb needs to know nothing of it: it dials prefill's and decode's sockets, and both lead here.
Each link is named by the role that the host plays on it. What happens to one request stands
in `host_stays`; here is who may speak: Admits are taken within the credit that lb was told,
and a vanished lb ends all its requests (S8). There is no writer, so no grant, no quarantine
and no lifeline.
"""

from __future__ import annotations

from typing import Any, ClassVar

from duplet_core import engine
from duplet_core.decode_state import pick_rows
from duplet_core.effects import Count, Drained, FromEngineEvent, Send
from duplet_core.errors import Reason, RemoteProtocolError, require
from duplet_core.host_state import HostConfig, Input, State
from duplet_core.host_stays import Stays
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, RequestKey, Role
from duplet_core.link import Link
from duplet_core.machine import Machine
from duplet_core.messages import Admit, Census, Credit, End, Failed, Hello, Prefill, Refused
from duplet_core.prefix import NoPrefixIndex, PrefixIndex

Refusal = tuple[Reason, str]


class HostMachine(Machine):
    """Runs in the host's I/O process; owns its stays and, through them, every page."""

    ROLE = Role.DECODE  # names it in errors; a Hello tells the role of its link
    _HANDLERS: ClassVar[dict[tuple[Role, type], str]] = {
        (Role.PREFILL, Prefill): "_take_prefill",
        (Role.PREFILL, End): "_take_end",
        (Role.DECODE, Admit): "_take_admit",
        (Role.DECODE, End): "_take_end",
    }

    def __init__(
        self, instance: InstanceId, config: HostConfig, index: PrefixIndex | None = None
    ) -> None:
        """`index` None: no prefix is shared."""
        super().__init__(
            instance,
            tuple(
                Link(Role.LB, instance, dials=False, needs_lifeline=False, name=role)
                for role in (Role.PREFILL, Role.DECODE)
            ),
        )
        self.config = config
        self.stays = Stays(config, self, NoPrefixIndex() if index is None else index)
        self._admits_seen = 0
        self._told_credit: Credit | None = None
        self._drained_told = False

    # --- lb -------------------------------------------------------------------

    def _take_admit(self, admit: Admit, now: int) -> None:
        self._admits_seen += 1
        key = self._key(Role.DECODE, admit)
        refusal = self._taken(key, admit) or self._refuse_admit(admit)
        if refusal is None:
            self.stays.announce(key, admit, now)
            return
        if refusal[0] is not Reason.DRAINING:
            self.emit(Count("admits_refused_within_credit"))
        self.send(Role.DECODE, Refused(admit.request_id, admit.transfer, *refusal))

    def _refuse_admit(self, admit: Admit) -> Refusal | None:
        if admit.prompt_rows < 1 or admit.max_rows < 1:
            raise RemoteProtocolError("Admit: prompt_rows and max_rows are at least 1")
        if self.draining:
            return Reason.DRAINING, "the host takes nothing new"
        rows = admit.prompt_rows + admit.max_rows
        if rows > self.config.longest_sequence:
            return Reason.PROMPT_TOO_LONG, f"{rows} rows, {self.config.longest_sequence} fit"
        if self._free_slots() < 1:
            return Reason.OVERLOADED, "no free stream slot"
        count = self.stays.pages_for(rows)
        if count > self._free_pages():
            return Reason.OVERLOADED, f"{count} pages needed, fewer are free"
        return None

    def _take_prefill(self, prefill: Prefill, now: int) -> None:
        key = self._key(Role.PREFILL, prefill)
        refusal = self._taken(key, prefill) or self._refuse_prefill(prefill)
        if refusal is None:
            self.stays.announce(key, prefill, now)
            return
        self.send(Role.PREFILL, Failed(prefill.request_id, prefill.transfer, *refusal))

    def _refuse_prefill(self, prefill: Prefill) -> Refusal | None:
        stay = self.stays.by_transfer.get(prefill.transfer)
        if stay is not None:
            return None  # it was admitted
        if self.draining:
            return Reason.DRAINING, "the host takes nothing new"
        if len(self.stays.by_transfer) - self.stays.admitted() >= self.config.queue_limit:
            return Reason.OVERLOADED, "too many prompts wait for their Admit"
        return None

    def _taken(self, key: RequestKey, half: Admit | Prefill) -> Refusal | None:
        """Whether an id of the half is somebody else's, or its place is filled already.

        The two streams are not ordered: the half of an earlier use of the id may come late.
        """
        stay = self.stays.by_transfer.get(half.transfer)
        if self.stays.by_key.get(key) is not stay:
            return Reason.DUPLICATE_REQUEST, "request or transfer id is live"
        if stay is None:
            return None
        other = stay.admit if isinstance(half, Prefill) else stay.prefill
        if stay.state is not State.ANNOUNCED or other is None:
            return Reason.DUPLICATE_REQUEST, "request or transfer id is live"
        if other.prompt_rows != half.prompt_rows:
            raise RemoteProtocolError(
                f"{type(half).__name__}: {half.prompt_rows} prompt rows, "
                f"its {type(other).__name__} says {other.prompt_rows}"
            )
        return None

    def _take_end(self, end: End, now: int) -> None:
        stay = self.stays.by_transfer.get(end.transfer)
        if stay is not None:
            self.stays.step(stay, Input.END, end, now)

    def _key(self, role: Role, half: Admit | Prefill) -> RequestKey:
        lb = self.instance_of(role)
        assert lb is not None
        return RequestKey(lb, half.request_id)

    def _own_hello(self, peer: Role, number: int, to: InstanceId | None) -> Hello:
        credit = None
        if peer is Role.DECODE:
            self._admits_seen = 0
            credit = self._told_credit = self._credit()
        spec = self.config.spec
        return Hello(peer, self.instance, PROTOCOL_VERSION, number, to, (), spec, credit)

    def _on_lost(self, peer: Role, instance: InstanceId, now: int) -> None:
        what = Input.END if peer is Role.DECODE else Input.PREFILL_LOST
        for stay in list(self.stays.by_transfer.values()):
            if stay.key.lb == instance:
                self.stays.step(stay, what, None, now)

    # --- the engine ---------------------------------------------------------------

    def _on_other(self, event: Any, now: int) -> None:
        if not isinstance(event, FromEngineEvent):
            super()._on_other(event, now)
            return
        message = event.message
        if isinstance(message, engine.StepDone):
            self._take_step(message, now)
        elif isinstance(message, engine.ChunkDone):
            what = Input.CHUNK if message.first_row is None else Input.LAST_CHUNK
            self.stays.step_seq(message.seq, what, message, now)
        elif isinstance(message, engine.SeqFailed):
            self.stays.step_seq(message.seq, Input.ENGINE_FAILED, message, now)
        elif isinstance(message, engine.Stopped):
            self.stays.step_seq(message.seq, Input.STOPPED, message, now)
        else:
            require(False, f"the host's engine sent {type(message).__name__}")

    def _take_step(self, done: engine.StepDone, now: int) -> None:
        lb = self.links[Role.DECODE].current
        live: list[int] = []
        for index, seq in enumerate(done.seqs):
            stay = self.stays.by_seq.get(seq)
            require(stay is not None, "a step names open sequences only")
            assert stay is not None
            if stay.state is State.RUNNING:
                stay.report.output_rows += 1
                stay.report.step_ends_ns.append(done.done_ns)
                if lb is not None and stay.key.lb == lb.instance:
                    live.append(index)
        if lb is not None and live:
            self.emit(Send(Role.DECODE, lb.stream, pick_rows(done, live)))
        for seq, stop in done.ends:
            self.stays.step_seq(seq, Input.ENGINE_END, (stop, done), now)

    # --- credit ---------------------------------------------------------------------

    def _free_slots(self) -> int:
        return self.config.slots - self.stays.admitted()

    def _free_pages(self) -> int:
        """Pages that are not spoken for: free ones, and cached ones that nobody uses."""
        return self.config.pages - self.stays.reserved

    def _credit(self) -> Credit:
        refusing = Reason.DRAINING if self.draining else None
        live = sum(
            s.reserved
            for s in self.stays.by_transfer.values()
            if s.state in (State.RUNNING, State.STOPPING)
        )
        census = Census(granted_pages=self.stays.reserved - live, live_pages=live)
        limits = (self.config.pages, self._free_pages(), self._free_slots())
        return Credit(*limits, self._admits_seen, refusing, census)

    def _settle(self, now: int) -> None:
        self.stays.start_waiting(now)
        lb = self.links[Role.DECODE].current
        if lb is not None:
            credit = self._credit()
            if credit != self._told_credit:
                self._told_credit = credit
                self.emit(Send(Role.DECODE, lb.stream, credit))
        if self.draining and not self._drained_told and not self.stays.by_transfer:
            self._drained_told = True
            self.emit(Drained())
