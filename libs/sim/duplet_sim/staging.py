"""Staging memory of one kvproxy: a copy gathers its rows into a slot and scatters them from it.

A slot is lent from the gather to the copy's observed end. A copy whose end is unknown keeps
its slot for as long as the process lives: it may still scatter.
"""

from __future__ import annotations

from collections import deque

from duplet_sim.content import Rows


class Staging:
    """Owned by its process, and gone with it."""

    __slots__ = ("_free", "_lent", "_rows", "waiting")

    def __init__(self, slots: int) -> None:
        self._rows: list[Rows] = [()] * slots
        self._free = list(range(slots))
        self._lent: dict[int, int] = {}
        """Copy to slot."""
        self.waiting: deque[int] = deque()
        """Copies that found no slot, in order."""

    def has_room(self) -> bool:
        return bool(self._free)

    def holds(self, copy: int) -> bool:
        return copy in self._lent

    def gather(self, copy: int, rows: Rows) -> None:
        """Lend a free slot to the copy and store its rows there."""
        slot = self._lent[copy] = self._free.pop()
        self._rows[slot] = rows

    def scatter(self, copy: int) -> Rows:
        """What the copy's slot holds now."""
        return self._rows[self._lent[copy]]

    def give_back(self, copy: int) -> None:
        """The copy has ended, observed."""
        slot = self._lent.pop(copy, None)
        if slot is not None:
            self._free.append(slot)
