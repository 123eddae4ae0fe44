"""What a checker says when a rule is broken."""

from __future__ import annotations


class Violation(Exception):
    """An invariant of the unit does not hold. `invariant` is its short name."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail
