"""Decode's ledger: conservation, legal changes only, last freed is first granted."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duplet_core.errors import InvariantError
from duplet_core.ids import TransferId
from duplet_core.ledger import Ledger, PageState
from tests.core.samples import T1, T2, T3, WRITER1

PAGES = 8


def test_pages_go_round_and_are_counted() -> None:
    ledger = Ledger(PAGES)
    assert ledger.grant(T1, 3, WRITER1) == (0, 1, 2)
    assert ledger.grant(T2, 2, WRITER1) == (3, 4)
    assert ledger.holding(T1).state is PageState.GRANTED
    assert ledger.land(T1) == (0, 1, 2)
    ledger.quarantine(T2)
    counts = [ledger.count(state) for state in PageState]
    assert dict(zip(PageState, counts, strict=True)) == {
        PageState.FREE: 3,
        PageState.GRANTED: 0,
        PageState.LIVE: 3,
        PageState.QUARANTINED: 2,
    }
    ledger.free_live(T1)
    ledger.free_proven(T2)
    assert ledger.count(PageState.FREE) == PAGES
    ledger.check()


def test_the_last_pages_freed_are_the_first_granted() -> None:
    ledger = Ledger(PAGES)
    ledger.grant(T1, 2, WRITER1)
    ledger.grant(T2, 3, WRITER1)
    ledger.free_proven(T1)
    ledger.free_proven(T2)
    assert ledger.grant(T3, 4, WRITER1) == (2, 3, 4, 0)


def test_too_few_free_pages_change_nothing() -> None:
    ledger = Ledger(PAGES)
    ledger.grant(T1, 6, WRITER1)
    assert ledger.grant(T2, 3, WRITER1) is None
    assert ledger.count(PageState.FREE) == 2
    assert ledger.grant(T2, 2, WRITER1) == (6, 7)
    ledger.check()


def in_state(state: PageState) -> Ledger:
    ledger = Ledger(PAGES)
    if state is PageState.FREE:
        return ledger
    ledger.grant(T1, 2, WRITER1)
    if state is PageState.LIVE:
        ledger.land(T1)
    elif state is PageState.QUARANTINED:
        ledger.quarantine(T1)
    return ledger


LEGAL = {
    "land": {PageState.GRANTED},
    "quarantine": {PageState.GRANTED},
    "free_live": {PageState.LIVE},
    "free_proven": {PageState.GRANTED, PageState.QUARANTINED},
}


@pytest.mark.parametrize("change", LEGAL)
@pytest.mark.parametrize("state", list(PageState))
def test_only_the_changes_drawn_above_the_ledger_are_legal(state: PageState, change: str) -> None:
    ledger = in_state(state)
    if state in LEGAL[change]:
        getattr(ledger, change)(T1)
    else:
        with pytest.raises(InvariantError):
            getattr(ledger, change)(T1)
    ledger.check()


@pytest.mark.parametrize("state", [PageState.GRANTED, PageState.LIVE, PageState.QUARANTINED])
def test_pages_are_freed_once(state: PageState) -> None:
    ledger = in_state(state)
    free = ledger.free_live if state is PageState.LIVE else ledger.free_proven
    free(T1)
    with pytest.raises(InvariantError):
        free(T1)
    assert ledger.count(PageState.FREE) == PAGES


def test_a_transfer_is_granted_once_and_grants_name_pages() -> None:
    ledger = Ledger(PAGES)
    ledger.grant(T1, 2, WRITER1)
    with pytest.raises(InvariantError, match="granted once"):
        ledger.grant(T1, 2, WRITER1)
    with pytest.raises(InvariantError, match="names pages"):
        ledger.grant(T2, 0, WRITER1)
    with pytest.raises(InvariantError, match="a pool has pages"):
        Ledger(0)


def test_the_check_finds_a_page_that_is_twice_there() -> None:
    ledger = Ledger(PAGES)
    ledger.grant(T1, 2, WRITER1)
    ledger.holding(T1).pages = (0, 0)
    with pytest.raises(InvariantError, match="conserves"):
        ledger.check()


class LedgerAgainstModel(RuleBasedStateMachine):
    """Random changes, legal and illegal, against a plain map from page to state."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(PAGES)
        self.model: dict[TransferId, tuple[PageState, tuple[int, ...]]] = {}

    def used(self) -> set[int]:
        return {page for _, pages in self.model.values() for page in pages}

    @rule(name=st.integers(0, 5), count=st.integers(1, PAGES))
    def grant(self, name: int, count: int) -> None:
        transfer = TransferId(f"t{name}")
        if transfer in self.model:
            with pytest.raises(InvariantError):
                self.ledger.grant(transfer, count, WRITER1)
            return
        pages = self.ledger.grant(transfer, count, WRITER1)
        if count > PAGES - len(self.used()):
            assert pages is None
            return
        assert pages is not None and len(set(pages)) == count
        assert not set(pages) & self.used(), "a page that is in use was granted"
        self.model[transfer] = (PageState.GRANTED, pages)

    @rule(name=st.integers(0, 5), change=st.sampled_from(sorted(LEGAL)))
    def change(self, name: int, change: str) -> None:
        transfer = TransferId(f"t{name}")
        state, pages = self.model.get(transfer, (PageState.FREE, ()))
        if state not in LEGAL[change]:
            with pytest.raises(InvariantError):
                getattr(self.ledger, change)(transfer)
            return
        getattr(self.ledger, change)(transfer)
        if change == "land":
            self.model[transfer] = (PageState.LIVE, pages)
        elif change == "quarantine":
            self.model[transfer] = (PageState.QUARANTINED, pages)
        else:
            del self.model[transfer]

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        self.ledger.check()
        for state in PageState:
            held = sum(len(pages) for s, pages in self.model.values() if s is state)
            expected = PAGES - len(self.used()) if state is PageState.FREE else held
            assert self.ledger.count(state) == expected


TestLedgerAgainstModel = LedgerAgainstModel.TestCase
TestLedgerAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
