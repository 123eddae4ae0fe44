"""Simulation: one seed is one schedule of a unit under a swarm of faults, then a liveness phase.

All randomness comes from the seed, through separate generators for network, scheduling and
workload; time is a number; nothing iterates over a set. The same seed tells the same story.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from duplet_core.effects import CopyResult, Submit
from duplet_core.errors import Reason
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_sim import checks, content
from duplet_sim.agenda import FOREVER, Agenda
from duplet_sim.copying import CopyKey
from duplet_sim.engines import DecodeEngine, HostEngine, PrefillEngine
from duplet_sim.faults import FAULTS
from duplet_sim.goal import complaints
from duplet_sim.parts import ACCEPTOR, DIALER, WATCHED, Client, Stream, StreamKey
from duplet_sim.swarm import Swarm, draw
from duplet_sim.violation import Violation
from duplet_sim.workload import Order, Workload

REST_EVENTS = 6000
"""A unit without faults is at rest after so many events, or something runs in a circle."""
MOST_EVENTS = 1 << 20


class Simulator(Agenda):
    """One run."""

    def __init__(self, seed: int, swarm: Swarm | None = None) -> None:
        super().__init__(seed, draw(seed) if swarm is None else swarm)
        self.plan = Random(f"plan {seed}")
        self.workload = Workload(seed, self.swarm)
        self.workers: dict[str, Callable[[Any], None]] = {
            "engine": self._wake_engine,
            "outbox": self._plan_outbox,
            "copy": self._plan_copy,
            "cancelled": self._refuse_copy,
            "broken": self._plan_closes,
            "undialed": self._plan_dial,
            "ended": self._note_end,
            "drained": self._plan_leaving,
            "resumed": self._unpark,
            "death": self._after_death,
        }
        """What follows from what the world tells."""
        self.busy_engines: set[InstanceId] = set()
        self.wanted: dict[Role, list[InstanceId]] = {}
        """Who waits for an instance of a service, to dial it."""
        self.blocked_until: dict[InstanceId, int] = {}
        self.submitted = 0
        self.damaged = False
        """Some cached page went bad."""
        self.outcome: dict[TransferId, Reason | None] = {}

    def work(self, kind: str, key: Any) -> None:
        self.workers[kind](key)

    def run(self) -> None:
        """The whole story of this seed.

        Raises:
            Violation: an invariant does not hold.
        """
        for role in self.config.roles:
            self.begin(role)
        if not self.swarm.cold:
            self.calm = True
            self._rest()
            self.calm = False
        end = self.now + self.swarm.length
        self._plan_faults()
        self._plan_requests()
        self.play(end, MOST_EVENTS)
        self._calm_down()
        self._rest()
        self._check_rest()
        if self.swarm.probe or self.damaged:
            self._check_serves()

    def _rest(self) -> None:
        self.play(FOREVER, REST_EVENTS)

    def _check_rest(self) -> None:
        wrong = complaints(self)
        if wrong:
            raise Violation("liveness", "; ".join(wrong))
        for process in self.processes.values():
            checks.check_machine(process.node.machine)

    def _check_serves(self) -> None:
        for voice in range(self.swarm.voices + 1) if self.damaged else (self.swarm.voices,):
            outcome = self._serve(voice)
            if outcome is Reason.KV_MISMATCH and self.damaged:
                outcome = self._serve(voice)  # what is cached was forgotten
            if outcome is not None:
                raise Violation("liveness", f"a new request of voice {voice} ends with {outcome}")
        self._check_rest()

    def _serve(self, voice: int) -> Reason | None:
        order = self.workload.plain(self.submitted + 1, voice)
        transfer = self.request(order, 1 << 40, "after all")
        self._rest()
        return self.outcome[transfer]

    # --- what follows from what happens ----------------------------------------

    def _plan_outbox(self, instance: InstanceId) -> None:
        self.at(self.some(self.swarm.message_ticks), self._do_outbox, instance)

    def _plan_copy(self, key: CopyKey) -> None:
        ticks = 1 if self.calm else self.some(self.swarm.copy_ticks)
        self.at(ticks, self._do_copy, key)

    def _refuse_copy(self, key: CopyKey) -> None:
        self._report(key, CopyResult.NOT_STARTED)

    def _plan_closes(self, name: StreamKey) -> None:
        stream = self.streams[name]
        if not self.calm and self.net.random() < 0.3:
            # A stale tail: the new stream may be up before the old one's last words arrive.
            stream.held[ACCEPTOR] = self.now + self.some(self.swarm.notice_ticks * 3)
        for side in (ACCEPTOR, DIALER):
            if self.side_process(stream, side) is not None:
                self.at(self.some(self.swarm.notice_ticks), self._do_close, (stream, side))

    def _plan_dial(self, key: tuple[InstanceId, Role]) -> None:
        self.at(self.some(20), self._do_dial, key)

    def _note_end(self, key: tuple[Client, Reason | None]) -> None:
        client, reason = key
        self.outcome[client.submit.transfer] = reason

    def _plan_leaving(self, instance: InstanceId) -> None:
        self.at(self.some(20), self._do_leave, instance)

    def _unpark(self, instance: InstanceId) -> None:
        for do, key in self.parked.pop(instance, []):
            self.at(0, do, key)

    def _after_death(self, instance: InstanceId) -> None:
        dead = self.processes[instance]
        self.parked.pop(instance, None)
        for watcher in list(self.processes.values()):
            if instance in watcher.watching and not watcher.exited:
                key = (watcher.instance, instance)
                self.at(self.some(self.swarm.notice_ticks), self._do_mourn, key)
        if self.current[dead.role] == instance:
            self.at(self.some(self.swarm.restart_ticks), self._do_start, dead.role)

    # --- steps of the unit -----------------------------------------------------

    def begin(self, role: Role) -> None:
        self.start(role)
        instance = self.current[role]
        watch_ticks = 10 if self.now else 1  # most runs begin with a unit that finds itself
        for peer, link in self.processes[instance].node.machine.links.items():
            if link.dials:
                self.at(5 + self.some(20), self._do_dial, (instance, peer))
        for other in list(self.processes.values()):
            if not other.exited and other.role in WATCHED[role]:
                self.at(self.some(watch_ticks), self._do_watch, (instance, other.instance))
            if not other.exited and role in WATCHED[other.role]:
                self.at(self.some(watch_ticks), self._do_watch, (other.instance, instance))
        for door in (role, Role.PREFILL) if self.config.host is not None else (role,):
            for dialer in self.wanted.pop(door, []):
                self.at(self.some(20), self._do_dial, (dialer, door))

    def _do_start(self, role: Role) -> None:
        if self.primary(role) is None:
            self.begin(role)

    def _do_watch(self, key: tuple[InstanceId, InstanceId]) -> None:
        watcher, watched = key
        target = self.processes.get(watched)
        if target is None or target.exited or not self.is_able(watcher, self._do_watch, key):
            return
        if target.stopped:
            self.at(50, self._do_watch, key)
        else:
            self.watch(watcher, watched)

    def _do_mourn(self, key: tuple[InstanceId, InstanceId]) -> None:
        if self.is_able(key[0], self._do_mourn, key):
            self.mourn(*key)

    def _do_dial(self, key: tuple[InstanceId, Role]) -> None:
        instance, peer = key
        if not self.is_able(instance, self._do_dial, key):
            return
        if peer in self.processes[instance].dialing:
            return
        target = self.primary(peer)
        if target is None:
            self.wanted.setdefault(peer, []).append(instance)
            return
        ends = (self.blocked_until.get(end, 0) for end in (instance, target.instance))
        blocked = max(ends) - self.now
        if blocked > 0:
            self.at(blocked, self._do_dial, key)
        else:
            self.dial(instance, peer)

    def _do_close(self, key: tuple[Stream, int]) -> None:
        stream, side = key
        if stream.closed[side]:
            return
        instance = stream.acceptor if side == ACCEPTOR else stream.dialer
        if not self.is_able(instance, self._do_close, key):
            return
        if stream.held[side] > self.now and not self.calm:
            self.at(stream.held[side] - self.now, self._do_close, key)
        else:
            self.close(stream.name, side)

    def _do_leave(self, instance: InstanceId) -> None:
        if self.is_able(instance, self._do_leave, instance):
            self.kill(instance)

    def _do_outbox(self, instance: InstanceId) -> None:
        if self.is_able(instance, self._do_outbox, instance):
            while self.processes[instance].outbox:
                self.hear_engine(instance)

    # --- engines and copies ----------------------------------------------------

    def _wake_engine(self, instance: InstanceId) -> None:
        if instance not in self.busy_engines:
            self.busy_engines.add(instance)
            self.at(self.some(self.swarm.engine_ticks), self._do_engine, instance)

    def _do_engine(self, instance: InstanceId) -> None:
        """One turn of an engine's loop; it takes messages between steps only."""
        if not self.is_able(instance, self._do_engine, instance):
            return
        self.busy_engines.discard(instance)
        engine = self.processes[instance].engine
        assert engine is not None
        fails = self.swarm.chances["engine"] / 4
        if fails and not self.calm and not engine.idle and self.plan.random() < fails:
            self._fail_engine(instance, engine)
        if isinstance(engine, DecodeEngine):
            if engine.can_launch(self.config.depth) and self.plan.random() < 0.8:
                self.engine_step(instance, "launch")
            if engine.steps and (len(engine.steps) > 1 or self.plan.random() < 0.5):
                self.engine_step(instance, "complete")
        prompts = engine.prompts if isinstance(engine, HostEngine) else engine
        if isinstance(prompts, PrefillEngine) and prompts.jobs:
            if self.swarm.by_turns:
                prompts.turn = self.plan.randrange(len(prompts.jobs))
            self.engine_step(instance, "compute")
        while engine.inbox:
            self.engine_step(instance, "take")
        if isinstance(engine, DecodeEngine) and engine.verifying:
            self.engine_step(instance, "verify")
        if not engine.idle:
            self._wake_engine(instance)

    def _fail_engine(self, instance: InstanceId, engine: PrefillEngine | DecodeEngine) -> None:
        if isinstance(engine, DecodeEngine) or engine.jobs:
            self.marks.add("engine fails")
            self.engine_step(instance, "fail")

    def _do_copy(self, key: tuple[InstanceId, int]) -> None:
        """The copy engine works, also while the process that ordered the copy is stopped."""
        copy = self.copies.get(key)
        if copy is None:
            return
        staging = self.processes[key[0]].staging
        if staging is not None and not staging.holds(copy.number):
            if self.gather_copy(key):
                self._plan_copy(key)
            return
        chances = self.swarm.chances
        fate = 1.0 if self.calm or copy.told else self.plan.random()
        if fate < chances["unknown"]:
            self._report(key, CopyResult.UNKNOWN)
            self.at(self.some(self.swarm.copy_ticks * 4), self._do_copy, key)
        elif (fate := fate - chances["unknown"]) < chances["refuse"] and not copy.written:
            self._report(key, CopyResult.NOT_STARTED)
        elif fate - chances["refuse"] < chances["hang"]:
            self.marks.add("copy hangs")
        elif copy.written < copy.count and self.plan.random() < 0.3:
            self.write_copy(key, 1)
            self._plan_copy(key)
        else:
            if copy.written < copy.count:
                self.write_copy(key)
            if not copy.told:
                self._report(key, CopyResult.OK)

    def _report(self, key: tuple[InstanceId, int], result: CopyResult) -> None:
        self.at(0, self._do_report, (key, result))

    def _do_report(self, key: tuple[tuple[InstanceId, int], CopyResult]) -> None:
        copy_key, result = key
        copy = self.copies.get(copy_key)
        if copy is not None and not copy.told and self.is_able(copy.writer, self._do_report, key):
            self.end_copy(copy_key, result)

    # --- clients ---------------------------------------------------------------

    def _plan_requests(self) -> None:
        dice, swarm = self.workload.dice, self.swarm
        first = dice.randrange(max(1, swarm.length - swarm.arrival_ticks))
        for _ in range(swarm.requests):
            self.at(first + dice.randrange(swarm.arrival_ticks), self._do_request)

    def _do_request(self, key: None) -> None:
        lb = self.primary(Role.LB)
        if lb is None or lb.stopped:
            return
        load = self.workload
        order = load.draw(self.submitted + 1)
        transfer = self.request(order, self.swarm.deadline, f"r{load.dice.randrange(4)}")
        if load.dice.random() < 0.25:
            self.at(load.dice.randrange(200), self._do_cancel, transfer)

    def request(self, order: Order, deadline: int, request_id: str) -> TransferId:
        lb = self.primary(Role.LB)
        assert lb is not None
        self.submitted += 1
        rows = len(order.prompt)
        submit = Submit(
            request_id,
            TransferId(f"t{self.submitted}"),
            content.pack_prompt(order.prompt, order.stops_at_once),
            rows,
            order.output_rows,
            -(-(rows + order.output_rows) // self.config.page_rows),
            order.sampling,
            self.now + lb.skew + deadline,
        )
        self.submit(submit, order.number)
        return submit.transfer

    def _do_cancel(self, transfer: TransferId) -> None:
        client = self.clients.get(transfer)
        if client is not None and self.is_able(client.lb, self._do_cancel, transfer):
            self.cancel(transfer, Reason.CANCELLED)

    # --- faults ----------------------------------------------------------------

    def _plan_faults(self) -> None:
        for kind, times in self.swarm.timed.items():
            for _ in range(times):
                self.at(self.plan.randrange(1, self.swarm.length), self._do_fault, kind)

    def _do_fault(self, kind: str) -> None:
        if not self.calm:
            self.note("fault", kind)
            FAULTS[kind](self)

    def _do_resume(self, instance: InstanceId) -> None:
        process = self.processes.get(instance)
        if process is not None and process.stopped:
            self.resume(instance)

    def _calm_down(self) -> None:
        """Faults end: what is stopped goes on, what was left over exits, what is dead starts, and
        a broken stream is noticed soon, however late that was to be."""
        self.note("calm", "no faults from here on")
        self.calm = True
        self.blocked_until.clear()
        for process in list(self.processes.values()):
            if process.exited:
                continue
            left_over = self.current[process.role] != process.instance
            if left_over or process.instance in self.special:
                self.kill(process.instance)
            elif process.stopped:
                self.resume(process.instance)
        for name, stream in list(self.streams.items()):
            if stream.broken:
                self._plan_closes(name)
