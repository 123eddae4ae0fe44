"""Exhaustive search over the real machines at small scope: every order of every step.

Breadth first, so the first violation found has a shortest trace. States are compared by a
64-bit hash of their full contents. Faults (see `FAULTS`) are budgeted per run; everything
else (every interleaving of messages, engine steps, copies, deaths told late, reconnects,
cancels, timers) is free. Two reductions, both sound for page safety: what an engine says to
its I/O process, and what prefill and decode say to lb, is heard at once (a delay there only
moves the listener's reaction, and its reaction has a delayed queue of its own).

Liveness: from every state found there is one fair continuation without faults; following it
must reach a state where all is free, connected and idle. The search records that successor
of every state and follows the pointers at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from duplet_core.decode_state import DecodeConfig
from duplet_core.effects import CopyResult, Submit
from duplet_core.errors import Reason
from duplet_core.front_state import FrontConfig
from duplet_core.ids import Role, TransferId
from duplet_core.messages import Sampling
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer_state import WriterConfig
from duplet_sim import checks, content
from duplet_sim.engines import DecodeEngine, PrefillEngine
from duplet_sim.nodes import Interner
from duplet_sim.parts import ACCEPTOR, DIALED, DIALER, WATCHED, Process
from duplet_sim.violation import Violation
from duplet_sim.world import World, WorldConfig

Action = tuple[object, ...]
"""The name of a step, then its arguments."""

FAULTS = ("kill", "stop", "sever", "unknown", "refuse", "drain", "cancel")
"""Steps that cost budget; the last is a client's doing, with a budget of its own."""

ROLES = (Role.KVPROXY, Role.DECODE, Role.PREFILL, Role.LB)


@dataclass(frozen=True, slots=True)
class Scope:
    name: str
    requests: int
    faults: int
    cancels: int
    kinds: tuple[str, ...] = ("kill", "stop", "sever", "unknown", "refuse", "drain")
    decode_pages: int = 2
    prefill_pages: int = 2
    prompt_rows: int = 2
    page_rows: int = 2
    output_rows: int = 2
    chunk_rows: int = 1
    killable: tuple[Role, ...] = ROLES
    severable: tuple[Role, ...] = ROLES
    """Whose dialed streams break."""
    same_ids: bool = True
    """All requests use one id, each after the end of the one before."""


SCOPES = {
    scope.name: scope
    for scope in (
        Scope("one", requests=1, faults=2, cancels=1),
        Scope("parts", 1, 1, 0, ("sever",), severable=(Role.PREFILL,)),
        Scope("handoff", 1, 1, 0, ("sever",), chunk_rows=2, severable=(Role.PREFILL,)),
        Scope("grants", 1, 1, 0, ("sever",), chunk_rows=2, severable=(Role.DECODE,)),
        Scope("two", requests=2, faults=1, cancels=1, chunk_rows=2),
        Scope(
            "three",
            requests=3,
            faults=1,
            cancels=2,
            kinds=("sever", "unknown", "stop"),
            prompt_rows=1,
            page_rows=4,
            killable=(),
            same_ids=False,
        ),
    )
}


class Budget:
    """What is left of faults, cancels and requests; part of a state."""

    __slots__ = ("cancels", "faults", "submitted")

    def __init__(self, faults: int, cancels: int, submitted: int) -> None:
        self.faults, self.cancels, self.submitted = faults, cancels, submitted

    def key(self) -> tuple[int, int, int]:
        return (self.faults, self.cancels, self.submitted)


State = tuple[World, Budget]


def world_config(scope: Scope) -> WorldConfig:
    return WorldConfig(
        DecodeConfig(
            scope.decode_pages, scope.page_rows, 4, 1 << 20, "spec", 1000, 50
        ),
        PrefillConfig(scope.prefill_pages, scope.page_rows, "spec"),
        WriterConfig(withheld_bound=2, withheld_after_ns=5000, withheld_limit_ns=5000),
        FrontConfig(queue_wait_ns=1 << 40),
        chunk_rows=scope.chunk_rows,
    )


def fork(world: World) -> World:
    """A world that shares all parts until one of the two changes them."""
    other = World.__new__(World)
    other.__dict__.update(world.__dict__)
    other.owner = object()
    other.processes = dict(world.processes)
    other.current = dict(world.current)
    other.births = dict(world.births)
    other.streams = dict(world.streams)
    other.copies = dict(world.copies)
    other.clients = dict(world.clients)
    return other


def key_of(state: State) -> int:
    """The state's 64-bit hash."""
    world, budget = state
    parts = [p.key() for p in world.processes.values()]
    parts += [s.key() for s in world.streams.values()]
    parts += [hash(c) for c in world.copies.values()]
    parts.sort()
    clients = [(c.content, c.rows) for c in world.clients.values()]
    return hash((*parts, *clients, *world.births.values(), *budget.key()))


# --- the steps that are possible ---------------------------------------------------


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
    for process in world.processes.values():
        if process.runs and process.role is not Role.LB:
            if process.node.machine.next_timer() is not None:
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
        if link.watched is None or link.watched == target.instance:
            yield ("dial", process.instance, role)


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
    if engine.can_launch(2):
        yield ("engine_step", process.instance, "launch")


class Explorer:
    """One search. Owns every state it found."""

    def __init__(self, scope: Scope, limit: int | None = None) -> None:
        self.scope = scope
        self.limit = limit
        self.interner = Interner(checks.check_machine)
        self.seen: dict[int, int] = {}
        """Hash of a state to its number."""
        self.parents = array("q")
        self.actions: list[Action] = []
        self.fair = array("q")
        """For each state: where its fair continuation leads; itself when it is at the goal."""
        self.transitions = 0
        self.complete = False

    # --- steps of a state ----------------------------------------------------------

    def boot(self) -> State:
        """Four processes, connected and idle."""
        world = World(world_config(self.scope), self.interner)
        world.prompt = True
        state = (world, Budget(self.scope.faults, self.scope.cancels, 0))
        while (action := self.fair_action(state)) is not None:
            state = self.apply(state, action)
        return state

    def fair_action(self, state: State) -> Action | None:
        """The continuation without faults; None when nothing is left to do."""
        for action in progress(state[0]):
            return action
        for action in timers(state[0]):
            return action
        return None

    def all_actions(self, state: State) -> Iterator[Action]:
        world, budget = state
        yield from progress(world)
        if urgent(world) is not None:
            return
        yield from timers(world)
        lb = world.primary(Role.LB)
        if lb is not None and lb.runs:
            if budget.submitted < self.scope.requests and self._may_submit(world, lb):
                yield ("submit",)
            if budget.cancels:
                for transfer in world.clients:
                    yield ("cancel", transfer)
        if budget.faults:
            yield from self._faults(world)

    def _may_submit(self, world: World, lb: Process) -> bool:
        return lb.node.machine.ready and not (self.scope.same_ids and world.clients)

    def _faults(self, world: World) -> Iterator[Action]:
        kinds = self.scope.kinds
        for role in ROLES:
            process = world.primary(role)
            if process is None:
                continue
            if "kill" in kinds and role in self.scope.killable:
                yield ("kill", process.instance, "fault")
            if "stop" in kinds and not process.stopped and role is not Role.LB:
                yield ("stop", process.instance)
            if "drain" in kinds and process.runs and not process.asked and role is Role.DECODE:
                yield ("drain", process.instance)
        if "sever" in kinds:
            for key, stream in world.streams.items():
                dialer = world.processes[stream.dialer].role
                if not stream.broken and dialer in self.scope.severable:
                    yield ("sever", key)
        for key, copy in world.copies.items():
            if world.processes[copy.writer].runs and not copy.told:
                if "unknown" in kinds:
                    yield ("unknown", key)
                if "refuse" in kinds:
                    yield ("refuse", key)

    def apply(self, state: State, action: Action) -> State:
        """The state after one step; the given one is unchanged."""
        world, budget = fork(state[0]), state[1]
        name, *args = action
        if name in FAULTS and not (name == "kill" and len(args) == 1):
            cancels = name == "cancel"
            budget = Budget(
                budget.faults - (not cancels), budget.cancels - cancels, budget.submitted
            )
        if name == "submit":
            number = budget.submitted + 1
            budget = Budget(budget.faults, budget.cancels, number)
            self._submit(world, number)
        elif name == "finish":
            world.write_copy(args[0])  # type: ignore[arg-type]
            world.end_copy(args[0], CopyResult.OK)  # type: ignore[arg-type]
        elif name == "write":
            world.write_copy(args[0])  # type: ignore[arg-type]
        elif name == "unknown":
            world.end_copy(args[0], CopyResult.UNKNOWN)  # type: ignore[arg-type]
        elif name == "refuse":
            world.end_copy(args[0], CopyResult.NOT_STARTED)  # type: ignore[arg-type]
        elif name == "cancel":
            world.cancel(args[0], Reason.CANCELLED)  # type: ignore[arg-type]
        elif name == "kill":
            world.kill(args[0])  # type: ignore[arg-type]
        else:
            getattr(world, str(name))(*args)
        return world, budget

    def _submit(self, world: World, number: int) -> None:
        scope = self.scope
        rows = scope.prompt_rows
        submit = Submit(
            "same" if scope.same_ids else f"r{number}",
            TransferId(f"t{number}"),
            content.pack_prompt(number, rows, False),
            rows,
            scope.output_rows,
            -(-(rows + scope.output_rows) // scope.page_rows),
            Sampling(0, 1.0, 1.0, 0, 0),
            1 << 50,
        )
        world.submit(submit, number)

    # --- the search --------------------------------------------------------------

    def run(self) -> int:
        """Visit all states within scope; the number of states.

        Raises:
            Violation: with the shortest trace in its detail.
        """
        start = self.boot()
        self._enter(start, -1, ("boot",))
        queue: deque[tuple[int, State]] = deque([(0, start)])
        while queue:
            if self.limit is not None and len(self.parents) >= self.limit:
                return len(self.parents)
            number, state = queue.popleft()
            fair = self.fair_action(state)
            if fair is None:
                self._check_goal(number, state)
                self.fair[number] = number
            for action in self.all_actions(state):
                self.transitions += 1
                try:
                    after = self.apply(state, action)
                except Violation as violation:
                    raise self._with_trace(violation, number, action) from violation
                found, new = self._enter(after, number, action)
                if new:
                    queue.append((found, after))
                if action == fair:
                    self.fair[number] = found
        self.complete = True
        self._check_liveness()
        return len(self.parents)

    def _enter(self, state: State, parent: int, action: Action) -> tuple[int, bool]:
        digest = key_of(state)
        number = self.seen.get(digest)
        if number is not None:
            return number, False
        number = self.seen[digest] = len(self.parents)
        self.parents.append(parent)
        self.actions.append(action)
        self.fair.append(-1)
        return number, True

    def _check_goal(self, number: int, state: State) -> None:
        """Nothing is left to do: then all is free, connected and idle."""
        world, _ = state
        wrong = []
        if world.clients:
            wrong.append(f"requests that have not ended: {sorted(world.clients)}")
        for process in world.processes.values():
            machine = process.node.machine
            if process.exited or process.red:
                wrong.append(f"{process.instance} is {sorted(process.red) or 'dead'}")
            for peer, link in machine.links.items():
                if link.current is None:
                    wrong.append(f"{process.instance} has no stream to {peer}")
            if process.role is Role.DECODE and machine.transfers.by_transfer:
                wrong.append("decode's pages are not free")
            if process.role is Role.PREFILL and machine.jobs.by_transfer:
                wrong.append("prefill's pages are not free")
            if process.role is Role.KVPROXY and machine.transfers.by_id:
                wrong.append("kvproxy keeps transfers")
            if process.engine is not None and not process.engine.idle:
                wrong.append(f"the engine of {process.instance} is not idle")
            if process.role is Role.LB and not machine.ready:
                wrong.append("lb is not ready")
        if wrong:
            raise self._with_trace(Violation("liveness", "; ".join(wrong)), number, ("rest",))

    def _check_liveness(self) -> None:
        good = bytearray(len(self.fair))
        for first in range(len(self.fair)):
            path = []
            at = first
            while not good[at] and self.fair[at] != at:
                good[at] = 2
                path.append(at)
                at = self.fair[at]
                if good[at] == 2:
                    raise self._with_trace(
                        Violation("liveness", "the fair continuation runs in a circle"),
                        first,
                        ("circle", *self.actions[at]),
                    )
            good[at] = 1
            for passed in path:
                good[passed] = 1

    def trace_to(self, number: int) -> list[Action]:
        steps: list[Action] = []
        while number > 0:
            steps.append(self.actions[number])
            number = self.parents[number]
        return steps[::-1]

    def _with_trace(self, violation: Violation, number: int, action: Action) -> Violation:
        steps = [*self.trace_to(number), action]
        lines = [f"{index:3} {describe(step)}" for index, step in enumerate(steps, 1)]
        return Violation(violation.invariant, "\n".join([violation.detail, *lines]))


def describe(action: Action) -> str:
    name, *args = action
    return " ".join([str(name), *(_word(arg) for arg in args)])


def _word(arg: object) -> str:
    return "/".join(str(a) for a in arg) if isinstance(arg, tuple) else str(arg)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scope", choices=sorted(SCOPES), action="append")
    parser.add_argument("--limit", type=int, help="stop after so many states (not complete)")
    options = parser.parse_args(argv)
    total, violations = 0, 0
    for name in options.scope or SCOPES:
        scope = SCOPES[name]
        explorer = Explorer(scope, options.limit)
        began = time.perf_counter()
        try:
            states = explorer.run()
        except Violation as violation:
            print(f"scope {name}: {violation.invariant}: {violation.detail}")
            violations += 1
            states = len(explorer.parents)
        seconds = time.perf_counter() - began
        total += states
        print(
            f"scope {name}: {scope.requests} requests, {scope.decode_pages} pages, 1 writer, "
            f"at most {scope.faults} faults of {', '.join(scope.kinds)} and {scope.cancels} "
            f"cancels a run: {states} states, {explorer.transitions} steps, "
            f"{len(explorer.interner)} machine states, {seconds:.0f} s"
            f"{'' if explorer.complete else ', NOT complete'}"
        )
    print(f"{total} states, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
