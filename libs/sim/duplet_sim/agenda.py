"""A world that runs by itself: everything there is to do gets a time, drawn from a seed.

A step that is due for a stopped process is parked until the process goes on. Time is a
number; what is due at the same tick is done in the order in which it was entered.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from duplet_core.effects import Received
from duplet_core.errors import InvariantError
from duplet_core.ids import InstanceId, Role
from duplet_core.messages import Message
from duplet_sim import executor
from duplet_sim.nodes import TIMER
from duplet_sim.parts import ACCEPTOR, DIALER, Process, Stream
from duplet_sim.swarm import Swarm
from duplet_sim.violation import Violation
from duplet_sim.world import World

Do = Callable[[Any], None]

FOREVER = 1 << 60


class Agenda(World):
    """Owns what is to be done: (tick, serial, what, with what)."""

    def __init__(self, seed: int, swarm: Swarm) -> None:
        super().__init__(swarm.config)
        self.seed = seed
        self.swarm = swarm
        self.net = Random(f"net {seed}")
        self.agenda: list[tuple[int, int, Do, Any]] = []
        self.serial = 0
        self.events = 0
        self.calm = False
        """No faults any more."""
        self.parked: dict[InstanceId, list[tuple[Do, Any]]] = {}
        """What stopped processes have to do once they go on."""
        self.timers: dict[InstanceId, int] = {}

    def at(self, ticks: int, do: Do, key: Any = None) -> None:
        self.serial += 1
        heappush(self.agenda, (self.now + ticks, self.serial, do, key))

    def some(self, ticks: int) -> int:
        """Mostly about `ticks`, sometimes much more; a calm unit is quick."""
        r = self.net.random()
        if self.calm:
            return 1 + int(min(ticks, 4) * r)
        return 1 + int(ticks * (r * 2 if r < 0.95 else r * 12))

    def play(self, until: int, most_events: int) -> None:
        """Do what is due before tick `until`.

        Raises:
            Violation: an invariant broke; `liveness` when there was more to do than that.
        """
        agenda = self.agenda
        for _ in range(most_events):
            if not agenda or agenda[0][0] >= until:
                return
            self.now, _, do, key = heappop(agenda)
            self.events += 1
            do(key)
        raise Violation("liveness", f"no rest after {most_events} events")

    def is_able(self, instance: InstanceId, do: Do, key: Any) -> bool:
        """Whether the process can do it now; a stopped one does it later."""
        process = self.processes.get(instance)
        if process is None or process.exited:
            return False
        if process.stopped:
            self.parked.setdefault(instance, []).append((do, key))
            return False
        return True

    # --- machines -----------------------------------------------------------------

    def feed(self, instance: InstanceId, event: Any, now: int | None = None) -> None:
        """As the world's, for machines that change in place; then the machine's timer."""
        process = self.processes[instance]
        if self.on_event is not None:
            self.on_event(process, event)
        if now is None:
            now = self.now + process.skew
        machine = process.node.machine
        try:
            asked = machine.handle_timer(now) if event is TIMER else machine.receive(event, now)
        except InvariantError as error:
            raise Violation("invariant", f"{machine.ROLE}: {error}") from error
        if asked:
            executor.execute(self, process, asked)
        if process.timed and not process.exited:
            due = machine.next_timer()
            if due is not None:
                self._set_timer(process, due)

    def _set_timer(self, process: Process, due: int) -> None:
        when = max(due - process.skew, self.now)
        instance = process.instance
        if self.timers.get(instance, FOREVER) > when:
            self.timers[instance] = when
            self.at(when - self.now, self._do_timer, instance)

    def _do_timer(self, instance: InstanceId) -> None:
        if not self.is_able(instance, self._do_timer, instance):
            return
        self.timers.pop(instance, None)
        process = self.processes[instance]
        due = process.node.machine.next_timer()
        if due is not None and due <= self.now + process.skew:
            self.tick(instance)
        elif due is not None:
            self._set_timer(process, due)

    # --- messages -----------------------------------------------------------------

    def put(self, process: Process, peer: Role, local: int, message: Message) -> None:
        """As the world's; the message arrives some time after all before it."""
        key = process.streams.get((peer, local))
        if key is None:
            return
        stream = self.streams[key]
        if stream.broken:
            return
        side = ACCEPTOR if stream.dialer == process.instance else DIALER
        stream.queues[side].append(message)
        due = max(self.now + self.some(self.swarm.message_ticks), stream.due[side])
        stream.due[side] = due
        self.serial += 1
        heappush(self.agenda, (due, self.serial, self._do_message, (stream, side)))

    def _do_message(self, key: tuple[Stream, int]) -> None:
        stream, side = key
        queue = stream.queues[side]
        receiver = stream.acceptor if side == ACCEPTOR else stream.dialer
        if not queue or not self.is_able(receiver, self._do_message, key):
            return
        if stream.held[side] > self.now and not self.calm:
            self.at(stream.held[side] - self.now, self._do_message, key)
            return
        peer, local = stream.local[side]
        if len(queue) > 1 and self._comes_together(stream):
            self._take_together(receiver, peer, local, queue, self._comes_twice(stream))
            return
        received = Received(peer, local, queue[0])
        if self._comes_twice(stream):
            self.duplicates = True
            self.feed(receiver, received)
            if not queue:
                return  # it has exited
        del queue[0]
        self.feed(receiver, received)

    def _take_together(
        self, receiver: InstanceId, peer: Role, local: int, queue: list[Message], twice: bool
    ) -> None:
        """All that waits comes in one piece, each message as if it had come by itself."""
        self.marks.add("messages came together")
        received = [Received(peer, local, message) for message in queue]
        queue.clear()
        if twice:
            self.duplicates = True
            received += received
        for one in received:
            process = self.processes.get(receiver)
            if process is None or process.exited:
                return
            self.feed(receiver, one)

    def _comes_together(self, stream: Stream) -> bool:
        """Whether all that waits travels as one; only kvproxy's streams do this."""
        chance = self.swarm.chances["together"]
        return chance > 0 and stream.name[1] is Role.KVPROXY and self.net.random() < chance * 2

    def _comes_twice(self, stream: Stream) -> bool:
        """A client must not get a row twice, and the counts of Admits are exact: lb's streams
        are gRPC streams, which do not repeat. The paths to kvproxy must stand it all the same."""
        chance = self.swarm.chances["duplicate"]
        if not chance or self.calm or stream.name[1] is not Role.KVPROXY:
            return False
        return self.net.random() < chance
