"""A machine as the world holds it: feed an event, get effects.

The simulator's node changes its machine in place. The explorer's nodes are immutable: equal
machine states are one node, and what an event does to a node is computed once, ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from duplet_core.effects import Effect
from duplet_core.errors import InvariantError
from duplet_core.machine import Machine
from duplet_sim.snapshot import clone, freeze
from duplet_sim.violation import Violation


class Timer:
    """The event that `handle_timer` stands for."""


TIMER = Timer()


class Node(Protocol):
    """Reading `machine` is for checkers; only `feed` may change anything."""

    machine: Any

    def feed(self, event: Any, now: int) -> tuple[Node, list[Effect]]: ...


def take(machine: Machine, event: Any, now: int) -> list[Effect]:
    """Give the machine one event.

    Raises:
        Violation: one of the machine's own invariants failed.
    """
    try:
        if event is TIMER:
            return machine.handle_timer(now)
        return machine.receive(event, now)
    except InvariantError as error:
        raise Violation("invariant", f"{machine.ROLE}: {error}") from error


class LiveNode:
    """Owns its machine."""

    __slots__ = ("machine",)

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def feed(self, event: Any, now: int) -> tuple[Node, list[Effect]]:
        return self, take(self.machine, event, now)


class FrozenNode:
    """One state of a machine; never changed after it was made."""

    __slots__ = ("_interner", "_known", "machine")

    def __init__(self, machine: Machine, interner: Interner) -> None:
        self.machine = machine
        self._interner = interner
        self._known: dict[Hashable, tuple[Node, list[Effect]]] = {}

    def feed(self, event: Any, now: int) -> tuple[Node, list[Effect]]:
        key = (event, now)
        known = self._known.get(key)
        if known is None:
            machine = clone(self.machine)
            effects = take(machine, event, now)
            known = self._known[key] = (self._interner.node(machine), effects)
        return known


class Interner:
    """Owner of all frozen nodes of one search."""

    def __init__(self, check: Callable[[Any], None]) -> None:
        """`check` sees every distinct machine state once and raises a Violation."""
        self._nodes: dict[Hashable, FrozenNode] = {}
        self._messages: dict[Any, Any] = {}
        self._numbers: dict[Hashable, int] = {}
        self._check = check

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, machine: Machine) -> FrozenNode:
        key = (machine.ROLE, freeze(machine))
        node = self._nodes.get(key)
        if node is None:
            self._check(machine)
            node = self._nodes[key] = FrozenNode(machine, self)
        return node

    def message(self, message: Any) -> Any:
        """The one object that stands for this message, so that `id` compares it."""
        return self._messages.setdefault(message, message)

    def number(self, state: Hashable) -> int:
        """The one number that stands for this state of some part of a world."""
        return self._numbers.setdefault(state, len(self._numbers))
