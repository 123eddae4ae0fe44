"""A small deterministic world around the four real machines.

It has processes that start, stop, continue and exit; streams that break at any time and may
deliver what was written before the break late, or never; the kernel's word on deaths, late;
models of the engines; and the copy engine.

Every public method is one step of the world. Who calls them, and in which order, is the
explorer's choice (all orders) or the simulator's (an order drawn from a seed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from duplet_core import effects as fx
from duplet_core.decode import DecodeMachine
from duplet_core.decode_state import DecodeConfig
from duplet_core.effects import FromEngineEvent, InstanceDied, LifelineUp
from duplet_core.engine import FromEngine, Verified
from duplet_core.errors import Reason
from duplet_core.front import FrontMachine
from duplet_core.front_state import FrontConfig
from duplet_core.host import HostMachine
from duplet_core.host_state import HostConfig
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.machine import Machine
from duplet_core.messages import Message
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer import WriterMachine
from duplet_core.writer_state import WriterConfig
from duplet_pages.prefix import RadixIndex
from duplet_sim import content, executor
from duplet_sim.content import Rows
from duplet_sim.copying import CopyEngine
from duplet_sim.engines import DecodeEngine, HostEngine, PrefillEngine
from duplet_sim.nodes import TIMER, Interner, LiveNode, Node
from duplet_sim.parts import (
    ACCEPTOR,
    DIALER,
    Client,
    Process,
    Stream,
    StreamKey,
    empty_pool,
)
from duplet_sim.pool import Pool
from duplet_sim.staging import Staging
from duplet_sim.violation import Violation

UNIT = (Role.KVPROXY, Role.DECODE, Role.PREFILL, Role.LB)
MONOLITH = (Role.DECODE, Role.LB)
"""The host runs as decode; prefill's door leads to it as well."""


@dataclass(frozen=True, slots=True)
class WorldConfig:
    decode: DecodeConfig
    prefill: PrefillConfig
    writer: WriterConfig = field(default_factory=WriterConfig)
    front: FrontConfig = field(default_factory=FrontConfig)
    chunk_rows: int = 1
    """Rows that prefill's engine computes, and moves, at a time."""
    depth: int = 2
    """Steps of decode that may be launched and not yet read."""
    prefix: bool = False
    """Computed pages are kept and shared by prompts that begin alike."""
    staging: int = 0
    """Slots of staging memory that kvproxy's copies go through; 0: they go directly."""
    host: HostConfig | None = None
    """One host in the place of prefill, decode and kvproxy."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The services that run, as they come up."""
        return UNIT if self.host is None else MONOLITH

    @property
    def page_rows(self) -> int:
        return self.decode.page_rows if self.host is None else self.host.page_rows


class World(CopyEngine):
    """Owns processes, streams, copies and clients. `interner` set: machines are frozen nodes."""

    def __init__(self, config: WorldConfig, interner: Interner | None = None) -> None:
        super().__init__()
        self.config = config
        self.interner = interner
        self.owner = object()
        self.processes: dict[InstanceId, Process] = {}
        self.current: dict[Role, InstanceId] = {}
        """The newest instance of each service, exited or not."""
        self.births = dict.fromkeys(Role, 0)
        self.streams: dict[StreamKey, Stream] = {}
        self.clients: dict[TransferId, Client] = {}
        self.prompts: dict[Rows, int] = {}
        """Every prompt that was submitted, and its number."""
        self.now = 0
        self.prompt = False
        """What engines and lb's peers say is heard at once (the explorer's reduction)."""
        self.on_effect: Callable[[Process, fx.Effect], None] | None = None
        self.on_event: Callable[[Process, Any], None] | None = None
        self.on_note: Callable[[str, str], None] | None = None
        """Told what no machine sees when it happens: (to what, what)."""
        self.marks: set[str] = set()
        """Rare paths that were taken."""
        self.twice_submitted = False
        self.duplicates = False
        """Some message was delivered twice: peers may be accused of it."""
        self.machines: dict[Role, list[type[Any]]] = {}
        """Machines of the first instances of a service, where they are not the usual ones."""
        self.special: list[InstanceId] = []
        """Instances that run such machines."""

    # --- parts ------------------------------------------------------------------

    def touch(self, instance: InstanceId) -> Process:
        """The process, to be changed."""
        process = self.processes[instance]
        if process.owner is not self.owner:
            process = self.processes[instance] = process.copy(self.owner)
        process.number = None
        return process

    def touch_stream(self, key: StreamKey) -> Stream:
        stream = self.streams[key]
        if stream.owner is not self.owner:
            stream = self.streams[key] = stream.copy(self.owner)
        stream.number = None
        return stream

    def primary(self, role: Role) -> Process | None:
        """The newest instance of the service, unless it has exited."""
        instance = self.current.get(role)
        process = None if instance is None else self.processes.get(instance)
        return None if process is None or process.exited else process

    def side_process(self, stream: Stream, side: int) -> Process | None:
        process = self.processes.get(stream.acceptor if side == ACCEPTOR else stream.dialer)
        return None if process is None or process.exited else process

    def feed(self, instance: InstanceId, event: Any, now: int | None = None) -> None:
        """Give a machine one event and execute what it asks for."""
        process = self.touch(instance)
        if self.on_event is not None:
            self.on_event(process, event)
        when = self.now + process.skew if now is None else now
        process.node, asked = process.node.feed(event, when)
        executor.execute(self, process, asked)

    def note(self, subject: str, what: str) -> None:
        if self.on_note is not None:
            self.on_note(subject, what)

    def work(self, kind: str, key: Any) -> None:
        """Told what there is to do; the simulator's agenda takes it from here."""

    # --- processes ----------------------------------------------------------------

    def start(self, role: Role) -> None:
        """A new instance; for kvproxy every earlier one has exited (the lock)."""
        self.births[role] += 1
        instance = InstanceId(f"{role}{self.births[role]}")
        special = self.machines.get(role)
        if special:
            self.special.append(instance)
        config = self.config
        machine: Machine
        engine: PrefillEngine | DecodeEngine | None = None
        pages, page_rows = 0, config.page_rows
        if role is Role.LB:
            machine = FrontMachine(instance, config.front)
        elif role is Role.KVPROXY:
            kind = special.pop(0) if special else WriterMachine
            machine = kind(instance, config.writer)
        elif role is Role.PREFILL:
            machine = PrefillMachine(instance, config.prefill, self._index())
            engine = PrefillEngine(config.chunk_rows)
            pages, page_rows = config.prefill.pages, config.prefill.page_rows
        elif config.host is not None:
            machine = HostMachine(instance, config.host, self._index())
            engine = HostEngine(PrefillEngine(config.chunk_rows))
            pages = config.host.pages
            self.current[Role.PREFILL] = instance
        else:
            machine = DecodeMachine(instance, config.decode)
            engine = DecodeEngine()
            pages = config.decode.pages
        node: Node = LiveNode(machine) if self.interner is None else self.interner.node(machine)
        process = Process(self.owner, role, instance, node)
        process.timed = type(machine).next_timer is not Machine.next_timer
        process.engine, process.page_rows = engine, page_rows
        process.rows = empty_pool(pages, page_rows)
        if role is Role.KVPROXY and config.staging:
            process.staging = Staging(config.staging)
        self.processes[instance] = process
        self.current[role] = instance
        self.forget_dead()

    def _index(self) -> RadixIndex | None:
        if not self.config.prefix:
            return None
        return RadixIndex(self.config.page_rows, content.COLUMNS)

    def kill(self, instance: InstanceId) -> None:
        """The process exits, whatever state it is in; its copies exit with it."""
        process = self.touch(instance)
        self.note(instance, "exits")
        process.exited, process.stopped = True, False
        for key in process.streams.values():
            stream = self.touch_stream(key)
            if not stream.broken:
                self.sever(key)
            self._close_side(key, stream, DIALER if stream.dialer == instance else ACCEPTOR)
        process.streams.clear()
        process.dialing.clear()
        process.outbox.clear()
        process.engine = None
        for copy_key in [k for k in self.copies if k[0] == instance]:
            del self.copies[copy_key]
        for transfer in [t for t, client in self.clients.items() if client.lb == instance]:
            del self.clients[transfer]
        self.work("death", instance)
        self.forget_dead()

    def stop(self, instance: InstanceId) -> None:
        self.note(instance, "is stopped")
        self.touch(instance).stopped = True

    def resume(self, instance: InstanceId) -> None:
        self.note(instance, "goes on")
        self.touch(instance).stopped = False
        self.work("resumed", instance)

    def drain(self, instance: InstanceId) -> None:
        self.touch(instance).asked = True
        self.feed(instance, fx.Drain())

    def watch(self, watcher: InstanceId, watched: InstanceId) -> None:
        """The lifeline between two processes is up, at one of its ends."""
        process = self.touch(watcher)
        target = self.processes[watched]
        process.watching |= {watched}
        pages = 0
        if process.role is Role.KVPROXY:
            process.mapped |= {watched}
            pages = len(target.rows)
        self.feed(watcher, LifelineUp(target.role, watched, pages, target.page_rows))

    def mourn(self, watcher: InstanceId, watched: InstanceId) -> None:
        """The kernel tells the watcher that all processes of the watched have exited."""
        process = self.touch(watcher)
        process.watching -= {watched}
        role = self.processes[watched].role
        self.feed(watcher, InstanceDied(role, watched))
        self.forget_dead()

    def forget_dead(self) -> None:
        """Drop the remains of processes that nobody watches or maps."""
        for instance, process in list(self.processes.items()):
            if process.exited and not any(
                instance in other.watching or instance in other.mapped
                for other in self.processes.values()
                if not other.exited
            ):
                del self.processes[instance]

    def tick(self, instance: InstanceId) -> None:
        """The machine's timer, at its own time."""
        due = self.processes[instance].node.machine.next_timer()
        now = max(due, self.now + self.processes[instance].skew)
        self.feed(instance, TIMER, now)
        process = self.processes.get(instance)
        if process is not None and not process.exited:
            due = process.node.machine.next_timer()
            if due is not None and due <= now:
                raise Violation("timer", f"{instance}: {due} is due again at {now}")

    # --- streams --------------------------------------------------------------------

    def dial(self, instance: InstanceId, peer: Role) -> None:
        process = self.touch(instance)
        target = self.touch(self.current[peer])
        process.dialed += 1
        target.accepted += 1
        key = (instance, peer, process.dialed)
        stream = Stream(self.owner, key, target.instance)
        link = process.role if self.config.host is None else peer  # a host's are named by its own
        stream.local = ((link, target.accepted), (peer, process.dialed))
        self.streams[key] = stream
        process.dialing[peer] = process.streams[stream.local[DIALER]] = key
        target.streams[stream.local[ACCEPTOR]] = key
        self.feed(instance, fx.StreamOpened(peer, process.dialed))

    def deliver(self, key: StreamKey, side: int, keep: bool = False) -> None:
        """The next message of one direction; `keep`: and the same one once more later."""
        stream = self.touch_stream(key)
        queue = stream.queues[side]
        message = queue[0] if keep else queue.pop(0)
        receiver = stream.acceptor if side == ACCEPTOR else stream.dialer
        self.feed(receiver, fx.Received(*stream.local[side], message))

    def sever(self, key: StreamKey) -> None:
        """The connection is gone; nobody has noticed yet."""
        self.note(key[0], f"loses its stream {key[2]} to {key[1]}")
        self.touch_stream(key).broken = True
        self.work("broken", key)

    def close(self, key: StreamKey, side: int) -> None:
        """One side notices the end of a stream; what it had not taken by now is lost."""
        stream = self.touch_stream(key)
        instance = stream.acceptor if side == ACCEPTOR else stream.dialer
        process = self.touch(instance)
        peer, local = stream.local[side]
        del process.streams[(peer, local)]
        if side == DIALER:
            del process.dialing[peer]
        self._close_side(key, stream, side)
        self.feed(instance, fx.StreamClosed(peer, local))
        if side == DIALER:
            self.work("undialed", (instance, peer))

    def _close_side(self, key: StreamKey, stream: Stream, side: int) -> None:
        stream.closed[side] = True
        stream.queues[side].clear()
        if all(stream.closed):
            del self.streams[key]

    def put(self, process: Process, peer: Role, local: int, message: Message) -> None:
        """A process sends on one of its streams; dropped when that is gone."""
        key = process.streams.get((peer, local))
        if key is None or self.streams[key].broken:
            return
        stream = self.touch_stream(key)
        side = ACCEPTOR if stream.dialer == process.instance else DIALER
        if self.interner is not None:
            message = self.interner.message(message)
        stream.queues[side].append(message)
        to_lb = key[1] is not Role.KVPROXY and side == DIALER
        prompt = self.prompt and to_lb and len(stream.queues[side]) == 1
        if prompt and self.processes[stream.dialer].runs:
            self.deliver(key, side)
            return
        self.work("message", (key, side))

    # --- engines --------------------------------------------------------------------

    def engine_step(self, instance: InstanceId, kind: str) -> None:
        """`kind`: take, compute, verify, launch, complete or fail."""
        process = self.touch(instance)
        engine = process.engine
        assert engine is not None
        if kind == "launch":
            assert isinstance(engine, DecodeEngine)
            engine.launch()
            return
        told: list[FromEngine]
        if kind == "take":
            told = engine.take()
        elif kind == "fail":
            told = engine.fail()
        else:
            told = getattr(engine, kind)(Pool(process, self.prompts))
        for message in told:
            if isinstance(message, Verified) and message.detail == "foreign":
                raise Violation("mismatch", f"landed KV of {message.transfer} is not its own")
        if self.prompt:
            for message in told:
                self.feed(instance, FromEngineEvent(message))
        elif told:
            process.outbox += told
            self.work("outbox", instance)

    def hear_engine(self, instance: InstanceId) -> None:
        """The I/O process takes the next message of its engine."""
        self.feed(instance, FromEngineEvent(self.touch(instance).outbox.pop(0)))

    # --- clients ------------------------------------------------------------------------

    def submit(self, submit: fx.Submit, number: int) -> None:
        """A client's request; `number` is the content number of its prompt."""
        lb = self.primary(Role.LB)
        assert lb is not None
        self.twice_submitted = submit.transfer in self.clients
        if not self.twice_submitted:
            self.clients[submit.transfer] = Client(submit, number, lb.instance)
            self.prompts[content.unpack_prompt(submit.prompt)[0]] = number
        self.feed(lb.instance, submit)
        self.twice_submitted = False

    def cancel(self, transfer: TransferId, reason: Reason) -> None:
        self.feed(self.clients[transfer].lb, fx.Cancel(transfer, reason))
