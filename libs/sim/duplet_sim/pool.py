"""An engine's way to the pages of its pool: past the checkers, which know the true state."""

from __future__ import annotations

from duplet_sim import checks, content
from duplet_sim.content import FOREIGN, Known, Rows
from duplet_sim.parts import Process


class Pool:
    """The pages of one engine. Made for one step of it; owns nothing."""

    __slots__ = ("_known", "_process", "page_rows", "rows")

    def __init__(self, process: Process, known: Known) -> None:
        self._process = process
        self._known = known
        self.page_rows = process.page_rows
        self.rows = process.rows

    def write(self, seq: int, pages: tuple[int, ...], start: int, tags: Rows) -> None:
        """Rows of a sequence, written by its engine; `pages` are all pages of the sequence."""
        page_rows = self.page_rows
        touched = pages[start // page_rows : (start + len(tags) - 1) // page_rows + 1]
        checks.check_engine_write(self._process, seq, touched)
        content.write_rows(self.rows, touched, start, tags, page_rows)

    def read(self, pages: tuple[int, ...], rows: int) -> Rows:
        """The first `rows` rows that these pages hold."""
        found: list[int] = []
        for page in pages[: -(-rows // self.page_rows)]:
            found += self.rows[page]
        return tuple(found[:rows])

    def attend(self, seq: int, pages: tuple[int, ...], before: Rows) -> None:
        """A prompt's rows are computed on those before them: they must be the prompt's own."""
        checks.check_prefix(self._process, seq, self.read(pages, len(before)), before)

    def whose(self, pages: tuple[int, ...], rows: int) -> int:
        """The number of the prompt that these pages hold, complete and in order."""
        return self._known.get(self.read(pages, rows), FOREIGN)

    def digests(self, pages: tuple[int, ...], rows: int) -> tuple[bytes, ...]:
        """One a page, over its valid rows."""
        return tuple(
            map(content.digest, content.valid_rows(self.rows, pages, rows, self.page_rows))
        )

    def is_damaged(self, pages: tuple[int, ...], rows: int) -> bool:
        return max(self.read(pages, rows)) >= content.DAMAGED
