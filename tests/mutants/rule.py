"""One rule of the services: where it lives, what would stand there without it, who notices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A place of a module's source, and the tests that must not pass without it."""

    name: str
    """What holds without the rule."""
    module: str
    line: str
    """What stands there, once in the module; several lines where one alone stands twice."""
    becomes: str
    tests: tuple[str, ...]
    """Each of them must fail; of a parametrised one any case."""
    slow: bool = False
    """Takes many seconds, most of them a test that waits in vain: left to `make mutants`."""

    def switch_off(self, source: str) -> str:
        """The module's source without the rule.

        Raises:
            LookupError: the line is not there, or more than once.
        """
        if (found := source.count(self.line)) != 1:
            raise LookupError(f"{self.module} has {found} times {self.line!r}")
        return source.replace(self.line, self.becomes)
