"""Damages landed KV on purpose, for the canary's drill (setting `damage_pages` of decode).

It does what the safety rules exclude: after a prompt's digests were found right, its last pages
are overwritten with those of the prompt before it, as a late write would. No error is raised, and
the listener hears what somebody else is being told. Only rows and ears can notice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from duplet_memory.pool import Pool


class KvDamage:
    """Strikes every prompt but the first. Writes into the engine's pool; owns copies of pages."""

    def __init__(self, pool: Pool, pages: int) -> None:
        """`pages`: of each prompt, counted from its end."""
        self._pool = pool
        self._pages = pages
        self._before: list[np.ndarray] = []
        """The last pages of the prompt before, the very last first."""
        print("duplet_engine: KV is damaged on purpose (damage_pages)", file=sys.stderr)

    def strike(self, prompt_pages: Sequence[int]) -> None:
        """`prompt_pages`: of one prompt, in order, whose check has passed."""
        struck = [self._view(page) for page in reversed(prompt_pages[-self._pages :])]
        own = [view.copy() for view in struck]
        for view, foreign in zip(struck, self._before, strict=False):
            view[...] = foreign
        self._before = own

    def _view(self, page: int) -> np.ndarray:
        """All rows of a page in all layers."""
        d = self._pool.description
        if d.arrangement == "page-major":
            return self._pool.array[page]
        return self._pool.array[:, :, page * d.page_rows : (page + 1) * d.page_rows]
