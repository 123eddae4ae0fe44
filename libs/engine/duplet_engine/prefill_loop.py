"""Prefill's loop: prompts in, chunk by chunk, in turns.

A step is one chunk of one prompt, and prompts take turns: a short one that arrives behind a
long one waits for one chunk of it, not for all. Prompts of equal length still finish in
arrival order.
"""

from __future__ import annotations

import time
from collections import deque

from torch import Tensor

from duplet_core.engine import (
    ChunkDone,
    SeqFailed,
    Shutdown,
    Start,
    Stop,
    Stopped,
    ToEngine,
    Verify,
)
from duplet_core.errors import InvalidInput, require
from duplet_engine.engine import Engine
from duplet_engine.link import Link
from duplet_engine.sequences import PrefillSequence, open_prefill
from duplet_memory.digest import page_digests


def run_prefill(engine: Engine, link: Link) -> None:
    """Serve until Shutdown. Blocks on the link while there is nothing to compute."""
    loop = PrefillLoop(engine, link)
    while loop.receive():
        loop.step()


class PrefillLoop:
    """The prompts that are open. Its turns hold each of them once; the I/O process bounds
    them, for each holds pages."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._turns: deque[PrefillSequence] = deque()

    @property
    def busy(self) -> bool:
        """Whether a prompt is open."""
        return bool(self._turns)

    def receive(self) -> bool:
        """Take the messages that wait; with nothing to do, wait for one. False at Shutdown."""
        messages = self._link.poll() if self.busy else self._link.wait()
        return all(self.handle(message) for message in messages)

    def step(self) -> None:
        """Compute the next chunk of the prompt whose turn it is, if there is one."""
        if not self._turns:
            return
        sequence = self._turns.popleft()
        first, started_ns = sequence.done_rows, time.monotonic_ns()
        sequence.started_ns = sequence.started_ns or started_ns
        try:
            row = self._engine.prefill_chunk(sequence)
        except InvalidInput as error:
            self._fail(sequence.start.seq, error)
            return
        self._link.send(self._chunk_done(sequence, first, row, time.monotonic_ns()))
        if row is None:
            self._turns.append(sequence)

    def handle(self, message: ToEngine) -> bool:
        """Take one message. False at Shutdown."""
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Start):
            self._open(message)
        elif isinstance(message, Stop):
            self._stop(message.seq)
        else:
            require(not isinstance(message, Verify), "Verify is for decode's engine")
        return True

    def _open(self, start: Start) -> None:
        seq, c = start.seq, self._engine.config
        require(all(s.start.seq != seq for s in self._turns), f"seq {seq} is started twice")
        try:
            sequence = open_prefill(self._engine.model_config, start, c.page_rows, c.pool_pages)
        except InvalidInput as error:
            self._fail(seq, error)
            return
        self._turns.append(sequence)

    def _stop(self, seq: int) -> None:
        left = [s for s in self._turns if s.start.seq != seq]
        if len(left) < len(self._turns):
            self._turns = deque(left)
            self._link.send(Stopped(seq, kv_ok=None))

    def _fail(self, seq: int, error: InvalidInput) -> None:
        self._link.send(SeqFailed(seq, error.detail))
        self._link.send(Stopped(seq, kv_ok=None))

    def _chunk_done(
        self, sequence: PrefillSequence, first: int, row: Tensor | None, drawn_ns: int
    ) -> ChunkDone:
        """Report rows [first, done_rows) with digests of the pages that are complete now."""
        done, page_rows = sequence.done_rows, self._engine.config.page_rows
        from_page = first // page_rows
        rows = done if row is not None else done // page_rows * page_rows
        count = rows - from_page * page_rows
        digests: tuple[bytes, ...] = ()
        if count > 0:
            pages = sequence.start.pages[from_page : -(-rows // page_rows)]
            digests = page_digests(self._engine.pool, pages, count)
        return ChunkDone(
            seq=sequence.start.seq,
            rows=done,
            digests=digests,
            first_row=None if row is None else row.numpy().astype("<i4").tobytes(),
            stopped=row is not None and int(row[0]) == self._engine.model_config.stop_id,
            started_ns=sequence.started_ns,
            done_ns=time.monotonic_ns(),
            computed_ns=sequence.computed_ns or drawn_ns,
            drawn_ns=drawn_ns,
        )
