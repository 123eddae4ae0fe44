"""Executes effects in a world, one branch an effect, past the checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from duplet_core import effects as fx
from duplet_core.engine import Start
from duplet_core.errors import Reason
from duplet_core.ids import Role
from duplet_core.messages import (
    AbortAck,
    Admit,
    Credit,
    Grant,
    Landed,
    Leaving,
    Refused,
    Route,
    SourceReleased,
    TransferFailed,
)
from duplet_sim import checks, promises
from duplet_sim.content import ROW_BYTES, unpack_row
from duplet_sim.parts import Client, Copy, GrantTold, Process
from duplet_sim.violation import Violation

if TYPE_CHECKING:
    from duplet_sim.world import World


def execute(world: World, process: Process, asked: list[fx.Effect]) -> None:
    """All effects of one event, in order; an Exit takes place after them."""
    if world.on_effect is not None:
        for effect in asked:
            world.on_effect(process, effect)
    for effect in asked:
        branch = _BRANCHES.get(type(effect))
        if branch is not None:
            branch(world, process, effect)
    role = process.role
    if role is Role.KVPROXY:
        if world.copies:
            checks.check_withheld(process, world.copies)
        promises.check_memory(process)
        if process.asked:
            promises.check_told(process)
    elif role is not Role.DECODE:
        checks.check_queue(process)
        if role is Role.PREFILL:
            promises.check_told(process)
    if process.leaves:
        if "writer" not in process.red:
            raise Violation("bound", "health was green before the exit")
        world.kill(process.instance)


def _exit(world: World, process: Process, effect: Any) -> None:
    process.leaves = True


def _send(world: World, process: Process, effect: Any) -> None:
    message = effect.message
    kind = type(message)
    if kind is Route:
        return  # Nothing is decided by it; its arrivals would only multiply the states.
    if process.role is Role.KVPROXY:
        if kind is AbortAck or kind is Landed or kind is TransferFailed:
            invariant = "ack" if kind is AbortAck else "proof"
            checks.check_quiet(world.copies, process.instance, message.transfer, invariant)
            process.acked |= {message.transfer}
        elif kind is Leaving:
            promises.note_told(process, effect.stream, message)
        elif kind is SourceReleased:
            checks.check_quiet(world.copies, process.instance, message.transfer, "release")
            source = world.streams.get(process.streams.get((effect.peer, effect.stream)))  # type: ignore[arg-type]
            if source is not None:
                process.charged |= {(message.transfer, source.dialer)}
                promises.check_landed(world, process, source.dialer, message)
    elif kind is Grant:
        _grant(world, process, message)
    elif kind is Refused or kind is Credit:
        _refuse(world, process, message)
    elif kind is Admit:
        promises.check_welcome(process)
    elif effect.peer is Role.LB and process.role is Role.PREFILL:
        promises.note_told(process, effect.stream, message)
    world.put(process, effect.peer, effect.stream, message)


def _grant(world: World, decode: Process, message: Grant) -> None:
    now = world.now + decode.skew
    if checks.check_grant(decode, now):
        world.marks.add("grant beside quarantine")
    checks.check_lone_writer(world.processes, decode, message.transfer, message.pages)
    promises.check_stays(world, decode)
    writer = decode.node.machine.links[Role.KVPROXY].current.instance
    decode.granted = (*decode.granted, GrantTold(message.transfer, writer, message.pages, now))


def _refuse(world: World, decode: Process, message: Any) -> None:
    """decode refuses a request, or says to what it is able."""
    if (message.reason if type(message) is Refused else message.refusing) is not Reason.QUARANTINE:
        return
    if world.config.host is None:
        checks.check_refusal(decode, world.now + decode.skew)
    prefill = world.primary(Role.PREFILL)
    if type(message) is Refused and prefill is not None and prefill.node.machine.jobs.by_seq:
        world.marks.add("refusal for quarantine while prefill computes")


def _close(world: World, process: Process, effect: Any) -> None:
    if effect.reason is Reason.PEER_PROTOCOL and not world.duplicates:
        raise Violation("protocol", f"{process.instance} says of {effect.peer}: {effect.detail}")
    world.marks.add(f"closed {effect.reason}")
    key = process.streams.get((effect.peer, effect.stream))
    if effect.reason is Reason.SUPERSEDED and key is not None:
        checks.check_superseded(process, effect.peer, world.streams[key].dialer)
    if key is not None and not world.streams[key].broken:
        world.sever(key)


def _to_engine(world: World, process: Process, effect: Any) -> None:
    assert process.engine is not None
    if process.role is Role.PREFILL and isinstance(effect.message, Start):
        checks.check_order(process, effect.message.seq)
    process.engine.inbox.append(effect.message)
    if process.role is Role.PREFILL:
        checks.check_open(process)
    world.work("engine", process.instance)


def _start_copy(world: World, process: Process, effect: Any) -> None:
    copy = Copy(
        process.instance,
        effect.copy,
        effect.transfer,
        effect.source,
        effect.source_pages,
        effect.dest,
        effect.dest_pages,
        effect.start_row,
        effect.count,
    )
    checks.check_start(process, copy)
    key = (process.instance, effect.copy)
    world.copies[key] = copy
    world.work("copy", key)


def _cancel_copy(world: World, process: Process, effect: Any) -> None:
    world.cancel_copy((process.instance, effect.copy))


def _close_mapping(world: World, process: Process, effect: Any) -> None:
    for copy in world.copies.values():
        if copy.writer == process.instance and effect.instance in (copy.source, copy.dest):
            raise Violation("unmapped", f"the pool of {effect.instance} closes under a copy")
    process.mapped -= {effect.instance}
    world.marks.add("mapping closed")
    world.forget_dead()


def _set_health(world: World, process: Process, effect: Any) -> None:
    name = effect.name
    if effect.ok:
        if name in process.red:
            process.red -= {name}
    elif name not in process.red:
        process.red |= {name}
        world.marks.add(f"red {name}")


def _drained(world: World, process: Process, effect: Any) -> None:
    process.drained = True
    promises.check_left(world, process)
    world.work("drained", process.instance)


def _count(world: World, process: Process, effect: Any) -> None:
    if effect.by:
        world.marks.add(effect.name)


def _rows(world: World, process: Process, effect: Any) -> None:
    client = world.clients.get(effect.transfer)
    if client is None:
        raise Violation("ended-once", f"rows for {effect.transfer}, which is over")
    got = client.rows
    for at in range(0, len(effect.rows), ROW_BYTES):
        number, index = unpack_row(effect.rows[at : at + ROW_BYTES])
        if number != client.content or index != got:
            detail = f"{effect.transfer} got row {index} of prompt {number}, wants {got} of"
            raise Violation("foreign-rows", f"{detail} {client.content}")
        got += 1
    world.clients[effect.transfer] = Client(client.submit, client.content, client.lb, got)


def _ended(world: World, process: Process, effect: Any) -> None:
    if world.twice_submitted and effect.reason is Reason.DUPLICATE_REQUEST:
        return
    client = world.clients.pop(effect.transfer, None)
    if client is None:
        raise Violation("ended-once", f"{effect.transfer} ends twice")
    if effect.finished is not None and effect.finished.output_rows != client.rows:
        detail = f"{client.rows} rows sent, {effect.finished.output_rows} told"
        raise Violation("foreign-rows", f"{effect.transfer}: {detail}")
    world.marks.add(f"ended {effect.reason or 'well'}")
    world.work("ended", (client, effect.reason))


_BRANCHES: dict[type, Any] = {
    fx.Send: _send,
    fx.Exit: _exit,
    fx.Close: _close,
    fx.ToEngineEffect: _to_engine,
    fx.StartCopy: _start_copy,
    fx.CancelCopy: _cancel_copy,
    fx.CloseMapping: _close_mapping,
    fx.SetHealth: _set_health,
    fx.Drained: _drained,
    fx.Count: _count,
    fx.Rows: _rows,
    fx.Ended: _ended,
}
