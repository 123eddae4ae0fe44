"""Exhaustive search over the real machines at small scope: every order of every step.

Breadth first, so the first violation found has a shortest trace. States are compared exactly:
equal parts get equal numbers (`Interner`), and a state's key is the numbers of its parts.
Faults are budgeted per run, and so are cancels and deadlines; everything else (every order of
messages, engine steps, copies, deaths told late, reconnects) is free. `steps` says which orders
are left out, and why nothing is lost with them.

Liveness: from every state found there is one fair continuation without faults; following it
must reach a state where all is free, connected and idle. The search records that successor
of every state and follows the pointers at the end.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator

from duplet_core.effects import CopyResult, Submit
from duplet_core.errors import Reason
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.messages import Sampling
from duplet_sim import checks
from duplet_sim.goal import complaints
from duplet_sim.hazards import may_happen, strike
from duplet_sim.nodes import Interner
from duplet_sim.parts import Process, Stream
from duplet_sim.remote import RemoteWorld
from duplet_sim.scopes import Scope, prompt_of, world_config
from duplet_sim.steps import Action, describe, early_writes, progress, timers, urgent
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
    other = world.__class__.__new__(world.__class__)
    other.__dict__.update(world.__dict__)
    other.owner = object()
    other.processes = dict(world.processes)
    other.current = dict(world.current)
    other.births = dict(world.births)
    other.streams = dict(world.streams)
    other.copies = dict(world.copies)
    other.clients = dict(world.clients)
    if isinstance(other, RemoteWorld) and isinstance(world, RemoteWorld):
        other.chunks = dict(world.chunks)
        other.late = dict(world.late)
    return other


class Explorer:
    """One search. Owns every state it found."""

    def __init__(
        self, scope: Scope, limit: int | None = None, first: str = "", reduced: bool = True
    ) -> None:
        """`first`: only runs whose first fault is of this label (`hazards.label`), or which
        have none. `reduced` False: without the reductions that `steps` argues for."""
        self.scope = scope
        self.limit = limit
        self.first = first
        self.reduced = reduced
        self.interner = Interner(checks.check_machine)
        self.seen: dict[bytes, int] = {}
        """A state's key to its number."""
        self.parents = array("q")
        self.came_by = array("q")
        """The number of the step that led to each state."""
        self.steps: list[Action] = []
        self._step_numbers: dict[Action, int] = {}
        self.fair = array("q")
        """For each state: where its fair continuation leads; itself at the goal."""
        self.transitions = 0
        self.complete = False
        self.marks: set[str] = set()
        """Rare paths that were taken; all worlds of the search share it."""

    # --- steps of a state ----------------------------------------------------------

    def boot(self) -> State:
        """Four processes, connected and idle."""
        kind = RemoteWorld if self.scope.remote else World
        world = kind(world_config(self.scope), self.interner)
        world.prompt = self.reduced
        world.marks = self.marks
        state = (world, Budget(self.scope.faults, self.scope.cancels, 0))
        while (action := self.choices(state)[0]) is not None:
            state = self.apply(state, action)
        return state

    def choices(self, state: State) -> tuple[Action | None, list[Action]]:
        """The continuation without faults, None when nothing is left to do; and all steps."""
        world, budget = state
        steps = list(urgent(world))
        if steps and self.reduced:
            return steps[0], steps[:1]
        steps += progress(world)
        if not self.reduced:
            steps += early_writes(world)
        due = list(timers(world))
        fair = steps[0] if steps else due[0] if due else None
        steps += self._timers(state, due)
        lb = world.primary(Role.LB)
        if lb is not None and lb.runs:
            waits = self.scope.same_ids and bool(world.clients)
            if budget.submitted < self.scope.requests and lb.node.machine.ready and not waits:
                steps.append(("submit",))
            if budget.cancels:
                steps += [("cancel", transfer) for transfer in world.clients]
        if budget.faults:
            first = self.first if budget.faults == self.scope.faults else ""
            steps += may_happen(world, self.scope, first)
        if fair is not None and fair not in steps:
            steps.append(fair)  # a timer that the budget would not allow
        return fair, steps

    def _timers(self, state: State, due: list[Action]) -> Iterator[Action]:
        """Free where a copy is stuck; else only decode's, at the price of a cancel."""
        world, budget = state
        for action in due:
            instance = action[1]
            kvproxy = world.processes[InstanceId(str(instance))].role is Role.KVPROXY
            if any(c.told and instance in (c.writer, c.dest) for c in world.copies.values()):
                yield action
            elif budget.cancels and not kvproxy:
                yield (*action, "deadline")

    def apply(self, state: State, action: Action) -> State:
        """The state after one step; the given one is unchanged."""
        world, budget = fork(state[0]), state[1]
        name, *args = action
        if name == "fault":
            budget = Budget(budget.faults - 1, budget.cancels, budget.submitted)
            strike(world, *args)
        elif name == "submit":
            number = budget.submitted + 1
            budget = Budget(budget.faults, budget.cancels, number)
            self._submit(world, number)
        elif name == "cancel":
            budget = Budget(budget.faults, budget.cancels - 1, budget.submitted)
            world.cancel(args[0], Reason.CANCELLED)  # type: ignore[arg-type]
        elif name == "tick" and len(args) == 2:
            budget = Budget(budget.faults, budget.cancels - 1, budget.submitted)
            world.tick(args[0])  # type: ignore[arg-type]
        elif name == "finish":
            world.write_copy(args[0])  # type: ignore[arg-type]
            world.end_copy(args[0], CopyResult.OK)  # type: ignore[arg-type]
        elif name == "write":
            world.write_copy(args[0])  # type: ignore[arg-type]
        else:
            getattr(world, str(name))(*args)
        return world, budget

    def _submit(self, world: World, number: int) -> None:
        scope = self.scope
        rows = scope.prompt_rows
        submit = Submit(
            "same" if scope.same_ids else f"r{number}",
            TransferId(f"t{number}"),
            prompt_of(scope, number),
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
            fair, steps = self.choices(state)
            if fair is None:
                self._check_goal(number, state)
                self.fair[number] = number
            for action in steps:
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

    def key_of(self, state: State) -> bytes:
        """Equal for equal states and for no others."""
        world, budget = state
        number = self.interner.number
        parts = []
        held: list[Process | Stream] = [*world.processes.values(), *world.streams.values()]
        for part in held:
            if part.number is None:
                part.number = number(part.state())
            parts.append(part.number)
        parts += map(number, world.copies.values())
        parts.sort()
        clients = [(c.content, c.rows) for c in world.clients.values()]
        parts.append(number((*clients, *world.births.values(), world.duplicates, *budget.key())))
        if isinstance(world, RemoteWorld):
            parts.append(number((*world.chunks.items(), None, *world.late.items())))
        return array("I", parts).tobytes()

    def _enter(self, state: State, parent: int, action: Action) -> tuple[int, bool]:
        key = self.key_of(state)
        number = self.seen.get(key)
        if number is not None:
            return number, False
        number = self.seen[key] = len(self.parents)
        step = self._step_numbers.get(action)
        if step is None:
            step = self._step_numbers[action] = len(self.steps)
            self.steps.append(action)
        self.parents.append(parent)
        self.came_by.append(step)
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
                        ("circle", *self.steps[self.came_by[at]]),
                    )
            good[at] = 1
            for passed in path:
                good[passed] = 1

    def trace_to(self, number: int) -> list[Action]:
        steps: list[Action] = []
        while number > 0:
            steps.append(self.steps[self.came_by[number]])
            number = self.parents[number]
        return steps[::-1]

    def _with_trace(self, violation: Violation, number: int, action: Action) -> Violation:
        steps = [*self.trace_to(number), action]
        lines = [f"{index:3} {describe(step)}" for index, step in enumerate(steps, 1)]
        return Violation(violation.invariant, "\n".join([violation.detail, *lines]))
