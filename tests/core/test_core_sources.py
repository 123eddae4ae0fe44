"""Prefill's pages: a page is free exactly when nobody holds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duplet_core.errors import InvariantError
from duplet_core.ids import TransferId
from duplet_core.sources import SourcePages
from tests.core.samples import T1, T2, T3

PAGES = 8


def test_pages_are_held_and_come_back_in_the_same_order() -> None:
    pages = SourcePages(PAGES)
    assert pages.hold(T1, 3) == (0, 1, 2)
    assert pages.pages_of(T1) == (0, 1, 2)
    assert pages.free == 5
    pages.release(T1)
    assert pages.free == PAGES
    assert pages.hold(T2, 3) == (0, 1, 2)
    pages.check()


def test_too_few_free_pages_hold_nothing() -> None:
    pages = SourcePages(PAGES)
    pages.hold(T1, 6)
    assert pages.hold(T2, 3) is None
    assert pages.free == 2
    with pytest.raises(InvariantError):
        pages.release(T2)


def test_a_shared_page_is_free_when_its_last_reader_is_done() -> None:
    pages = SourcePages(PAGES)
    pages.hold(T1, 2)
    assert pages.hold(T2, 1, shared=(0, 1)) == (0, 1, 2)
    pages.release(T1)
    assert [pages.holds(p) for p in (0, 1, 2)] == [1, 1, 1]
    assert pages.free == 5
    pages.release(T2)
    assert pages.free == PAGES


def test_a_cached_page_outlives_its_transfer_until_it_is_evicted() -> None:
    pages = SourcePages(PAGES)
    pages.hold(T1, 2)
    pages.retain(1)
    pages.release(T1)
    assert pages.free == PAGES - 1
    assert pages.hold(T2, 0, shared=(1,)) == (1,)
    pages.release_page(1)
    assert pages.free == PAGES - 1, "a transfer still reads it"
    pages.release(T2)
    assert pages.free == PAGES
    pages.check()


def test_ends_and_shares_without_a_hold_are_refused() -> None:
    pages = SourcePages(PAGES)
    pages.hold(T1, 2)
    acts: tuple[Callable[[], object], ...] = (
        lambda: pages.hold(T1, 1),
        lambda: pages.hold(T2, 0, shared=(5,)),
        lambda: pages.retain(5),
        lambda: pages.release_page(5),
        lambda: pages.release(T3),
        lambda: pages.pages_of(T3),
    )
    for act in acts:
        with pytest.raises(InvariantError):
            act()
    pages.release(T1)
    with pytest.raises(InvariantError):
        pages.release(T1)


class SourcesAgainstModel(RuleBasedStateMachine):
    """Random holds, shares, caching and eviction against a plain count of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = SourcePages(PAGES)
        self.held: dict[TransferId, tuple[int, ...]] = {}
        self.cached: list[int] = []

    def holders(self, page: int) -> int:
        return sum(page in pages for pages in self.held.values()) + self.cached.count(page)

    @rule(name=st.integers(0, 5), fresh=st.integers(0, PAGES), share=st.integers(0, 3))
    def hold(self, name: int, fresh: int, share: int) -> None:
        transfer = TransferId(f"t{name}")
        shared = tuple(dict.fromkeys(self.cached))[:share]
        if transfer in self.held:
            with pytest.raises(InvariantError):
                self.pages.hold(transfer, fresh, shared)
            return
        free = [p for p in range(PAGES) if self.holders(p) == 0]
        got = self.pages.hold(transfer, fresh, shared)
        if fresh > len(free):
            assert got is None
            return
        assert got is not None and got[: len(shared)] == shared
        assert len(got) == len(shared) + fresh and set(got[len(shared) :]) <= set(free)
        self.held[transfer] = got

    @rule(name=st.integers(0, 5))
    def release(self, name: int) -> None:
        transfer = TransferId(f"t{name}")
        if self.held.pop(transfer, None) is None:
            with pytest.raises(InvariantError):
                self.pages.release(transfer)
        else:
            self.pages.release(transfer)

    @rule(page=st.integers(0, PAGES - 1))
    def retain(self, page: int) -> None:
        if self.holders(page) == 0:
            with pytest.raises(InvariantError):
                self.pages.retain(page)
        else:
            self.pages.retain(page)
            self.cached.append(page)

    @rule(page=st.integers(0, PAGES - 1))
    def evict(self, page: int) -> None:
        if page in self.cached:
            self.cached.remove(page)
            self.pages.release_page(page)

    @invariant()
    def holds_are_counted(self) -> None:
        self.pages.check()
        for page in range(PAGES):
            assert self.pages.holds(page) == self.holders(page)
        assert self.pages.free == sum(self.holders(p) == 0 for p in range(PAGES))


TestSourcesAgainstModel = SourcesAgainstModel.TestCase
TestSourcesAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
