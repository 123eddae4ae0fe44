"""The steps of the unit itself that are possible in a world: what the explorer branches on."""

from __future__ import annotations

from collections.abc import Iterator

from duplet_core.engine import Stop
from duplet_core.ids import Role
from duplet_sim.engines import DecodeEngine, PrefillEngine
from duplet_sim.parts import ACCEPTOR, DIALED, DIALER, WATCHED, Process
from duplet_sim.scopes import ROLES
from duplet_sim.world import World

Action = tuple[object, ...]
"""The name of a step, then its arguments."""


def urgent(world: World) -> Action | None:
    """A step that is taken at once: its effect on others arrives by delayed messages anyway."""
    for role in ROLES:
        process = world.primary(role)
        if process is None:
            return ("start", role)
        if process.runs and process.drained:
            return ("kill", process.instance)
    for process in world.processes.values():
        if process.runs:
            for role in WATCHED[process.role]:
                target = world.primary(role)
                if target is not None and target.runs and target.instance not in process.watching:
                    return ("watch", process.instance, target.instance)
    for process in world.processes.values():
        if process.runs and process.engine is not None:
            step = _urgent_step(process)
            if step is not None:
                return step
    lb = world.primary(Role.LB)
    if lb is not None and lb.runs:
        for key, stream in world.streams.items():
            if stream.broken and stream.dialer == lb.instance and not stream.closed[DIALER]:
                return ("close", key, DIALER)
        for action in _dials(world, lb):
            return action
    return None


def progress(world: World) -> Iterator[Action]:
    """Steps that the unit takes by itself, the fairest first."""
    first = urgent(world)
    if first is not None:
        yield first
        return
    for role in ROLES:
        process = world.primary(role)
        if process is not None and process.stopped:
            yield ("resume", process.instance)
    yield from _deaths(world)
    for key, stream in world.streams.items():
        for side in (ACCEPTOR, DIALER):
            receiver = world.side_process(stream, side)
            if receiver is None or receiver.stopped or stream.closed[side]:
                continue
            if stream.queues[side]:
                yield ("deliver", key, side)
            if stream.broken:
                yield ("close", key, side)
    for process in world.processes.values():
        if process.runs:
            yield from _dials(world, process)
            yield from _engine_steps(process)
    for copy_key, copy in world.copies.items():
        if copy.told or world.processes[copy.writer].stopped:
            if copy.written < copy.count:
                yield ("write", copy_key)
        else:
            yield ("finish", copy_key)


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


def _urgent_step(process: Process) -> Action | None:
    """A new sequence is seen at once, and the next step is launched as early as can be: what
    the engine then does with it is as late as it likes. Only Stop comes late."""
    engine = process.engine
    assert engine is not None
    if engine.inbox and not isinstance(engine.inbox[0], Stop):
        return ("engine_step", process.instance, "take")
    if isinstance(engine, DecodeEngine) and engine.can_launch(2):
        return ("engine_step", process.instance, "launch")
    return None


def _engine_steps(process: Process) -> Iterator[Action]:
    engine = process.engine
    if engine is None:
        return
    if engine.inbox:
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
