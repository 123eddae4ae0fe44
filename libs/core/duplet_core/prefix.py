"""What prefill's machine needs of a prefix index; `duplet_pages.prefix` is the real one.

The index says which computed pages hold the beginning of a prompt. It keeps holds of its own
on the pages that it knows (`SourcePages.retain`), so a cached page is not reused by accident,
and it gives pages back only when nobody else holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from duplet_core.ids import TransferId
from duplet_core.sources import SourcePages


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known beginning of a prompt, in whole pages."""

    pages: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()
    """One a page, taken when it was computed (S10)."""
    pending: bool = False
    """The next page of the prompt is being computed for somebody else right now."""


class PrefixIndex(Protocol):
    """Pages by what they hold: whole rows, all columns, never a name or a length."""

    def __len__(self) -> int:
        """Computed pages that are kept."""
        ...

    def match(self, prompt: bytes, most_pages: int) -> Match:
        """The computed pages that hold the prompt's beginning, at most `most_pages`."""
        ...

    def begin(self, owner: TransferId, prompt: bytes, pages: tuple[int, ...]) -> None:
        """`owner` computes `pages`, whole pages of its prompt's rows from the first on; those
        that a match named are in it. Matchable only once `computed` says so."""
        ...

    def computed(self, owner: TransferId, digests: tuple[bytes, ...]) -> tuple[int, ...]:
        """The owner's first pages are computed, one digest each; the pages kept from now on."""
        ...

    def abandon(self, owner: TransferId) -> None:
        """The owner computes nothing more; what is not computed is forgotten."""
        ...

    def evict(self, count: int, in_use: Callable[[int], bool]) -> tuple[int, ...]:
        """Forget up to `count` pages that are not in use, least recently used first."""
        ...

    def forget(self) -> tuple[int, ...]:
        """Forget everything, also what is being computed; the pages that were kept."""
        ...


class NoPrefixIndex:
    """Knows nothing: every prompt is computed whole."""

    def __len__(self) -> int:
        return 0

    def match(self, prompt: bytes, most_pages: int) -> Match:
        return Match()

    def begin(self, owner: TransferId, prompt: bytes, pages: tuple[int, ...]) -> None:
        """Nothing is kept."""

    def computed(self, owner: TransferId, digests: tuple[bytes, ...]) -> tuple[int, ...]:
        return ()

    def abandon(self, owner: TransferId) -> None:
        """Nothing was kept."""

    def evict(self, count: int, in_use: Callable[[int], bool]) -> tuple[int, ...]:
        return ()

    def forget(self) -> tuple[int, ...]:
        return ()


def hold_pages(
    pages: SourcePages, index: PrefixIndex, transfer: TransferId, fresh: int, match: Match
) -> tuple[int, ...] | None:
    """Hold the matched pages and `fresh` others, evicting cached ones that nobody uses where
    too few are free; None when that is not enough."""
    for page in match.pages:  # not to be evicted for the rest of this very prompt
        pages.retain(page)
    missing = fresh - pages.free
    if missing > 0:
        for page in index.evict(missing, lambda page: pages.holds(page) > 1):
            pages.release_page(page)
    held = pages.hold(transfer, fresh, match.pages)
    for page in match.pages:
        pages.release_page(page)
    return held


def keep_pages(
    pages: SourcePages, index: PrefixIndex, owner: TransferId, digests: tuple[bytes, ...]
) -> None:
    """The owner's first pages are computed, one digest each: the index keeps them from now on."""
    for page in index.computed(owner, digests):
        pages.retain(page)
