"""Models of the two engine processes: they keep the contract of `duplet_core.engine`, no more.

A queued message is not seen until it is taken, so a step that was launched before the I/O
process asked to stop still writes its pages. They reach their pages through `Pool` only, which
has the checkers at its door.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from duplet_core.engine import (
    ChunkDone,
    FromEngine,
    SeqFailed,
    Start,
    StepDone,
    Stop,
    Stopped,
    ToEngine,
    Verified,
    Verify,
)
from duplet_sim import content
from duplet_sim.content import Rows

if TYPE_CHECKING:
    from duplet_sim.pool import Pool


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt in prefill's engine."""

    seq: int
    pages: tuple[int, ...]
    tags: Rows
    """What its rows are in truth."""
    stops_at_once: bool
    computed: int
    """Rows whose KV is in the pages; those of a known prefix are from the beginning."""


class PrefillEngine:
    """Computes prompts a chunk at a time: the oldest, or the one that `turn` says."""

    __slots__ = ("chunk_rows", "inbox", "jobs", "turn")

    def __init__(self, chunk_rows: int) -> None:
        self.chunk_rows = chunk_rows
        self.turn = 0
        """Which of its jobs gets the next chunk, counted from the oldest."""
        self.inbox: list[ToEngine] = []
        self.jobs: list[Job] = []

    def copy(self) -> PrefillEngine:
        other = PrefillEngine(self.chunk_rows)
        other.inbox = list(self.inbox)
        other.jobs = list(self.jobs)
        return other

    def key(self) -> Hashable:
        return (tuple(self.inbox), tuple(self.jobs))

    @property
    def idle(self) -> bool:
        return not self.inbox and not self.jobs

    def take(self) -> list[FromEngine]:
        """See the next queued message."""
        message = self.inbox.pop(0)
        if isinstance(message, Start):
            tags, stops = content.unpack_prompt(message.rows)
            self.jobs.append(Job(message.seq, message.pages, tags, stops, message.start_row))
        elif isinstance(message, Stop):
            for index, job in enumerate(self.jobs):
                if job.seq == message.seq:
                    del self.jobs[index]
                    return [Stopped(job.seq, None)]
        return []

    def fail(self) -> list[FromEngine]:
        """Cannot go on with the oldest prompt."""
        job = self.jobs.pop(0)
        return [SeqFailed(job.seq, "simulated"), Stopped(job.seq, None)]

    def compute(self, pool: Pool) -> list[FromEngine]:
        """One chunk of a prompt: written, digested, told."""
        job = self.jobs[self.turn]
        start = job.computed
        end = min(len(job.tags), start + self.chunk_rows)
        pool.attend(job.seq, job.pages, job.tags[:start])
        pool.write(job.seq, job.pages, start, job.tags[start:end])
        last = end == len(job.tags)
        page_rows = pool.page_rows
        done = job.pages[start // page_rows : -(-end // page_rows) if last else end // page_rows]
        digests = pool.digests(done, end - start // page_rows * page_rows)
        first_row = content.pack_row(pool.whose(job.pages, end), 0) if last else None
        if last:
            del self.jobs[self.turn]
        else:
            self.jobs[self.turn] = replace(job, computed=end)
        self.turn = 0
        return [ChunkDone(job.seq, end, digests, first_row, last and job.stops_at_once, 0, 0)]


@dataclass(slots=True)
class Stream:
    """A sequence in decode's engine."""

    pages: tuple[int, ...]
    prompt_rows: int
    limit: int = 0
    """Most output rows; 0 until it was started."""
    stop_at: int = 0
    """Output rows before it draws the stop row; 0: never."""
    launched: int = 0
    """Steps launched so far: the next one writes row prompt_rows + launched."""
    made: int = 1
    """Output rows so far, the first included."""
    closing: bool = False
    """Stopped or ended: its steps in flight still write, nothing of it is told any more."""


class DecodeEngine:
    """Steps all streams together; step n + 1 may be launched before step n was read."""

    __slots__ = ("inbox", "open", "step", "steps", "verifying")

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.open: dict[int, Stream] = {}
        self.verifying: list[Verify] = []
        self.steps: list[tuple[tuple[int, int], ...]] = []
        """Launched and not yet read: (seq, row that the step writes)."""
        self.step = 0

    def copy(self) -> DecodeEngine:
        other = DecodeEngine()
        other.inbox = list(self.inbox)
        other.open = {seq: replace(stream) for seq, stream in self.open.items()}
        other.verifying = list(self.verifying)
        other.steps = list(self.steps)
        other.step = self.step
        return other

    def key(self) -> Hashable:
        streams = tuple(
            (seq, s.pages, s.prompt_rows, s.limit, s.stop_at, s.launched, s.made, s.closing)
            for seq, s in self.open.items()
        )
        return (tuple(self.inbox), streams, tuple(self.verifying), tuple(self.steps))

    @property
    def idle(self) -> bool:
        return not self.inbox and not self.open

    def take(self) -> list[FromEngine]:
        """See the next queued message."""
        message = self.inbox.pop(0)
        if isinstance(message, Verify):
            self.verifying.append(message)
            self.open[message.seq] = Stream(message.pages, message.rows)
        elif isinstance(message, Start):
            stream = self.open[message.seq]
            if not stream.closing:
                stream.pages = message.pages
                stream.limit = message.max_rows
                stream.stop_at = message.sampling.seed
                if message.max_rows == 1:
                    del self.open[message.seq]
                    ends = ((message.seq, False),)
                    return [StepDone(self.step, (), b"", ends, 0, 0), Stopped(message.seq, None)]
        elif isinstance(message, Stop) and message.seq in self.open:
            self.open[message.seq].closing = True
            return self._let_go()
        return []

    def verify(self, pool: Pool) -> list[FromEngine]:
        """Compare the oldest landed KV with its digests."""
        message = self.verifying.pop(0)
        ok = pool.digests(message.pages, message.rows) == message.digests
        why = "" if ok else "damaged" if pool.is_damaged(message.pages, message.rows) else "foreign"
        told: list[FromEngine] = [Verified(message.seq, message.transfer, ok, why)]
        return told + self._let_go()

    def fail(self) -> list[FromEngine]:
        """Cannot go on with the oldest sequence; its steps in flight run all the same."""
        checked = {message.seq for message in self.verifying}
        for seq, stream in self.open.items():
            if not stream.closing and (stream.limit or seq in checked):
                stream.closing = True
                self.verifying = [m for m in self.verifying if m.seq != seq]
                return [SeqFailed(seq, "simulated"), *self._let_go()]
        return []

    def can_launch(self, depth: int) -> bool:
        return len(self.steps) < depth and any(
            s.limit and not s.closing and s.launched < s.limit for s in self.open.values()
        )

    def launch(self) -> None:
        """Queue a step of all streams that are not known to have ended."""
        step = []
        for seq, stream in self.open.items():
            if stream.limit and not stream.closing and stream.launched < stream.limit:
                step.append((seq, stream.prompt_rows + stream.launched))
                stream.launched += 1
        self.steps.append(tuple(step))

    def complete(self, pool: Pool) -> list[FromEngine]:
        """The oldest launched step has run: its rows are written, the host reads it."""
        self.step += 1
        seqs, rows, ends = [], [], []
        for seq, row in self.steps.pop(0):
            stream = self.open[seq]
            pool.write(seq, stream.pages, row, (content.generated(seq, row),))
            if stream.closing:
                continue
            if stream.made == stream.stop_at:
                ends.append((seq, True))
                stream.closing = True
                continue
            seqs.append(seq)
            rows.append(content.pack_row(pool.whose(stream.pages, stream.prompt_rows), stream.made))
            stream.made += 1
            if stream.made >= stream.limit:
                ends.append((seq, False))
                stream.closing = True
        told: list[FromEngine] = []
        if seqs or ends:
            told.append(StepDone(self.step, tuple(seqs), b"".join(rows), tuple(ends), 0, 0))
        return told + self._let_go()

    def _let_go(self) -> list[FromEngine]:
        """Stopped for every closing sequence that no launched step or Verify names."""
        named = {seq for step in self.steps for seq, _ in step}
        named.update(message.seq for message in self.verifying)
        told: list[FromEngine] = []
        for seq in [s for s, stream in self.open.items() if stream.closing and s not in named]:
            del self.open[seq]
            told.append(Stopped(seq, None))
        return told


class HostEngine(DecodeEngine):
    """The monolith's engine: prompts and streams by turns, over one pool."""

    __slots__ = ("prompts",)

    def __init__(self, prompts: PrefillEngine) -> None:
        super().__init__()
        self.prompts = prompts

    @property
    def idle(self) -> bool:
        return super().idle and self.prompts.idle

    def take(self) -> list[FromEngine]:
        """See the next queued message; a prompt's Start has no output rows."""
        message = self.inbox[0]
        if isinstance(message, Start) and message.max_rows:
            self.open[message.seq] = Stream(message.pages, message.start_row)
        elif isinstance(message, Start) or message.seq not in self.open:  # type: ignore[union-attr]
            self.prompts.inbox.append(self.inbox.pop(0))
            return self.prompts.take()
        return super().take()

    def compute(self, pool: Pool) -> list[FromEngine]:
        """One chunk of the oldest prompt."""
        return self.prompts.compute(pool)

    def fail(self) -> list[FromEngine]:
        """Cannot go on with the oldest prompt or, without one, with the oldest sequence."""
        return self.prompts.fail() if self.prompts.jobs else super().fail()
