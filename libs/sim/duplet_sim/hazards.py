"""The explorer's faults: which can happen in a world, and what they do.

A fault is an action ("fault", kind, role, what). Its label, "kind role", names a share of the
search: runs are told apart by the label of their first fault.

    kill     a process exits, whatever it is doing; its copies with it
    stop     a process is stopped (SIGSTOP), until it goes on at any later time
    sever    a stream breaks; what was written before may arrive late, or is lost
    twice    a message between decode and kvproxy arrives twice, one right after the other
    drain    decode is asked to leave
    unknown  a copy's end is reported as unknown; it may write at any time from then on
    hang     a copy stands still: no end is ever reported, and it may write at any time
    refuse   a copy is refused before it began
    cut      the connection between two hosts breaks; what was sent may arrive late
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from duplet_core.effects import CopyResult
from duplet_core.ids import Role
from duplet_sim.parts import ACCEPTOR, DIALER
from duplet_sim.remote import RemoteWorld
from duplet_sim.scopes import ROLES, Scope
from duplet_sim.steps import Action
from duplet_sim.world import World


def label(action: Action) -> str:
    """Kind and role of a fault."""
    return f"{action[1]} {action[2]}"


def labels(scope: Scope) -> list[str]:
    """Of all faults that the scope allows."""
    found = []
    for kind in scope.kinds:
        roles = {
            "kill": scope.killable,
            "stop": ROLES,
            "sever": scope.severable,
            "twice": (Role.DECODE,),
            "drain": (Role.DECODE,),
        }.get(kind, (Role.KVPROXY,))
        found += [f"{kind} {role}" for role in roles]
    return found


def may_happen(world: World, scope: Scope, only: str) -> list[Action]:
    """Faults within the scope; `only`: of this label."""
    found = [*_of_processes(world, scope), *_of_streams(world, scope), *_of_copies(world, scope)]
    return [action for action in found if not only or label(action) == only]


def _of_processes(world: World, scope: Scope) -> Iterator[Action]:
    for role in ROLES:
        process = world.primary(role)
        if process is None:
            continue
        if "kill" in scope.kinds and role in scope.killable:
            yield ("fault", "kill", role, process.instance)
        if "stop" in scope.kinds and not process.stopped:
            yield ("fault", "stop", role, process.instance)
        drains = "drain" in scope.kinds and role is Role.DECODE
        if drains and process.runs and not process.asked:
            yield ("fault", "drain", role, process.instance)


def _of_streams(world: World, scope: Scope) -> Iterator[Action]:
    for key, stream in world.streams.items():
        dialer = stream.local[ACCEPTOR][0]
        if "sever" in scope.kinds and not stream.broken and dialer in scope.severable:
            yield ("fault", "sever", dialer, key)
        # lb's streams never repeat: a client must not get a row twice, and Admits are counted.
        # Nor do prefill's here: a Move that comes twice before its grant ends the transfer, and
        # its client waits for its own deadline, which is no step of this search.
        if "twice" in scope.kinds and dialer is Role.DECODE:
            for side in (ACCEPTOR, DIALER):
                receiver = world.side_process(stream, side)
                if receiver is not None and receiver.runs and stream.queues[side]:
                    yield ("fault", "twice", dialer, (key, side))


def _of_copies(world: World, scope: Scope) -> Iterator[Action]:
    for key, copy in world.copies.items():
        if copy.told or not world.processes[copy.writer].runs:
            continue
        for kind in ("unknown", "hang", "refuse", "cut"):
            if kind in scope.kinds:
                yield ("fault", kind, Role.KVPROXY, key)


def strike(world: World, kind: Any, role: Any, what: Any) -> None:
    """Let one fault happen."""
    if kind == "twice":
        key, side = what
        world.duplicates = True
        world.deliver(key, side, keep=True)
        stream = world.streams.get(key)
        if stream is not None and not stream.closed[side]:
            world.deliver(key, side)
    elif kind == "hang":
        world.marks.add("copy hangs")
        world.copies[what] = replace(world.copies[what], told=True)
    elif kind == "unknown":
        world.end_copy(what, CopyResult.UNKNOWN)
    elif kind == "refuse":
        world.end_copy(what, CopyResult.NOT_STARTED)
    elif kind == "cut":
        assert isinstance(world, RemoteWorld)
        world.cut(what)
    else:
        getattr(world, kind)(what)
