"""The steps of the unit itself that are possible in a world: what the explorer branches on.

The orders that the search leaves out, each because a worse or an equal one is searched:

- What an engine says to its I/O process, and what prefill and decode say to lb, is heard at
  once (`World.prompt`): a delay only moves the listener's reaction, and that goes through a
  delayed queue of its own.
- The steps of `urgent` are taken at once, before any other and before a fault. For the first
  of them the reason is the same: an engine sees new sequences and launches steps as early as
  can be (Stop it sees as late as it likes), a dead process starts again, lifelines come up, lb
  notices ends and dials. Deaths are told late.
- The last of them is an End or a Started that changes nothing where it arrives. Its receiver's
  table says so for a transfer that is past the point, or gone, and no transfer comes back from
  there: ids are used once. So the message changes nothing later either, alone, lost or twice,
  and all orders of it with other steps lead to the same states. Whether it changes nothing is
  not taken from the table: the machine is asked, each time.
- A Route is not delivered (`executor`): it tells people how copies go, and no rule reads it.
- A copy moves its bytes when its end is reported, the latest moment there is; one whose end
  was reported as unknown, that hangs, or whose writer is stopped, moves them at any time.

Not used, for it was measured to save a tenth at most: renaming equal requests, pages and
instances into one order. Requests queue up in one order everywhere, which leaves few states
that differ in names alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from duplet_core.effects import Count, Log, Received
from duplet_core.engine import Stop
from duplet_core.errors import Reason
from duplet_core.ids import Role
from duplet_core.messages import End, Started
from duplet_sim.engines import DecodeEngine, PrefillEngine
from duplet_sim.parts import ACCEPTOR, DIALED, DIALER, WATCHED, Process, Stream
from duplet_sim.remote import RemoteWorld
from duplet_sim.scopes import ROLES
from duplet_sim.world import World

Action = tuple[object, ...]
"""The name of a step, then its arguments."""


def urgent(world: World) -> Iterator[Action]:
    """Steps that can be taken at once without losing a behaviour; see above."""
    for role in ROLES:
        process = world.primary(role)
        if process is None:
            yield ("start", role)
        elif process.runs and process.drained:
            yield ("kill", process.instance)
    running = [process for process in world.processes.values() if process.runs]
    for process in running:
        for role in WATCHED[process.role]:
            target = world.primary(role)
            if target is not None and target.runs and target.instance not in process.watching:
                yield ("watch", process.instance, target.instance)
    for process in running:
        if process.engine is not None:
            yield from _early_engine_steps(process)
    lb = world.primary(Role.LB)
    if lb is not None and lb.runs:
        for key, stream in world.streams.items():
            if stream.broken and stream.dialer == lb.instance and not stream.closed[DIALER]:
                yield ("close", key, DIALER)
        yield from _dials(world, lb)
    for key, stream in world.streams.items():
        for side in (ACCEPTOR, DIALER):
            if stream.queues[side] and _changes_nothing(world, stream, side):
                yield ("deliver", key, side)


def progress(world: World) -> Iterator[Action]:
    """The other steps that the unit takes by itself, the fairest first."""
    for role in ROLES:
        process = world.primary(role)
        if process is not None and process.stopped:
            yield ("resume", process.instance)
    yield from _deaths(world)
    lb = world.primary(Role.LB)
    for key, stream in world.streams.items():
        for side in (ACCEPTOR, DIALER):
            receiver = world.side_process(stream, side)
            if receiver is None or receiver.stopped or stream.closed[side]:
                continue
            if stream.queues[side]:
                yield ("deliver", key, side)
            if stream.broken and receiver is not lb:
                yield ("close", key, side)
    for process in world.processes.values():
        if process.runs:
            if process is not lb:
                yield from _dials(world, process)
            yield from _engine_steps(process)
    yield from _copy_steps(world)


def _copy_steps(world: World) -> Iterator[Action]:
    remote = world if isinstance(world, RemoteWorld) else None
    for key, copy in world.copies.items():
        if remote is not None and key not in remote.chunks:
            yield ("send_chunk", key)
        elif copy.told or world.processes[copy.writer].stopped:
            if copy.written < copy.count:
                yield ("write", key)
        else:
            yield ("finish", key)
    if remote is not None:
        for key in remote.late:
            if remote.processes[key[0]].runs:
                yield ("take_late", key)


def early_writes(world: World) -> Iterator[Action]:
    """Copies that move their bytes before their end is reported."""
    for key, copy in world.copies.items():
        there = not isinstance(world, RemoteWorld) or key in world.chunks
        if there and not copy.told and copy.written < copy.count:
            yield ("write", key)


def timers(world: World) -> Iterator[Action]:
    """All timers of the unit but lb's, whose deadlines are its clients' cancels."""
    for process in world.processes.values():
        own = process.runs and process.role is not Role.LB
        if own and process.node.machine.next_timer() is not None:
            yield ("tick", process.instance)


def _deaths(world: World) -> Iterator[Action]:
    for process in world.processes.values():
        if process.runs:
            for watched in sorted(process.watching):
                if world.processes[watched].exited:
                    yield ("mourn", process.instance, watched)


def _dials(world: World, process: Process) -> Iterator[Action]:
    for role in DIALED[process.role]:
        if role in process.dialing:
            continue
        target = world.primary(role)
        link = process.node.machine.links[role]
        if target is None or target.stopped or (link.needs_lifeline and link.watched is None):
            continue
        if link.needs_lifeline and process.instance not in target.watching:
            continue  # refused until kvproxy has the lifeline: a loop of no interest
        held = target.node.machine.links[process.role].current
        if held is not None and held.instance != process.instance:
            continue  # refused until the one before is known to be gone: the same
        if link.watched is None or link.watched == target.instance:
            yield ("dial", process.instance, role)


def _changes_nothing(world: World, stream: Stream, side: int) -> bool:
    """Whether the next message is an End or a Started that is of no consequence, for good."""
    message = stream.queues[side][0]
    kind = type(message)
    if kind is not Started and not (kind is End and message.reason is not Reason.KV_MISMATCH):  # type: ignore[union-attr]
        return False  # what a mismatch ends is the cache, too, with whatever is in it by then
    receiver = world.side_process(stream, side)
    if receiver is None or not receiver.runs or stream.closed[side]:
        return False
    peer, local = stream.local[side]
    current = receiver.node.machine.links[peer].current
    if current is None or current.stream != local:
        return False  # that it is stale is a rule on trial here
    node, asked = receiver.node.feed(Received(peer, local, message), world.now)
    return node is receiver.node and all(type(effect) in (Count, Log) for effect in asked)


def _early_engine_steps(process: Process) -> Iterator[Action]:
    """A new sequence is seen at once, and the next step is launched as early as can be: what
    the engine then does with it is as late as it likes. Only Stop comes late."""
    engine = process.engine
    assert engine is not None
    if engine.inbox and not isinstance(engine.inbox[0], Stop):
        yield ("engine_step", process.instance, "take")
    if isinstance(engine, DecodeEngine) and engine.can_launch(2):
        yield ("engine_step", process.instance, "launch")


def _engine_steps(process: Process) -> Iterator[Action]:
    if process.outbox:
        yield ("hear_engine", process.instance)
    engine = process.engine
    if engine is None:
        return
    if engine.inbox and isinstance(engine.inbox[0], Stop):
        yield ("engine_step", process.instance, "take")
    if isinstance(engine, PrefillEngine):
        if engine.jobs:
            yield ("engine_step", process.instance, "compute")
        return
    assert isinstance(engine, DecodeEngine)
    if engine.verifying:
        yield ("engine_step", process.instance, "verify")
    if engine.steps:
        yield ("engine_step", process.instance, "complete")


def describe(action: Action) -> str:
    name, *args = action
    return " ".join([str(name), *(_word(arg) for arg in args)])


def _word(arg: object) -> str:
    return "/".join(str(a) for a in arg) if isinstance(arg, tuple) else str(arg)
