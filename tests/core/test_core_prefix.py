"""Prefill's machine with the prefix index: who computes, who waits, which pages are shared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplet_core import engine
from duplet_core.effects import Effect, Event, InstanceDied
from duplet_core.errors import Reason
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.messages import End, Move, Prefill, SourceReleased
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_state import PrefillConfig, State
from duplet_pages.prefix import RadixIndex
from tests.core.drivers import Driver
from tests.core.samples import PREFILL1, SAMPLING, SPEC, counted, sent, to_engine

PAGE_ROWS = 2
ROW_BYTES = 4
FIRST_ROW = b"next"


def rows(text: str) -> bytes:
    """A row a letter."""
    return b"".join(letter.encode() + bytes(3) for letter in text)


def digest(prefix: bytes) -> bytes:
    """A page's digest depends on all rows up to the page's end."""
    return b"digest of " + prefix


@dataclass
class Sequence:
    """What the engine knows of a sequence."""

    start: engine.Start
    done: int
    stopping: bool = False


@dataclass
class Lent:
    """What the writer knows of a transfer."""

    writer: InstanceId
    pages: dict[int, bytes] = field(default_factory=dict)
    """Lent pages, and what each held when it was lent."""


class Bench(Driver[PrefillMachine]):
    """A machine, an engine that computes on demand, a writer that reads until it is told.

    Owns what each page of the pool really holds, as the rows from the prompt's beginning to the
    page's last computed row, for KV depends on all of them.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.content: dict[int, bytes] = {}
        self.sequences: dict[int, Sequence] = {}
        self.lent: dict[TransferId, Lent] = {}
        self.computed_rows = 0
        self.started: list[bytes] = []
        """Prompts in the order in which they were started."""
        self.transfers = 0
        self.writers = 1
        config = PrefillConfig(pages=pages, page_rows=PAGE_ROWS, spec=SPEC)
        super().__init__(PrefillMachine(PREFILL1, config, RadixIndex(PAGE_ROWS, 1)))
        self.connect(Role.KVPROXY, self.writer)
        self.connect(Role.LB)

    @property
    def jobs(self) -> dict[TransferId, object]:
        return dict(self.machine.jobs.by_transfer)

    @property
    def writer(self) -> InstanceId:
        return InstanceId(f"writer-{self.writers}")

    def feed(self, event: Event) -> list[Effect]:
        effects = super().feed(event)
        for message in to_engine(effects):
            self.obey(message)
        for said in sent(effects, Role.KVPROXY):
            if isinstance(said, Move):
                self.lend(said)
        self.check()
        return effects

    # --- the engine ------------------------------------------------------------

    def obey(self, message: engine.ToEngine) -> None:
        if isinstance(message, engine.Stop):
            if message.seq in self.sequences:
                self.sequences[message.seq].stopping = True
            return
        assert isinstance(message, engine.Start)
        assert message.start_row % PAGE_ROWS == 0
        assert message.start_row < len(message.rows) // ROW_BYTES, "the last row is computed"
        shared = message.start_row // PAGE_ROWS
        for number, page in enumerate(message.pages[:shared]):
            end = (number + 1) * PAGE_ROWS * ROW_BYTES
            assert self.content[page] == message.rows[:end], "a shared page holds other rows"
        for page in message.pages[shared:]:
            assert all(page not in lent.pages for lent in self.lent.values()), "still read"
            for other in self.sequences.values():
                assert page not in other.start.pages, "still computed"
            self.content[page] = b""
        self.sequences[message.seq] = Sequence(message, message.start_row)
        self.started.append(message.rows)

    def compute(self, seq: int, count: int) -> list[Effect]:
        """The engine's next chunk: `count` rows, or what is left."""
        sequence = self.sequences[seq]
        prompt, pages = sequence.start.rows, sequence.start.pages
        total = len(prompt) // ROW_BYTES
        first = sequence.done
        sequence.done = min(first + count, total)
        self.computed_rows += sequence.done - first
        for page in range(first // PAGE_ROWS, -(-sequence.done // PAGE_ROWS)):
            end = min((page + 1) * PAGE_ROWS, sequence.done)
            self.content[pages[page]] = prompt[: end * ROW_BYTES]
        last = sequence.done == total
        done_pages = -(-total // PAGE_ROWS) if last else sequence.done // PAGE_ROWS
        ends = [min((n + 1) * PAGE_ROWS, total) for n in range(first // PAGE_ROWS, done_pages)]
        digests = tuple(digest(prompt[: end * ROW_BYTES]) for end in ends)
        if last:
            del self.sequences[seq]
        row = FIRST_ROW if last else None
        return self.say(engine.ChunkDone(seq, sequence.done, digests, row, False, 1, 2))

    def finish(self, seq: int) -> None:
        """Compute the rest, or answer a Stop."""
        if self.sequences[seq].stopping:
            del self.sequences[seq]
            self.say(engine.Stopped(seq, None))
        else:
            self.compute(seq, 10**6)

    # --- the writer --------------------------------------------------------------

    def lend(self, move: Move) -> None:
        lent = self.lent.setdefault(move.transfer, Lent(self.writer))
        end = move.start_row + move.count
        for number, page in enumerate(move.pages, move.start_row // PAGE_ROWS):
            held = self.content[page]
            assert len(held) == min((number + 1) * PAGE_ROWS, end) * ROW_BYTES
            lent.pages[page] = held
        if move.handoff is not None:
            prompt = max(lent.pages.values(), key=len)
            ends = range(PAGE_ROWS, end + PAGE_ROWS, PAGE_ROWS)
            expected = tuple(digest(prompt[: min(e, end) * ROW_BYTES]) for e in ends)
            assert move.handoff.digests == expected, "the digests are not the prompt's"

    def release(self, transfer: TransferId) -> None:
        """The writer has read all; nothing that it read changed meanwhile."""
        for page, held in self.lent.pop(transfer).pages.items():
            assert self.content[page].startswith(held), "a lent page was overwritten"
        self.hear(Role.KVPROXY, SourceReleased(transfer, landed=False))

    # --- lb ------------------------------------------------------------------------

    def ask(self, text: str) -> TransferId:
        self.transfers += 1
        transfer = TransferId(f"t{self.transfers}")
        self.hear(Role.LB, Prefill(transfer, transfer, rows(text), len(text), SAMPLING))
        return transfer

    def cancel(self, transfer: TransferId) -> list[Effect]:
        return self.hear(Role.LB, End(transfer, transfer, Reason.CANCELLED))

    def state(self, transfer: TransferId) -> State | None:
        job = self.machine.jobs.by_transfer.get(transfer)
        return None if job is None else job.state

    # --- what always holds -----------------------------------------------------------

    def check(self) -> None:
        """Conservation: every hold is a transfer's or the index's, and of nobody else."""
        jobs = self.machine.jobs
        jobs.pages.check()
        holds = Counter(page for job in jobs.by_transfer.values() for page in job.pages)
        cached = 0
        for page in range(self.pages):
            extra = jobs.pages.holds(page) - holds[page]
            assert extra in (0, 1), f"page {page} has {extra} holds of nobody"
            cached += extra
        assert cached == len(jobs.index)

    def run_dry(self) -> None:
        """Everybody does what is due, until nothing is left: nobody waits for ever."""
        if self.machine.links[Role.KVPROXY].current is None:
            self.connect(Role.KVPROXY, self.writer)
        for _ in range(1000):
            if self.sequences:
                self.finish(min(self.sequences))
            elif self.lent:
                self.release(min(self.lent))
            else:
                break
        left = self.machine.jobs
        assert not left.by_transfer and not left.queue, "a transfer waits for ever"
        assert left.pages.free + len(left.index) == self.pages


VOICE = "voice-of-one-speaker"
assert len(VOICE) % PAGE_ROWS == 0


def test_sixteen_requests_for_a_cold_voice_compute_it_once() -> None:
    bench = Bench(pages=400)
    texts = [VOICE + f"{n:x}{n:x}" * 3 for n in range(16)]
    for text in texts:
        bench.ask(text)
    assert len(bench.sequences) == 1, "the others step aside"
    bench.compute(1, len(VOICE))
    assert len(bench.sequences) == 16, "all go on as soon as the voice is computed"
    assert bench.started == [rows(text) for text in texts], "in the order of their arrival"
    bench.run_dry()
    assert bench.computed_rows == len(VOICE) + 16 * 6


def test_others_go_on_when_the_one_that_computes_is_cancelled_half_way() -> None:
    bench = Bench(pages=400)
    first, *others = (bench.ask(VOICE + letter * 3) for letter in "abcd")
    bench.compute(1, 10)
    effects = bench.cancel(first)
    assert counted(effects, "cached_rows") == 10, "what is computed is kept"
    assert [bench.state(t) for t in others] == [State.COMPUTING, State.QUEUED, State.QUEUED]
    bench.run_dry()
    assert bench.computed_rows == len(VOICE) + 3 * 3


def test_others_go_on_when_the_engine_fails_the_one_that_computes() -> None:
    bench = Bench(pages=400)
    bench.ask(VOICE + "a")
    other = bench.ask(VOICE + "b")
    del bench.sequences[1]
    bench.say(engine.SeqFailed(1, "no"))
    assert bench.state(other) is State.COMPUTING
    bench.say(engine.Stopped(1, None))
    bench.run_dry()


def test_others_go_on_when_the_writer_of_the_one_that_computes_dies() -> None:
    bench = Bench(pages=400)
    first, other = bench.ask(VOICE + "a"), bench.ask(VOICE + "b")
    bench.compute(1, 4)
    bench.lose(Role.KVPROXY)
    assert (bench.state(first), bench.state(other)) == (State.STOPPING, State.COMPUTING)
    bench.feed(InstanceDied(Role.KVPROXY, bench.writer))
    bench.lent.clear()
    bench.writers += 1
    bench.connect(Role.KVPROXY, bench.writer)
    bench.run_dry()


def test_one_that_steps_aside_keeps_its_place() -> None:
    bench = Bench(pages=400)
    bench.ask(VOICE + "a")
    aside = bench.ask(VOICE + "b")
    stranger = bench.ask("somebody else")
    assert (bench.state(aside), bench.state(stranger)) == (State.QUEUED, State.COMPUTING)
    assert [job.transfer for job in bench.machine.jobs.queue] == [aside]
    bench.run_dry()


def test_one_that_steps_aside_can_be_cancelled() -> None:
    bench = Bench(pages=400)
    bench.ask(VOICE + "a")
    aside = bench.ask(VOICE + "b")
    bench.cancel(aside)
    assert bench.state(aside) is None
    bench.run_dry()
    assert len(bench.started) == 1


def test_the_same_prompt_again_computes_its_last_page_only() -> None:
    bench = Bench(pages=400)
    for _ in range(3):
        bench.ask(VOICE)
        bench.run_dry()
    assert bench.computed_rows == len(VOICE) + 2 * PAGE_ROWS
    assert len(bench.machine.jobs.index) == len(VOICE) // PAGE_ROWS


def test_a_full_cache_makes_room_and_forgets_the_oldest_voice_first() -> None:
    bench = Bench(pages=12)
    for voice in "abc":
        bench.ask(voice * 8)  # four pages each
        bench.run_dry()
    assert bench.machine.jobs.pages.free == 0
    bench.ask("a" * 8)  # a's voice is used
    bench.run_dry()
    before = bench.computed_rows
    bench.ask("d" * 8)
    bench.run_dry()
    bench.ask("a" * 7)
    bench.run_dry()
    assert bench.computed_rows - before == 8 + 1, "a was kept"
    bench.ask("b" * 8)
    bench.run_dry()
    assert bench.computed_rows - before == 8 + 1 + 8, "b was forgotten"


def test_pages_in_use_are_not_evicted_for_the_next_one() -> None:
    bench = Bench(pages=8)
    held = bench.ask("a" * 12)
    bench.compute(1, 100)
    waits = bench.ask("b" * 8)
    assert bench.state(waits) is State.QUEUED
    bench.release(held)
    assert bench.state(waits) is State.COMPUTING
    bench.run_dry()


# --- random histories -------------------------------------------------------------------

PROMPTS = st.builds(
    lambda voice, text: voice + text,
    st.sampled_from(["", "aa", "aabb", "aabbcc", "bbbb"]),
    st.text("ab", min_size=1, max_size=6),
)


class PrefixHistories(RuleBasedStateMachine):
    """Arrivals, chunks, cancels, late writers and lost ones in any order, in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(pages=10)

    @rule(text=PROMPTS)
    def ask(self, text: str) -> None:
        self.bench.ask(text)

    @precondition(lambda self: self.bench.sequences)
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        self.bench.compute(data.draw(st.sampled_from(sorted(self.bench.sequences))), count)

    @precondition(lambda self: any(s.stopping for s in self.bench.sequences.values()))
    @rule()
    def stop(self) -> None:
        self.bench.finish(min(n for n, s in self.bench.sequences.items() if s.stopping))

    @precondition(lambda self: self.bench.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.cancel(data.draw(st.sampled_from(sorted(self.bench.jobs))))

    @precondition(lambda self: self.bench.lent and self.connected)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.bench.release(data.draw(st.sampled_from(sorted(self.bench.lent))))

    @property
    def connected(self) -> bool:
        return self.bench.machine.links[Role.KVPROXY].current is not None

    @precondition(lambda self: self.connected)
    @rule()
    def lose_writer(self) -> None:
        self.bench.lose(Role.KVPROXY)

    @precondition(lambda self: not self.connected)
    @rule()
    def reconnect(self) -> None:
        self.bench.connect(Role.KVPROXY, self.bench.writer)

    @rule()
    def bury_writer(self) -> None:
        self.bench.lent.clear()
        self.bench.feed(InstanceDied(Role.KVPROXY, self.bench.writer))
        self.bench.writers += 1
        self.bench.connect(Role.KVPROXY, self.bench.writer)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.bench.machine.jobs.index) <= self.bench.pages

    def teardown(self) -> None:
        self.bench.run_dry()


PrefixHistories.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestPrefixHistories = PrefixHistories.TestCase
