"""Prefill's machine: prompts from lb, computed parts to kvproxy.

What happens to one transfer stands in `prefill_jobs`; here is who may speak. A vanished lb
ends all its requests (S8); a lost writer fails what is incomplete, a dead one pays all debts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from duplet_core import engine
from duplet_core.effects import Count, Drained, FromEngineEvent
from duplet_core.errors import Reason, require
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, RequestKey, Role
from duplet_core.link import Link
from duplet_core.machine import Machine
from duplet_core.messages import End, Failed, Hello, Prefill, Refusing, SourceReleased
from duplet_core.prefill_jobs import Jobs
from duplet_core.prefill_state import Input, PrefillConfig
from duplet_core.prefix import NoPrefixIndex, PrefixIndex


class PrefillMachine(Machine):
    """Runs in prefill's I/O process; owns its jobs and, through them, every page."""

    ROLE = Role.PREFILL
    _HANDLERS: ClassVar[dict[tuple[Role, type], str]] = {
        (Role.LB, Prefill): "_take_prefill",
        (Role.LB, End): "_take_end",
        (Role.KVPROXY, SourceReleased): "_take_released",
    }

    def __init__(
        self, instance: InstanceId, config: PrefillConfig, index: PrefixIndex | None = None
    ) -> None:
        """`index` None: no prefix is shared."""
        super().__init__(
            instance,
            (
                Link(Role.LB, instance, dials=False, needs_lifeline=False),
                Link(Role.KVPROXY, instance, dials=True, needs_lifeline=True),
            ),
        )
        self.config = config
        self.jobs = Jobs(config, self, NoPrefixIndex() if index is None else index)
        self._told_refusing: Reason | None = None
        """As lb knows it, while there is a stream to lb."""
        self._drained_told = False

    # --- peers ------------------------------------------------------------------

    def _take_prefill(self, prefill: Prefill, now: int) -> None:
        lb = self.links[Role.LB].current
        assert lb is not None
        key = RequestKey(lb.instance, prefill.request_id)
        refusal = self._refusal(key, prefill)
        if refusal is not None:
            self.send(Role.LB, Failed(prefill.request_id, prefill.transfer, *refusal))
            return
        self.jobs.enqueue(key, prefill, now)

    def _refusal(self, key: RequestKey, prefill: Prefill) -> tuple[Reason, str] | None:
        if self.draining:
            return Reason.DRAINING, "prefill takes nothing new"
        if key in self.jobs.by_key or prefill.transfer in self.jobs.by_transfer:
            return Reason.DUPLICATE_REQUEST, "request or transfer id is live"
        needed = self.jobs.pages_for(prefill.prompt_rows)
        if needed > self.config.pages:
            return (
                Reason.PROMPT_TOO_LONG,
                f"{needed} pages needed, the pool has {self.config.pages}",
            )
        if len(self.jobs.queue) >= self.config.queue_limit:
            return Reason.OVERLOADED, "prefill's queue is full"
        return None

    def _refusing(self) -> Reason | None:
        if self.draining:
            return Reason.DRAINING
        return Reason.WRITER_LOST if self.links[Role.KVPROXY].current is None else None

    def _take_end(self, end: End, now: int) -> None:
        if end.reason is Reason.KV_MISMATCH:
            self.jobs.forget_prefixes()
        job = self.jobs.by_transfer.get(end.transfer)
        if job is not None and job.key.lb == self.instance_of(Role.LB):
            self.jobs.step(job, Input.END, end, now)

    def _take_released(self, released: SourceReleased, now: int) -> None:
        writer = self.links[Role.KVPROXY].current
        assert writer is not None
        job = self.jobs.by_transfer.get(released.transfer)
        if job is None or job.writer != writer.instance:
            self.emit(Count("reports_ignored"))
            return
        self.jobs.step(job, Input.RELEASED, released, now)

    def _own_hello(self, peer: Role, number: int, to: InstanceId | None) -> Hello:
        if peer is Role.KVPROXY:
            held = tuple(
                j.transfer for j in self.jobs.by_transfer.values() if j.owed and j.writer == to
            )
            return Hello(Role.PREFILL, self.instance, PROTOCOL_VERSION, number, to, held)
        refusing = self._told_refusing = self._refusing()
        ids = (Role.PREFILL, self.instance, PROTOCOL_VERSION, number, to)
        return Hello(*ids, spec=self.config.spec, refusing=refusing)

    def _on_lost(self, peer: Role, instance: InstanceId, now: int) -> None:
        for job in list(self.jobs.by_transfer.values()):
            if peer is Role.KVPROXY and job.writer == instance:
                self.jobs.step(job, Input.WRITER_LOST, None, now)
            elif peer is Role.LB and job.key.lb == instance:
                self.jobs.step(job, Input.END, None, now)

    def _on_died(self, peer: Role, instance: InstanceId, now: int) -> None:
        if peer is Role.KVPROXY:
            for job in list(self.jobs.by_transfer.values()):
                if job.writer == instance:
                    self.jobs.step(job, Input.WRITER_DIED, None, now)

    # --- the engine ---------------------------------------------------------------

    def _on_other(self, event: Any, now: int) -> None:
        if not isinstance(event, FromEngineEvent):
            super()._on_other(event, now)
            return
        message = event.message
        if isinstance(message, engine.ChunkDone):
            what = Input.CHUNK if message.first_row is None else Input.LAST_CHUNK
        elif isinstance(message, engine.SeqFailed):
            what = Input.ENGINE_FAILED
        else:
            require(isinstance(message, engine.Stopped), f"unexpected {type(message).__name__}")
            what = Input.STOPPED
        assert isinstance(message, engine.ChunkDone | engine.SeqFailed | engine.Stopped)
        self.jobs.step_seq(message.seq, what, message, now)

    def _settle(self, now: int) -> None:
        self.jobs.start_queued(now)
        refusing = self._refusing()
        if refusing is not self._told_refusing and self.send(Role.LB, Refusing(refusing)):
            self._told_refusing = refusing
        if self.draining and not self._drained_told and not self.jobs.by_transfer:
            self._drained_told = True
            self.emit(Drained())
