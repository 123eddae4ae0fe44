"""Decode's pages: each is in exactly one state (S1), and only proofs lead back to free (S2).

    free --grant--> granted --land--> live --free_live--> free
                       |                      (needs: engine closed the sequence)
                       +--quarantine--> quarantined
                       +--free_proven--> free <--free_proven--+
                                (needs: the writer's report, ABORT_ACK, or its death)

The ledger knows no reasons and no time: its caller holds the proof when it calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from duplet_core.errors import require
from duplet_core.ids import InstanceId, TransferId


class PageState(StrEnum):
    FREE = "free"
    GRANTED = "granted"
    LIVE = "live"
    QUARANTINED = "quarantined"

    __hash__ = str.__hash__  # keys a table


@dataclass(slots=True)
class Holding:
    """The pages of one transfer; they always change state together."""

    state: PageState
    pages: tuple[int, ...]
    writer: InstanceId


class Ledger:
    """Owner of every page of decode's pool."""

    def __init__(self, pages: int) -> None:
        require(pages > 0, "a pool has pages")
        self.total = pages
        # Last freed, first granted: a page that was freed too early is hit at once, in tests too.
        self._free = list(range(pages - 1, -1, -1))
        self._holdings: dict[TransferId, Holding] = {}
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = pages

    def grant(self, transfer: TransferId, count: int, writer: InstanceId) -> tuple[int, ...] | None:
        """free -> granted; None when fewer than `count` pages are free."""
        require(transfer not in self._holdings, "a transfer is granted once")
        require(count > 0, "a grant names pages")
        if count > len(self._free):
            return None
        pages = tuple(self._free[: -count - 1 : -1])
        del self._free[-count:]
        self._holdings[transfer] = Holding(PageState.GRANTED, pages, writer)
        self._count(PageState.FREE, PageState.GRANTED, count)
        return pages

    def land(self, transfer: TransferId) -> tuple[int, ...]:
        """granted -> live: the transfer landed, its grant is consumed."""
        return self._change(transfer, PageState.GRANTED, PageState.LIVE)

    def quarantine(self, transfer: TransferId) -> None:
        """granted -> quarantined: the request ended, the writer may still write."""
        self._change(transfer, PageState.GRANTED, PageState.QUARANTINED)

    def free_live(self, transfer: TransferId) -> None:
        """live -> free: no launched step names the pages any more."""
        self._free_from(transfer, PageState.LIVE)

    def free_proven(self, transfer: TransferId) -> None:
        """granted or quarantined -> free: the writer has proven that it will not write."""
        state = self.holding(transfer).state
        require(state is not PageState.LIVE, "a live page is freed by the engine's word")
        self._free_from(transfer, state)

    def holding(self, transfer: TransferId) -> Holding:
        holding = self._holdings.get(transfer)
        require(holding is not None, "the transfer holds pages")
        assert holding is not None
        return holding

    def count(self, state: PageState) -> int:
        """Pages in this state."""
        return self._counts[state]

    def counts(self) -> tuple[int, ...]:
        """Pages in each state, in the states' order."""
        return tuple(self._counts.values())

    def check(self) -> None:
        """Conservation: every page exactly once. O(pages), for idle moments and tests."""
        seen = list(self._free)
        for holding in self._holdings.values():
            seen.extend(holding.pages)
        require(sorted(seen) == list(range(self.total)), "the ledger conserves pages")
        require(len(self._free) == self._counts[PageState.FREE], "free pages are counted right")

    def _change(self, transfer: TransferId, old: PageState, new: PageState) -> tuple[int, ...]:
        holding = self.holding(transfer)
        require(holding.state is old, f"pages of {transfer} are {holding.state}, not {old}")
        holding.state = new
        self._count(old, new, len(holding.pages))
        return holding.pages

    def _free_from(self, transfer: TransferId, state: PageState) -> None:
        holding = self.holding(transfer)
        require(holding.state is state, f"pages of {transfer} are {holding.state}, not {state}")
        del self._holdings[transfer]
        self._free.extend(reversed(holding.pages))
        self._count(state, PageState.FREE, len(holding.pages))
        require(len(self._free) <= self.total, "no page is freed twice")

    def _count(self, old: PageState, new: PageState, pages: int) -> None:
        self._counts[old] -= pages
        self._counts[new] += pages
        require(self._counts[old] >= 0, "page counts stay positive")
