"""Exhaustive search over the real machines at small scope: every order of every step.

Breadth first, so the first violation found has a shortest trace. States are compared by a
64-bit hash of their full contents. Faults (see `scopes.FAULTS`) are budgeted per run, and so
are cancels and deadlines; everything else (every interleaving of messages, engine steps,
copies, deaths told late, reconnects) is free. Reductions, each towards the worse order:

- What an engine says to its I/O process, and what prefill and decode say to lb, is heard at
  once: a delay only moves the listener's reaction, and that has a delayed queue of its own.
- The steps in `steps.urgent` are taken at once for the same reason: an engine sees new
  sequences and launches steps as early as can be (Stop it sees as late as it likes), a dead
  process starts again, lifelines come up, lb notices ends and dials. Deaths are told late.
- A copy moves its bytes when its end is reported, the latest moment there is; one whose end
  was reported as unknown, or whose writer is stopped, moves them at any time.

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

from duplet_core.effects import CopyResult, Submit
from duplet_core.errors import Reason
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.messages import Sampling
from duplet_sim import checks, content
from duplet_sim.goal import complaints
from duplet_sim.nodes import Interner
from duplet_sim.parts import ACCEPTOR, Process
from duplet_sim.scopes import FAULTS, ROLES, SCOPES, Scope, world_config
from duplet_sim.steps import Action, describe, progress, timers, urgent
from duplet_sim.violation import Violation
from duplet_sim.world import World


class Budget:
    """What is left of faults, cancels and requests; part of a state."""

    __slots__ = ("cancels", "faults", "submitted")

    def __init__(self, faults: int, cancels: int, submitted: int) -> None:
        self.faults, self.cancels, self.submitted = faults, cancels, submitted

    def key(self) -> tuple[int, int, int]:
        return (self.faults, self.cancels, self.submitted)


State = tuple[World, Budget]


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
        """For each state: where its fair continuation leads; itself at the goal."""
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
        yield from self._timers(state)
        lb = world.primary(Role.LB)
        if lb is not None and lb.runs:
            if budget.submitted < self.scope.requests and self._may_submit(world, lb):
                yield ("submit",)
            if budget.cancels:
                for transfer in world.clients:
                    yield ("cancel", transfer)
        if budget.faults:
            yield from self._faults(world)

    def _timers(self, state: State) -> Iterator[Action]:
        """kvproxy's bound where a copy is stuck; decode's deadline, at the price of a cancel."""
        world, budget = state
        for _, instance in timers(world):
            assert isinstance(instance, str)
            if world.processes[InstanceId(instance)].role is Role.KVPROXY:
                if any(c.told and c.writer == instance for c in world.copies.values()):
                    yield ("tick", instance)
            elif budget.cancels:
                yield ("tick", instance, "deadline")

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
                dialer = stream.local[ACCEPTOR][0]
                if not stream.broken and dialer in self.scope.severable:
                    yield ("sever", key)
        for copy_key, copy in world.copies.items():
            if world.processes[copy.writer].runs and not copy.told:
                if "unknown" in kinds:
                    yield ("unknown", copy_key)
                if "refuse" in kinds:
                    yield ("refuse", copy_key)

    def apply(self, state: State, action: Action) -> State:
        """The state after one step; the given one is unchanged."""
        world, budget = fork(state[0]), state[1]
        name, *args = action
        marked = len(args) == 2 and args[1] in ("fault", "deadline")
        if marked:
            args.pop()
        if marked or (name in FAULTS and name != "kill"):
            cancels = name in ("cancel", "tick")
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
            content.pack_prompt(content.tags(number, 0, rows), False),
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
            actions = list(self.all_actions(state))
            if fair is not None and fair not in actions:
                actions.append(fair)  # a timer that the budget would not allow
            for action in actions:
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
        wrong = complaints(state[0])
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
