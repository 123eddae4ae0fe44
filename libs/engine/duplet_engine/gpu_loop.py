"""Decode's loop on a GPU, in two variants that give the same rows.

`run_normal` reads each step before it launches the next one. `run_overlap` launches step n + 1
before it has read step n, so that the GPU never waits for the host: the rows pass from step to
step on the GPU. A stream that draws its stop row in step n is then still in step n + 1, whose
row of it is dropped, and whose KV goes to the stream's own pages: they are its own until its
Stopped, which is sent when the last launched step that names them has completed. The length
limit is known beforehand, so no step goes past it.

Neither waits for a step: a turn looks whether it is done, so messages and checks are looked at
while it runs. Landed KV is checked at once, its stream is in the next step that is launched, and
its first row comes, with overlap, after the rest of the step that runs, the one queued behind it
and its own. Looking takes a core, as waiting for an event of CUDA does.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from duplet_core.engine import (
    SeqFailed,
    Shutdown,
    Start,
    StepDone,
    Stop,
    Stopped,
    ToEngine,
    Verified,
    Verify,
)
from duplet_core.errors import InvalidInput, require
from duplet_engine.gpu_checks import DigestEngine, KvChecks
from duplet_engine.link import Link
from duplet_engine.model_config import ModelConfig
from duplet_engine.sequences import check_pages
from duplet_pages.engine_config import EngineConfig


class Batch(Protocol):
    """Live streams; see `duplet_engine.gpu_batch.GpuBatch`."""

    @property
    def seqs(self) -> tuple[int, ...]: ...
    def join(self, start: Start) -> None: ...
    def leave(self, seq: int) -> None: ...


class StepEngine(DigestEngine, Protocol):
    """What the loop needs of `duplet_engine.gpu_engine.GpuEngine`."""

    config: EngineConfig
    model_config: ModelConfig

    def new_batch(self) -> Any: ...
    def launch_step(self, batch: Any) -> Any: ...
    def step_done(self, flight: Any) -> bool: ...
    def read_step(self, flight: Any) -> tuple[Tensor, Tensor]: ...


def run_normal(engine: StepEngine, link: Link) -> None:
    """Serve until Shutdown, each step read before the next. Blocks on the link when idle."""
    _run(StepLoop(engine, link, ahead=0))


def run_overlap(engine: StepEngine, link: Link) -> None:
    """Serve until Shutdown, one step launched ahead. Blocks on the link when idle."""
    _run(StepLoop(engine, link, ahead=1))


def _run(loop: StepLoop) -> None:
    while loop.receive():
        loop.step(wait=False)


@dataclass(slots=True)
class _Open:
    """A seq between its first message and its Stopped."""

    verify: Verify | None = None
    """Kept where its digests matched, for the check at the end."""
    mismatch: str = ""
    """What a Verify found wrong."""
    rows: int = 0
    """Output rows read so far, the first included; 0 before Start."""
    launched: int = 0
    """Output rows of all launched steps, the first included."""
    max_rows: int = 0
    last_step: int = -1
    """The last launched step that names its pages."""
    ended: bool = False
    """No row of it goes out any more; Stopped follows when `last_step` is read and no check
    reads its pages."""
    checking: bool = False
    """A check of its pages is in flight."""
    rechecked: bool | None = None
    """What the check at the end found."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step."""

    step: int
    seqs: tuple[int, ...]
    flight: Any
    launched_ns: int


class StepLoop:
    """The open seqs, the batch of those that are started, and the steps in flight."""

    def __init__(self, engine: StepEngine, link: Link, ahead: int) -> None:
        """`ahead`: steps that are launched before the oldest one is read."""
        self._engine = engine
        self._link = link
        self._ahead = ahead
        self._batch: Batch = engine.new_batch()
        self._open: dict[int, _Open] = {}
        self._flights: deque[_InFlight] = deque()  # at most ahead + 1
        self._checks = KvChecks(engine, engine.config.page_rows)
        self._launched = 0
        self._read = -1
        self._read_ns = 0
        self._sent = 0

    @property
    def busy(self) -> bool:
        """Whether a stream lives, or a step or a check is in flight."""
        return bool(self._batch.seqs or self._flights or self._checks)

    def receive(self) -> bool:
        """Take the messages that wait; with nothing to do, wait for one. False at Shutdown, once
        no step is in flight."""
        messages = self._link.poll() if self.busy else self._link.wait()
        if all(self.handle(message) for message in messages):
            return True
        while self._flights:
            self._read_oldest()
        return False

    def step(self, *, wait: bool = True) -> None:
        """Launch a step of the streams that live if it is its turn, read the oldest one, and
        tell of the checks that are done.

        `wait`: for the oldest step where no other may be launched before it is read, and without
        steps for the oldest check; whoever launches work of its own after every step wants that.
        Else what is not done is left for the next turn: the caller looks at its messages first.
        """
        if self._batch.seqs and len(self._flights) <= self._ahead:
            self._launch()
        if self._flights and (self._must_read() if wait else self._oldest_is_done()):
            self._read_oldest()
        idle = not self._batch.seqs and not self._flights
        for verify, detail in self._checks.take_done(wait=wait and idle):
            self._end_check(verify, detail)

    def handle(self, message: ToEngine) -> bool:
        """Take one message. False at Shutdown."""
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Verify):
            self._verify(message)
        elif isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Stop) and message.seq in self._open:
            self._end(message.seq)
        return True

    def _launch(self) -> None:
        seqs, now_ns = self._batch.seqs, time.monotonic_ns()
        flight = self._engine.launch_step(self._batch)
        self._flights.append(_InFlight(self._launched, seqs, flight, now_ns))
        for seq in seqs:
            stream = self._open[seq]
            stream.last_step = self._launched
            stream.launched += 1
            if stream.launched == stream.max_rows:
                self._batch.leave(seq)
        self._launched += 1

    def _must_read(self) -> bool:
        """Whether no step may be launched before the oldest one is read."""
        return len(self._flights) > self._ahead or not self._batch.seqs

    def _oldest_is_done(self) -> bool:
        return self._engine.step_done(self._flights[0].flight)

    def _read_oldest(self) -> None:
        """Wait for the oldest step; send its rows, then the ends."""
        step = self._flights.popleft()
        rows, broken = self._engine.read_step(step.flight)
        started_ns = max(step.launched_ns, self._read_ns)
        self._read, self._read_ns = step.step, time.monotonic_ns()
        tokens, failed = rows[:, 0].tolist(), broken.tolist()
        stop_id = self._engine.model_config.stop_id
        sent: list[int] = []
        ends: list[tuple[int, bool]] = []
        broke: list[int] = []
        for index, seq in enumerate(step.seqs):
            stream = self._open.get(seq)
            if stream is None or stream.ended:
                continue
            if failed[index]:
                broke.append(seq)
                continue
            if tokens[index] == stop_id:
                ends.append((seq, True))
                continue
            sent.append(index)
            stream.rows += 1
            if stream.rows == stream.max_rows:
                ends.append((seq, False))
        packed = rows[sent].numpy().astype("<i4").tobytes()
        self._send_step(tuple(step.seqs[i] for i in sent), packed, tuple(ends), started_ns)
        for seq, _ in ends:
            self._end(seq)
        for seq in broke:
            self._link.send(SeqFailed(seq, "the model gave no finite numbers"))
            self._end(seq)
        for seq in [s for s, stream in self._open.items() if stream.ended]:
            self._close_if_quiet(seq)

    def _verify(self, verify: Verify) -> None:
        seq, c = verify.seq, self._engine.config
        require(seq not in self._open, f"seq {seq} is verified twice")
        self._open[seq] = _Open()
        try:
            check_pages(verify.pages, verify.rows, c.page_rows, c.pool_pages)
        except InvalidInput as error:
            self._fail(seq, error)
            return
        detail = self._checks.refusal(verify)
        if detail:
            self._tell_verified(verify, detail)
            return
        self._begin_check(verify)

    def _begin_check(self, verify: Verify) -> None:
        self._open[verify.seq].checking = True
        self._checks.begin(verify)

    def _end_check(self, verify: Verify, detail: str) -> None:
        """A check is done: the first one of its seq, or with `verify` kept the one at its end.
        Of the first one nobody wants to hear after a Stop."""
        stream = self._open[verify.seq]
        stream.checking = False
        if stream.verify is not None:
            stream.rechecked = not detail
        elif not stream.ended:
            self._tell_verified(verify, detail)
        if stream.ended:
            self._close_if_quiet(verify.seq)

    def _tell_verified(self, verify: Verify, detail: str) -> None:
        stream = self._open[verify.seq]
        stream.mismatch = detail
        if not detail:
            stream.verify = verify
        self._link.send(Verified(verify.seq, verify.transfer, ok=not detail, detail=detail))

    def _start(self, start: Start) -> None:
        seq = start.seq
        stream = self._open.setdefault(seq, _Open())
        require(stream.rows == 0, f"seq {seq} is started twice")
        require(not stream.checking, f"seq {seq} is started before its KV is checked")
        require(not stream.mismatch, f"seq {seq} is started on wrong KV: {stream.mismatch}")
        try:
            self._batch.join(start)
        except InvalidInput as error:
            self._fail(seq, error)
            return
        stream.rows = stream.launched = 1
        stream.max_rows = start.max_rows
        if start.max_rows == 1:
            # The row from prefill is all: no step, and its KV is not needed.
            self._send_step((), b"", ((seq, False),), time.monotonic_ns())
            self._end(seq)

    def _send_step(
        self,
        seqs: tuple[int, ...],
        rows: bytes,
        ends: tuple[tuple[int, bool], ...],
        started_ns: int,
    ) -> None:
        self._link.send(StepDone(self._sent, seqs, rows, ends, started_ns, time.monotonic_ns()))
        self._sent += 1

    def _fail(self, seq: int, error: InvalidInput) -> None:
        self._link.send(SeqFailed(seq, error.detail))
        self._end(seq)

    def _end(self, seq: int) -> None:
        """No step that is launched from now on names the seq."""
        if seq in self._batch.seqs:
            self._batch.leave(seq)
        self._open[seq].ended = True
        self._close_if_quiet(seq)

    def _close_if_quiet(self, seq: int) -> None:
        """Say Stopped if no launched step or check that names the seq's pages is unread, and the
        check at the end, where it is wanted, is done."""
        stream = self._open[seq]
        if stream.last_step > self._read or stream.checking:
            return
        recheck = self._engine.config.recheck_at_end and stream.verify is not None
        if recheck and stream.rechecked is None:
            assert stream.verify is not None
            self._begin_check(stream.verify)
            return
        del self._open[seq]
        self._link.send(Stopped(seq, stream.rechecked))
