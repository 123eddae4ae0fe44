"""The prefix index against a plain model: a list of prefixes in the order of their last use."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplet_core.errors import InvariantError
from duplet_core.ids import TransferId
from duplet_core.prefix import Match
from duplet_pages.prefix import RadixIndex

PAGE_ROWS = 2
COLUMNS = 2
ROW_A, ROW_B, ROW_C = (bytes([n]) + bytes(7) for n in b"abc")
A, B = TransferId("a"), TransferId("b")


def digest(prefix: bytes) -> bytes:
    """What stands for a page: it depends on all rows up to the page's end."""
    return b"d:" + prefix


def rows(text: str) -> bytes:
    """A row a letter."""
    return b"".join({"a": ROW_A, "b": ROW_B, "c": ROW_C}[letter] for letter in text)


def known(*prompts: tuple[str, tuple[int, ...]]) -> RadixIndex:
    """An index that knows these prompts' whole pages, in these pages of the pool."""
    index = RadixIndex(PAGE_ROWS, COLUMNS)
    for number, (text, pages) in enumerate(prompts):
        owner = TransferId(f"owner-{number}")
        index.begin(owner, rows(text), pages)
        ends = range(PAGE_ROWS, len(text) + 1, PAGE_ROWS)
        index.computed(owner, tuple(digest(rows(text[:end])) for end in ends))
        index.abandon(owner)
    return index


# --- single facts -------------------------------------------------------------------


def test_a_page_can_be_matched_once_it_is_computed() -> None:
    index = RadixIndex(PAGE_ROWS, COLUMNS)
    prompt = rows("aabb")
    assert index.match(prompt, 2) == Match()
    index.begin(A, prompt, (7, 3))
    assert index.match(prompt, 2) == Match(pending=True)
    assert index.computed(A, (b"1",)) == (7,)
    assert index.match(prompt, 2) == Match((7,), (b"1",), pending=True)
    assert index.computed(A, (b"1", b"2")) == (3,)
    assert index.match(prompt, 2) == Match((7, 3), (b"1", b"2"))
    assert len(index) == 2


def test_an_edited_transcript_shares_exactly_the_equal_whole_pages() -> None:
    index = known(("aabbaacc", (0, 1, 2, 3)))
    for text, shared in [
        ("aabbaacc", (0, 1, 2, 3)),
        ("aabbaacb", (0, 1, 2)),  # the edit is in the last row of a page
        ("aabbabcc", (0, 1)),
        ("abbbaacc", ()),
        ("aabba", (0, 1)),  # half a page is no page
        ("aabbaaccaa", (0, 1, 2, 3)),
    ]:
        assert index.match(rows(text), 9).pages == shared, text


def test_every_column_counts() -> None:
    index = known(("aa", (0,)))
    for at in range(2 * COLUMNS * 4):
        prompt = bytearray(rows("aa"))
        prompt[at] ^= 1
        assert index.match(bytes(prompt), 1) == Match(), f"byte {at}"


def test_the_same_page_behind_another_beginning_is_another_page() -> None:
    index = known(("aabb", (0, 1)), ("ccbb", (2, 3)))
    assert index.match(rows("aabb"), 2).pages == (0, 1)
    assert index.match(rows("ccbb"), 2).pages == (2, 3)
    assert index.match(rows("bb"), 1) == Match()


def test_no_more_is_matched_than_is_asked_for() -> None:
    index = known(("aabb", (0, 1)))
    assert index.match(rows("aabb"), 1) == Match((0,), (digest(rows("aa")),))
    assert index.match(rows("aabb"), 0) == Match()


def test_a_prompt_that_ends_at_a_known_page_computes_it_anew_and_keeps_the_old_one() -> None:
    index = known(("aabb", (0, 1)))
    index.begin(A, rows("aabb"), (0, 9))
    assert index.computed(A, (b"x", b"y")) == ()
    assert index.match(rows("aabb"), 2).pages == (0, 1)
    index.abandon(A)
    assert len(index) == 2


def test_what_its_owner_abandons_is_forgotten_and_what_is_computed_stays() -> None:
    index = RadixIndex(PAGE_ROWS, COLUMNS)
    index.begin(A, rows("aabbcc"), (0, 1, 2))
    index.computed(A, (b"1",))
    index.abandon(A)
    index.abandon(A)
    assert index.match(rows("aabbcc"), 3) == Match((0,), (b"1",))
    assert index.computed(A, (b"1", b"2", b"3")) == (), "a late word of an ended owner"
    index.begin(B, rows("aabb"), (0, 5))
    assert index.computed(B, (b"1", b"5")) == (5,)


def test_an_owner_begins_once() -> None:
    index = known()
    index.begin(A, rows("aa"), (0,))
    with pytest.raises(InvariantError):
        index.begin(A, rows("bb"), (1,))


def test_the_least_recently_used_page_goes_first_and_leaves_before_its_parent() -> None:
    index = known(("aabb", (0, 1)), ("cc", (2,)))
    assert index.evict(1, lambda page: False) == (1,)
    index.match(rows("aa"), 1)
    assert index.evict(2, lambda page: False) == (2, 0)
    assert len(index) == 0
    assert index.evict(1, lambda page: False) == ()


def test_pages_in_use_are_passed_over() -> None:
    index = known(("aabb", (0, 1)), ("cc", (2,)))
    assert index.evict(3, lambda page: page in (0, 1)) == (2,)
    assert index.match(rows("aabb"), 2).pages == (0, 1)


# --- random histories ------------------------------------------------------------------

POOL = 8
PROMPTS = st.text("ab", min_size=1, max_size=5 * PAGE_ROWS)


@dataclass
class Owner:
    prompt: bytes
    pages: list[int]
    """All it holds, in row order."""
    mine: list[bytes] = field(default_factory=list)
    """Prefixes of which it is the one that computes them."""
    done: int = 0


class IndexAgainstModel(RuleBasedStateMachine):
    """The machine's part: it allocates, computes, abandons and evicts as prefill does."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(PAGE_ROWS, COLUMNS)
        self.page_of: dict[bytes, int] = {}
        self.used: list[bytes] = []
        """Computed prefixes, least recently used first."""
        self.pending: dict[bytes, TransferId] = {}
        self.owners: dict[TransferId, Owner] = {}
        self.count = 0

    # the plain model

    def prefixes(self, prompt: bytes, most: int) -> list[bytes]:
        size = PAGE_ROWS * COLUMNS * 4
        return [prompt[: (i + 1) * size] for i in range(min(most, len(prompt) // size))]

    def touch(self, path: list[bytes]) -> None:
        for prefix in reversed(path):
            self.used.remove(prefix)
            self.used.append(prefix)

    def expected_match(self, prompt: bytes, most: int) -> Match:
        path, pending = [], False
        for prefix in self.prefixes(prompt, most):
            if prefix not in self.used:
                pending = prefix in self.pending
                break
            path.append(prefix)
        self.touch(path)
        return Match(tuple(self.page_of[p] for p in path), tuple(digest(p) for p in path), pending)

    def in_use(self, page: int) -> bool:
        return any(page in owner.pages for owner in self.owners.values())

    def free(self) -> list[int]:
        cached = {self.page_of[prefix] for prefix in self.used}
        return [p for p in range(POOL) if p not in cached and not self.in_use(p)]

    def evict_checked(self, count: int, spare: tuple[int, ...] = ()) -> None:
        def in_use(page: int) -> bool:
            return page in spare or self.in_use(page)

        can_go = [p for p in self.used if not in_use(self.page_of[p])]
        expected = can_go[:count]
        assert self.index.evict(count, in_use) == tuple(self.page_of[p] for p in expected)
        for prefix in expected:
            self.used.remove(prefix)
            del self.page_of[prefix]

    # what happens

    @rule(text=PROMPTS)
    def begin(self, text: str) -> None:
        prompt = rows(text)
        most = (len(text) - 1) // PAGE_ROWS
        match = self.index.match(prompt, most)
        assert match == self.expected_match(prompt, most)
        if match.pending:
            return
        fresh = -(-len(text) // PAGE_ROWS) - len(match.pages)
        missing = fresh - len(self.free())
        if missing > 0:
            self.evict_checked(missing, match.pages)
        if fresh > len(self.free()):
            return
        self.count += 1
        name = TransferId(f"t{self.count}")
        owner = Owner(prompt, [*match.pages, *self.free()[:fresh]], done=len(match.pages))
        self.owners[name] = owner
        whole = len(text) // PAGE_ROWS
        self.index.begin(name, prompt, tuple(owner.pages[:whole]))
        for number, prefix in enumerate(self.prefixes(prompt, whole)):
            if prefix not in self.used and prefix not in self.pending:
                self.pending[prefix] = name
                self.page_of[prefix] = owner.pages[number]
                owner.mine.append(prefix)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        owner = self.owners[name]
        whole = self.prefixes(owner.prompt, POOL)
        if owner.done >= len(whole):
            return
        owner.done = data.draw(st.integers(owner.done + 1, len(whole)))
        path = whole[: owner.done]
        fresh = [p for p in path if self.pending.get(p) == name]
        got = self.index.computed(name, tuple(digest(p) for p in path))
        assert got == tuple(self.page_of[p] for p in fresh)
        for prefix in fresh:
            del self.pending[prefix]
            self.used.append(prefix)
        self.touch([p for p in path if self.page_of.get(p) in owner.pages])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """The owner is done, or was cancelled half-way."""
        name = data.draw(st.sampled_from(sorted(self.owners)))
        owner = self.owners.pop(name)
        self.index.abandon(name)
        for prefix in owner.mine:
            if self.pending.get(prefix) == name:
                del self.pending[prefix]
                del self.page_of[prefix]

    @rule(count=st.integers(0, POOL))
    def evict(self, count: int) -> None:
        self.evict_checked(count)

    @rule(text=PROMPTS, most=st.integers(0, 6))
    def look(self, text: str, most: int) -> None:
        assert self.index.match(rows(text), most) == self.expected_match(rows(text), most)

    @invariant()
    def sizes_agree(self) -> None:
        assert len(self.index) == len(self.used) <= POOL

    @invariant()
    def a_known_page_has_its_parents(self) -> None:
        size = PAGE_ROWS * COLUMNS * 4
        assert all(len(p) == size or p[:-size] in self.used for p in self.used)


IndexAgainstModel.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
TestIndexAgainstModel = IndexAgainstModel.TestCase
