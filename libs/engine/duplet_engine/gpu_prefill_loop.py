"""Prefill's loop on a GPU: passes over rows of many prompts, one launched ahead of the other.

A pass takes the rows that `duplet_core.chunks` gives it. Its digests are taken beside the next
pass, and its ChunkDone goes out when both are done: only then may a copy of it start.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from duplet_core.chunks import ChunkPart, ChunkQueue
from duplet_core.engine import ChunkDone, SeqFailed, Shutdown, Start, Stop, Stopped, ToEngine
from duplet_core.errors import InvalidInput, require
from duplet_engine.link import Link
from duplet_engine.model_config import ModelConfig
from duplet_engine.sequences import PrefillSequence, open_prefill
from duplet_pages.engine_config import EngineConfig

MOST_PARTS = 8
"""Prompts of one pass, and so first rows that are drawn together."""


class PartDone(NamedTuple):
    """What a pass gave for one of its parts."""

    digests: tuple[bytes, ...]
    """Of the pages that the part completed, and of the partly filled last one of a prompt."""
    row: Tensor | None
    """int32 [columns], with a prompt's last part: the row drawn after it."""
    finite: bool
    """False where the model gave no finite numbers and nothing else here means anything."""


class PassDone(NamedTuple):
    """A pass that was read."""

    parts: tuple[PartDone, ...]
    """In the order of the pass."""
    computed_ns: int
    drawn_ns: int


class PassEngine(Protocol):
    """What the loop needs of `duplet_engine.gpu_engine.GpuEngine`."""

    config: EngineConfig
    model_config: ModelConfig

    def launch_pass(self, parts: Sequence[tuple[PrefillSequence, ChunkPart]]) -> Any: ...
    def read_pass(self, flight: Any) -> PassDone: ...


def run_prefill(engine: PassEngine, link: Link) -> None:
    """Serve until Shutdown. Blocks on the link while there is nothing to compute."""
    loop = PassLoop(engine, link, ahead=1 if engine.config.overlap else 0)
    while loop.receive():
        loop.step()


@dataclass(slots=True)
class _Open:
    """A prompt between its Start and its last ChunkDone or Stopped."""

    sequence: PrefillSequence
    last_pass: int = -1
    """The last launched pass that names its pages."""
    ended: bool = False
    """Nothing of it goes out any more but Stopped, when `last_pass` is read."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched pass."""

    number: int
    parts: tuple[ChunkPart, ...]
    flight: Any


class PassLoop:
    """The open prompts, bounded by the I/O process, for each holds pages; the rows that wait;
    the passes in flight."""

    def __init__(self, engine: PassEngine, link: Link, ahead: int) -> None:
        """`ahead`: passes that are launched before the oldest one is read."""
        c = engine.config
        self._engine = engine
        self._link = link
        self._ahead = ahead
        self._queue = ChunkQueue(c.chunk_rows, c.page_rows, MOST_PARTS)
        self._open: dict[int, _Open] = {}
        self._flights: deque[_InFlight] = deque()  # at most ahead + 1
        self._launched = 0

    @property
    def busy(self) -> bool:
        """Whether rows wait or a pass is in flight."""
        return bool(self._queue or self._flights)

    def receive(self) -> bool:
        """Take the messages that wait; with nothing to do, wait for one. False at Shutdown."""
        messages = self._link.poll() if self.busy else self._link.wait()
        return all(self.handle(message) for message in messages)

    def step(self) -> None:
        """Launch a pass over what waits, and read the oldest one if it is its turn."""
        if self._queue:
            self._launch()
        if len(self._flights) > self._ahead or (self._flights and not self._queue):
            self._read_oldest()

    def handle(self, message: ToEngine) -> bool:
        """Take one message. False at Shutdown."""
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Stop):
            if message.seq in self._open:
                self._end(message.seq)
        else:
            require(False, "Verify is for decode's engine")
        return True

    def _start(self, start: Start) -> None:
        seq, c = start.seq, self._engine.config
        require(seq not in self._open, f"seq {seq} is started twice")
        try:
            sequence = open_prefill(self._engine.model_config, start, c.page_rows, c.pool_pages)
        except InvalidInput as error:
            self._link.send(SeqFailed(seq, error.detail))
            self._link.send(Stopped(seq, kv_ok=None))
            return
        self._open[seq] = _Open(sequence)
        self._queue.add(seq, sequence.done_rows, sequence.prompt_rows)

    def _launch(self) -> None:
        now_ns = time.monotonic_ns()
        parts = self._queue.next_pass()
        named = []
        for part in parts:
            prompt = self._open[part.seq]
            prompt.last_pass = self._launched
            prompt.sequence.started_ns = prompt.sequence.started_ns or now_ns
            named.append((prompt.sequence, part))
        flight = self._engine.launch_pass(named)
        self._flights.append(_InFlight(self._launched, parts, flight))
        self._launched += 1

    def _read_oldest(self) -> None:
        """Wait for the oldest pass; tell of its parts, then of what ended meanwhile."""
        oldest = self._flights.popleft()
        done = self._engine.read_pass(oldest.flight)
        for part, found in zip(oldest.parts, done.parts, strict=True):
            if self._open[part.seq].ended:
                continue
            if not found.finite:
                rows = f"rows {part.first} to {part.first + part.count}"
                self._link.send(SeqFailed(part.seq, f"the model gave no finite numbers in {rows}"))
                self._open[part.seq].ended = True
                self._queue.remove(part.seq)
                continue
            self._link.send(self._chunk_done(part, found, done))
            if part.last:
                del self._open[part.seq]
        for seq, prompt in list(self._open.items()):
            if prompt.ended and prompt.last_pass <= oldest.number:
                self._close(seq)

    def _chunk_done(self, part: ChunkPart, found: PartDone, done: PassDone) -> ChunkDone:
        sequence = self._open[part.seq].sequence
        sequence.done_rows = part.first + part.count
        row = found.row
        require((row is not None) == part.last, "a prompt's last part has the first row")
        return ChunkDone(
            seq=part.seq,
            rows=sequence.done_rows,
            digests=found.digests,
            first_row=None if row is None else row.numpy().astype("<i4").tobytes(),
            stopped=row is not None and int(row[0]) == self._engine.model_config.stop_id,
            started_ns=sequence.started_ns,
            done_ns=time.monotonic_ns(),
            computed_ns=done.computed_ns,
            drawn_ns=done.drawn_ns,
        )

    def _end(self, seq: int) -> None:
        """No pass that is launched from now on names the seq."""
        self._queue.remove(seq)
        prompt = self._open[seq]
        prompt.ended = True
        # Every pass before the oldest in flight is read.
        read = self._flights[0].number if self._flights else self._launched
        if prompt.last_pass < read:
            self._close(seq)

    def _close(self, seq: int) -> None:
        del self._open[seq]
        self._link.send(Stopped(seq, kv_ok=None))
