"""What a mutant is, and how it changes the real machines for as long as it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    invariant: str
    apply: Callable[[ExitStack], None]
    seeds: int = 2000
    timed: dict[str, int] = field(default_factory=dict)
    """Faults that every seed has; the others as drawn."""
    chances: dict[str, float] = field(default_factory=dict)
    requests: int = 0
    """Every seed has so many, where few do not do; 0: as drawn."""
    old_writer: bool = False
    """The first kvproxy speaks an older protocol: it acknowledges what it has not waited for."""
    search: str = ""
    """Scope of the explorer that must find it, where waiting hides it from the simulator."""
    every: bool = False
    """Every seed must fail."""
    host: bool = False
    """In a monolith's host, not in a unit."""


class Mutants(list[Mutant]):
    """The mutants of one module, in its order."""

    def add(self, name: str, invariant: str, **settings: Any) -> Callable[..., Any]:
        """Enter the function below as a mutant."""

        def enter(apply: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
            self.append(Mutant(name, invariant, apply, **settings))
            return apply

        return enter


def cell(stack: ExitStack, owner: Any, state: Any, what: Any, method: Callable[..., None]) -> None:
    """Replace one transition."""
    stack.enter_context(patch.dict(owner.TABLE[state], {what: method}))


def method(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    stack.enter_context(patch.object(owner, name, new))


def without_limit(stack: ExitStack, owner: Any, name: str, limit: str) -> None:
    """The method does its work with a config that sets no such limit."""
    limited = getattr(owner, name)

    def unlimited(self: Any, *args: Any) -> Any:
        config = self.config
        self.config = replace(config, **{limit: 1 << 30})
        try:
            return limited(self, *args)
        finally:
            self.config = config

    method(stack, owner, name, unlimited)
