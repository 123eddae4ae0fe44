"""Simulation: one seed is one schedule of a unit under a swarm of faults, then a liveness phase.

All randomness comes from the seed, through separate generators for network, scheduling and
workload; time is a number; nothing iterates over a set. The same seed tells the same story.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from duplet_core.effects import CopyResult, Submit
from duplet_core.errors import Reason
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_sim import checks, content
from duplet_sim.engines import DecodeEngine, HostEngine, PrefillEngine
from duplet_sim.faults import FAULTS
from duplet_sim.goal import complaints
from duplet_sim.parts import ACCEPTOR, DIALER, WATCHED, StreamKey
from duplet_sim.swarm import Swarm, draw
from duplet_sim.violation import Violation
from duplet_sim.workload import Order, Workload
from duplet_sim.world import World

REST_EVENTS = 6000
"""A unit without faults is at rest after so many events, or something runs in a circle."""


class Simulator(World):
    """One run. Owns the agenda: (tick, serial, kind, key)."""

    def __init__(self, seed: int, swarm: Swarm | None = None) -> None:
        self.seed = seed
        self.swarm = draw(seed) if swarm is None else swarm
        super().__init__(self.swarm.config)
        self.on_work = self._on_work
        self.net = Random(f"net {seed}")
        self.plan = Random(f"plan {seed}")
        self.workload = Workload(seed, self.swarm)
        self.agenda: list[tuple[int, int, str, Any]] = []
        self.serial = 0
        self.doers: dict[str, Callable[[Any], None]] = {
            name[4:]: getattr(self, name) for name in vars(Simulator) if name.startswith("_do_")
        }
        self.events = 0
        self.calm = False
        """No faults any more."""
        self.parked: dict[InstanceId, list[tuple[str, Any]]] = {}
        """What stopped processes have to do once they go on."""
        self.busy_engines: dict[InstanceId, bool] = {}
        self.timers: dict[InstanceId, int] = {}
        self.front_of: dict[tuple[StreamKey, int], int] = {}
        """When the last message queued on this direction arrives: first in, first out."""
        self.blocked_until: dict[InstanceId, int] = {}
        self.held_until: dict[tuple[StreamKey, int], int] = {}
        """What a broken stream still holds for one side comes so late."""
        self.submitted = 0
        self.damaged = False
        """Some cached page went bad."""
        self.outcome: dict[TransferId, Reason | None] = {}

    # --- the agenda ------------------------------------------------------------

    def at(self, ticks: int, kind: str, key: Any = None) -> None:
        self.serial += 1
        heappush(self.agenda, (self.now + ticks, self.serial, kind, key))

    def some(self, ticks: int) -> int:
        """Mostly about `ticks`, sometimes much more; a calm unit is quick."""
        r = self.net.random()
        if self.calm:
            return 1 + int(min(ticks, 4) * r)
        return 1 + int(ticks * (r * 2 if r < 0.95 else r * 12))

    def feed(self, instance: InstanceId, event: Any, now: int | None = None) -> None:
        super().feed(instance, event, now)
        process = self.processes.get(instance)
        if process is None or process.exited:
            return
        due = process.node.machine.next_timer()
        if due is not None:
            when = max(due - process.skew, self.now)
            if self.timers.get(instance, when + 1) > when:
                self.timers[instance] = when
                self.at(when - self.now, "timer", instance)

    def run(self) -> None:
        """The whole story of this seed.

        Raises:
            Violation: an invariant does not hold.
        """
        for role in self.config.roles:
            self.begin(role)
        self._plan_faults()
        for _ in range(self.swarm.requests):
            self.at(self.workload.dice.randrange(self.swarm.length), "request")
        while self.agenda and self.agenda[0][0] < self.swarm.length:
            self._next()
        self._calm_down()
        self._rest()
        self._check_rest()
        self._check_serves()

    def _next(self) -> None:
        self.now, _, kind, key = heappop(self.agenda)
        self.events += 1
        self.doers[kind](key)

    def _rest(self) -> None:
        limit = self.events + REST_EVENTS
        while self.agenda:
            if self.events > limit:
                raise Violation("liveness", f"no rest after {REST_EVENTS} events without faults")
            self._next()

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

    # --- what there is to do ---------------------------------------------------

    def _on_work(self, kind: str, key: Any) -> None:
        swarm = self.swarm
        if kind == "message":
            due = max(self.now + self.some(swarm.message_ticks), self.front_of.get(key, 0))
            self.front_of[key] = due
            self.at(due - self.now, "message", key)
        elif kind == "engine":
            self._wake_engine(key)
        elif kind == "outbox":
            self.at(self.some(swarm.message_ticks), "outbox", key)
        elif kind == "copy":
            self.at(self.some(swarm.copy_ticks), "copy", key)
        elif kind == "cancelled":
            self._report(key, CopyResult.NOT_STARTED)
        elif kind == "broken":
            if (key, ACCEPTOR) not in self.held_until and not self.calm and self.net.random() < 0.3:
                # A stale tail: the new stream may be up before the old one's last words arrive.
                self.held_until[(key, ACCEPTOR)] = self.now + self.some(swarm.notice_ticks * 3)
            for side in (ACCEPTOR, DIALER):
                self.at(self.some(swarm.notice_ticks), "close", (key, side))
        elif kind == "undialed":
            self.at(self.some(20), "dial", key)
        elif kind == "ended":
            client, reason = key
            self.outcome[client.submit.transfer] = reason
        elif kind == "drained":
            self.at(self.some(20), "leave", key)
        elif kind == "resumed":
            for parked, parked_key in self.parked.pop(key, []):
                self.at(0, parked, parked_key)
        else:
            assert kind == "death", kind
            self._after_death(key)

    def _after_death(self, instance: InstanceId) -> None:
        dead = self.processes[instance]
        self.parked.pop(instance, None)
        for watcher in list(self.processes.values()):
            if instance in watcher.watching and not watcher.exited:
                self.at(self.some(self.swarm.notice_ticks), "mourn", (watcher.instance, instance))
        if self.current[dead.role] == instance:
            self.at(self.some(self.swarm.restart_ticks), "start", dead.role)

    def _alive(self, instance: InstanceId, kind: str, key: Any) -> bool:
        """Whether the process can act now; a stopped one does it later."""
        process = self.processes.get(instance)
        if process is None or process.exited:
            return False
        if process.stopped:
            self.parked.setdefault(instance, []).append((kind, key))
            return False
        return True

    # --- steps of the unit -----------------------------------------------------

    def begin(self, role: Role) -> None:
        self.start(role)
        instance = self.current[role]
        watch_ticks = 10 if self.now else 1  # most runs begin with a unit that finds itself
        for peer, link in self.processes[instance].node.machine.links.items():
            if link.dials:
                self.at(5 + self.some(20), "dial", (instance, peer))
        for other in list(self.processes.values()):
            if not other.exited and other.role in WATCHED[role]:
                self.at(self.some(watch_ticks), "watch", (instance, other.instance))
            if not other.exited and role in WATCHED[other.role]:
                self.at(self.some(watch_ticks), "watch", (other.instance, instance))

    def _do_start(self, role: Role) -> None:
        if self.primary(role) is None:
            self.begin(role)

    def _do_watch(self, key: tuple[InstanceId, InstanceId]) -> None:
        watcher, watched = key
        target = self.processes.get(watched)
        if target is None or target.exited or not self._alive(watcher, "watch", key):
            return
        if target.stopped:
            self.at(50, "watch", key)
        else:
            self.watch(watcher, watched)

    def _do_mourn(self, key: tuple[InstanceId, InstanceId]) -> None:
        if self._alive(key[0], "mourn", key):
            self.mourn(*key)

    def _do_dial(self, key: tuple[InstanceId, Role]) -> None:
        instance, peer = key
        if not self._alive(instance, "dial", key) or peer in self.processes[instance].dialing:
            return
        target = self.primary(peer)
        blocked = max(self.blocked_until.get(instance, 0), self.now)
        if target is not None:
            blocked = max(blocked, self.blocked_until.get(target.instance, 0))
        if target is None or blocked > self.now:
            self.at(max(20, blocked - self.now), "dial", key)
        else:
            self.dial(instance, peer)

    def _do_message(self, key: tuple[StreamKey, int]) -> None:
        stream = self.streams.get(key[0])
        if stream is None or stream.closed[key[1]] or not stream.queues[key[1]]:
            return
        receiver = stream.acceptor if key[1] == ACCEPTOR else stream.dialer
        if not self._alive(receiver, "message", key):
            return
        if self._is_held(key, "message"):
            return
        twice = self.swarm.chances["duplicate"]
        if twice and not self.calm and self.net.random() < twice and _may_repeat(key[0]):
            self.duplicates = True
            self.deliver(*key, keep=True)
            stream = self.streams.get(key[0])
            if stream is None or stream.closed[key[1]] or not stream.queues[key[1]]:
                return
        self.deliver(*key)

    def _do_close(self, key: tuple[StreamKey, int]) -> None:
        stream = self.streams.get(key[0])
        if stream is None or stream.closed[key[1]] or not stream.broken:
            return
        instance = stream.acceptor if key[1] == ACCEPTOR else stream.dialer
        if self._alive(instance, "close", key) and not self._is_held(key, "close"):
            self.close(*key)

    def _is_held(self, key: tuple[StreamKey, int], kind: str) -> bool:
        """Whether it comes later; in the order of before."""
        wait = self.held_until.get(key, 0) - self.now
        if wait <= 0 or self.calm:
            return False
        self.at(wait, kind, key)
        return True

    def _do_timer(self, instance: InstanceId) -> None:
        if not self._alive(instance, "timer", instance):
            return
        self.timers.pop(instance, None)
        process = self.processes[instance]
        due = process.node.machine.next_timer()
        if due is None:
            return
        if due <= self.now + process.skew:
            self.tick(instance)
        else:
            self.timers[instance] = due - process.skew
            self.at(due - process.skew - self.now, "timer", instance)

    def _do_leave(self, instance: InstanceId) -> None:
        if self._alive(instance, "leave", instance):
            self.kill(instance)

    def _do_outbox(self, instance: InstanceId) -> None:
        if self._alive(instance, "outbox", instance):
            while self.processes[instance].outbox:
                self.hear_engine(instance)

    # --- engines and copies ----------------------------------------------------

    def _wake_engine(self, instance: InstanceId) -> None:
        if not self.busy_engines.get(instance):
            self.busy_engines[instance] = True
            self.at(self.some(self.swarm.engine_ticks), "engine", instance)

    def _do_engine(self, instance: InstanceId) -> None:
        """One turn of an engine's loop; it takes messages between steps only."""
        if not self._alive(instance, "engine", instance):
            return
        self.busy_engines[instance] = False
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
                self.at(self.some(self.swarm.copy_ticks), "copy", key)
            return
        chances = self.swarm.chances
        fate = 1.0 if self.calm or copy.told else self.plan.random()
        if fate < chances["unknown"]:
            self._report(key, CopyResult.UNKNOWN)
            self.at(self.some(self.swarm.copy_ticks * 4), "copy", key)
        elif (fate := fate - chances["unknown"]) < chances["refuse"] and not copy.written:
            self._report(key, CopyResult.NOT_STARTED)
        elif fate - chances["refuse"] < chances["hang"]:
            self.marks.add("copy hangs")
        elif copy.written < copy.count and self.plan.random() < 0.3:
            self.write_copy(key, 1)
            self.at(self.some(self.swarm.copy_ticks), "copy", key)
        else:
            if copy.written < copy.count:
                self.write_copy(key)
            if not copy.told:
                self._report(key, CopyResult.OK)

    def _report(self, key: tuple[InstanceId, int], result: CopyResult) -> None:
        self.at(0, "report", (key, result))

    def _do_report(self, key: tuple[tuple[InstanceId, int], CopyResult]) -> None:
        copy_key, result = key
        copy = self.copies.get(copy_key)
        if copy is not None and not copy.told and self._alive(copy.writer, "report", key):
            self.end_copy(copy_key, result)

    # --- clients ---------------------------------------------------------------

    def _do_request(self, key: None) -> None:
        lb = self.primary(Role.LB)
        if lb is None or lb.stopped:
            return
        load = self.workload
        order = load.draw(self.submitted + 1)
        transfer = self.request(order, self.swarm.deadline, f"r{load.dice.randrange(4)}")
        if load.dice.random() < 0.25:
            self.at(load.dice.randrange(200), "cancel", transfer)

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
        if client is not None and self._alive(client.lb, "cancel", transfer):
            self.cancel(transfer, Reason.CANCELLED)

    # --- faults ----------------------------------------------------------------

    def _plan_faults(self) -> None:
        for kind, times in self.swarm.timed.items():
            for _ in range(times):
                self.at(self.plan.randrange(1, self.swarm.length), "fault", kind)

    def _do_fault(self, kind: str) -> None:
        if not self.calm:
            FAULTS[kind](self)

    def _do_resume(self, instance: InstanceId) -> None:
        process = self.processes.get(instance)
        if process is not None and process.stopped:
            self.resume(instance)

    def _calm_down(self) -> None:
        """Faults end: what is stopped goes on, what was left over exits, what is dead starts."""
        self.calm = True
        self.blocked_until.clear()
        for key, stream in self.streams.items():
            if stream.broken:
                self._on_work("broken", key)
        for process in list(self.processes.values()):
            if process.exited:
                continue
            left_over = self.current[process.role] != process.instance
            if left_over or process.instance in self.special:
                self.kill(process.instance)
            elif process.stopped:
                self.resume(process.instance)


def _may_repeat(key: StreamKey) -> bool:
    """A client must not get a row twice, and the counts of Admits are exact: lb's streams are
    gRPC streams, which do not repeat. The paths to kvproxy must stand it all the same."""
    return key[1] is Role.KVPROXY
