"""Prefill's pages: counted holds, so that a page is reused only when nobody reads or writes it.

A page is held by the transfers that compute or move it and, where it is cached, by the prefix
index. It is free when no hold is left (S6). Holds of a transfer end only by the writer's
SourceReleased or death, and only after the engine let go of the sequence.
"""

from __future__ import annotations

from duplet_core.errors import require
from duplet_core.ids import TransferId


class SourcePages:
    """Owner of every page of prefill's pool."""

    def __init__(self, pages: int) -> None:
        require(pages > 0, "a pool has pages")
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._holds = [0] * pages
        self._held: dict[TransferId, tuple[int, ...]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def hold(
        self, transfer: TransferId, fresh: int, shared: tuple[int, ...] = ()
    ) -> tuple[int, ...] | None:
        """Hold `shared` pages and `fresh` free ones, in this order; None when too few are free."""
        require(transfer not in self._held, "a transfer's pages are held once")
        if fresh > len(self._free):
            return None
        taken = tuple(self._free[: -fresh - 1 : -1]) if fresh else ()
        if fresh:
            del self._free[-fresh:]
        pages = shared + taken
        for page in shared:
            require(self._holds[page] > 0, "only a held page can be shared")
        for page in pages:
            self._holds[page] += 1
        self._held[transfer] = pages
        return pages

    def release(self, transfer: TransferId) -> None:
        """Nobody reads or writes these pages for this transfer any more."""
        pages = self._held.pop(transfer, None)
        require(pages is not None, "released pages were held")
        assert pages is not None
        for page in reversed(pages):
            self._drop(page)

    def retain(self, page: int) -> None:
        """Begin one more hold on a held page; the prefix index keeps pages this way."""
        require(self._holds[page] > 0, "only a held page can be retained")
        self._holds[page] += 1

    def release_page(self, page: int) -> None:
        """End one hold that `retain` began."""
        self._drop(page)

    def holds(self, page: int) -> int:
        """How many hold this page."""
        return self._holds[page]

    def pages_of(self, transfer: TransferId) -> tuple[int, ...]:
        pages = self._held.get(transfer)
        require(pages is not None, "the transfer holds pages")
        assert pages is not None
        return pages

    def check(self) -> None:
        """Conservation: free exactly where nobody holds. O(pages)."""
        free = set(self._free)
        require(len(free) == len(self._free), "no page is free twice")
        for page, holds in enumerate(self._holds):
            require((holds == 0) == (page in free), f"page {page} has {holds} holds")

    def _drop(self, page: int) -> None:
        self._holds[page] -= 1
        require(self._holds[page] >= 0, "a hold ends once")
        if self._holds[page] == 0:
            self._free.append(page)
