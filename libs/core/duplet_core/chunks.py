"""Which prompt rows the next forward pass computes, when many prompts wait.

A pass takes at most `budget_rows` rows. Half of them go to the prompts in order of arrival, so
that a long prompt gets on whatever arrives behind it; the other half to whichever prompts have
least left, so that a short one, whose voice is cached, does not wait for a cold voice before
it. What either half leaves over goes to the order of arrival again. Equal prompts finish in the
order in which they came.

Parts end at a page's end or at the prompt's, so that no page leaves twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from duplet_core.errors import require


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Rows [first, first + count) of one prompt."""

    seq: int
    first: int
    count: int
    last: bool
    """The prompt ends with it."""


@dataclass(slots=True)
class _Waiting:
    seq: int
    next_row: int
    rows: int

    @property
    def left(self) -> int:
        return self.rows - self.next_row


class ChunkQueue:
    """Prompts with rows to compute, in order of arrival. Whoever fills it bounds it."""

    def __init__(self, budget_rows: int, page_rows: int, most_parts: int) -> None:
        """`budget_rows`: of a pass; whole pages of it count, one at least. `most_parts`: prompts
        that one pass takes."""
        require(budget_rows >= 1 and page_rows >= 1 and most_parts >= 1, "a pass takes something")
        self._page_rows = page_rows
        self._budget = max(1, budget_rows // page_rows) * page_rows
        self._half = max(1, self._budget // 2 // page_rows) * page_rows
        self._most_parts = most_parts
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def budget_rows(self) -> int:
        """Most rows of a pass."""
        return self._budget

    def add(self, seq: int, first_row: int, rows: int) -> None:
        """Enter a prompt of `rows` rows; those before `first_row`, a page's start, are there."""
        require(seq not in self._waiting, f"seq {seq} waits already")
        require(0 <= first_row < rows, f"rows {first_row} to {rows} to compute")
        require(first_row % self._page_rows == 0, f"row {first_row} is not at a page's start")
        self._waiting[seq] = _Waiting(seq, first_row, rows)

    def remove(self, seq: int) -> None:
        """Forget a prompt, if it waits."""
        self._waiting.pop(seq, None)

    def next_pass(self) -> tuple[ChunkPart, ...]:
        """Take the rows of the next pass, parts in order of arrival; none where nothing waits."""
        arrival = list(self._waiting.values())
        taken: dict[int, int] = {}
        left = self._budget - self._give(arrival, self._half, taken)
        left -= self._give(sorted(arrival, key=lambda w: w.left), left, taken)
        self._give(arrival, left, taken)
        return tuple(self._cut(w, taken[w.seq]) for w in arrival if w.seq in taken)

    def _give(self, order: Iterable[_Waiting], rows: int, taken: dict[int, int]) -> int:
        """Add up to `rows` rows of prompts in this order to `taken`; how many they are."""
        given = 0
        for waiting in order:
            before = taken.get(waiting.seq, 0)
            if not before and len(taken) >= self._most_parts:
                continue
            count = min(waiting.left - before, rows - given)
            if before + count < waiting.left:
                count = count // self._page_rows * self._page_rows
            if count:
                taken[waiting.seq] = before + count
                given += count
        return given

    def _cut(self, waiting: _Waiting, count: int) -> ChunkPart:
        first = waiting.next_row
        waiting.next_row += count
        last = waiting.left == 0
        if last:
            del self._waiting[waiting.seq]
        return ChunkPart(waiting.seq, first, count, last)
