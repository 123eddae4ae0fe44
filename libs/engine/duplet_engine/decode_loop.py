"""Decode's loop: landed KV is verified, then every live stream gets one row a step."""

from __future__ import annotations

import time
from dataclasses import dataclass

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
from duplet_engine.engine import Engine
from duplet_engine.kv_damage import KvDamage
from duplet_engine.link import Link
from duplet_engine.sequences import check_pages
from duplet_memory.digest import page_digest


def run_decode(engine: Engine, link: Link) -> None:
    """Serve until Shutdown. Blocks on the link while no stream lives."""
    loop = DecodeLoop(engine, link)
    while loop.receive():
        loop.step()


@dataclass(slots=True)
class _Open:
    """A seq between its first message and its Stopped."""

    verify: Verify | None = None
    """Kept where its digests matched, for the check at the end."""
    mismatch: str = ""
    """What a Verify found wrong."""
    rows: int = 0
    """Output rows so far, the first included; 0 before Start."""
    max_rows: int = 0


class DecodeLoop:
    """The open seqs and the batch of those that are started."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._batch = engine.new_batch()
        self._open: dict[int, _Open] = {}
        self._steps = 0
        damage = engine.config.damage_pages
        self._damage = KvDamage(engine.pool, damage) if damage else None

    @property
    def busy(self) -> bool:
        """Whether a stream lives."""
        return bool(self._batch.seqs)

    def receive(self) -> bool:
        """Take the messages that wait; with no live stream, wait for one. False at Shutdown."""
        messages = self._link.poll() if self.busy else self._link.wait()
        return all(self.handle(message) for message in messages)

    def step(self) -> None:
        """One row for each live stream, if there is one; then the ends."""
        seqs = self._batch.seqs
        if not seqs:
            return
        started_ns = time.monotonic_ns()
        rows, broken = self._engine.decode_step(self._batch)
        tokens, failed = rows[:, 0].tolist(), broken.tolist()
        stop_id = self._engine.model_config.stop_id
        sent: list[int] = []
        ends: list[tuple[int, bool]] = []
        for index, seq in enumerate(seqs):
            if failed[index]:
                continue
            if tokens[index] == stop_id:
                ends.append((seq, True))
                continue
            sent.append(index)
            stream = self._open[seq]
            stream.rows += 1
            if stream.rows == stream.max_rows:
                ends.append((seq, False))
        packed = rows[sent].numpy().astype("<i4").tobytes()
        self._send_step(tuple(seqs[i] for i in sent), packed, tuple(ends), started_ns)
        for seq, _ in ends:
            self._leave(seq)
        for index, seq in enumerate(seqs):
            if failed[index]:
                self._link.send(SeqFailed(seq, "the model gave no finite numbers"))
                self._leave(seq)

    def handle(self, message: ToEngine) -> bool:
        """Take one message. False at Shutdown."""
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Verify):
            self._verify(message)
        elif isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Stop) and message.seq in self._open:
            self._leave(message.seq)
        return True

    def _verify(self, verify: Verify) -> None:
        seq, c = verify.seq, self._engine.config
        require(seq not in self._open, f"seq {seq} is verified twice")
        self._open[seq] = _Open()
        try:
            check_pages(verify.pages, verify.rows, c.page_rows, c.pool_pages)
            detail = self._compare(verify)
        except InvalidInput as error:
            self._fail(seq, error)
            return
        self._open[seq].mismatch = detail
        if not detail:
            self._open[seq].verify = verify
            if self._damage is not None:
                self._damage.strike(verify.pages[: len(verify.digests)])
        self._link.send(Verified(seq, verify.transfer, ok=not detail, detail=detail))

    def _start(self, start: Start) -> None:
        seq = start.seq
        stream = self._open.setdefault(seq, _Open())
        require(stream.rows == 0, f"seq {seq} is started twice")
        require(not stream.mismatch, f"seq {seq} is started on wrong KV: {stream.mismatch}")
        try:
            self._batch.join(start)
        except InvalidInput as error:
            self._fail(seq, error)
            return
        stream.rows, stream.max_rows = 1, start.max_rows
        if start.max_rows == 1:
            # The row from prefill is all: no step, and its KV is not needed.
            self._send_step((), b"", ((seq, False),), time.monotonic_ns())
            self._leave(seq)

    def _compare(self, verify: Verify) -> str:
        """Which page's digest differs, or nothing where all match."""
        page_rows = self._engine.config.page_rows
        wanted = -(-verify.rows // page_rows)
        if verify.rows < 1 or len(verify.digests) != wanted:
            return f"{len(verify.digests)} digests for {verify.rows} rows of {page_rows} a page"
        for index, digest in enumerate(verify.digests):
            # The prompt's rows only: its last page goes on to hold output.
            valid = min(page_rows, verify.rows - index * page_rows)
            found = page_digest(self._engine.pool, verify.pages[index], valid)
            if found != digest:
                return (
                    f"page {verify.pages[index]} (page {index} of {wanted} of the prompt, "
                    f"{valid} rows): digest {found.hex()}, expected {digest.hex()}"
                )
        return ""

    def _send_step(
        self,
        seqs: tuple[int, ...],
        rows: bytes,
        ends: tuple[tuple[int, bool], ...],
        started_ns: int,
    ) -> None:
        self._link.send(StepDone(self._steps, seqs, rows, ends, started_ns, time.monotonic_ns()))
        self._steps += 1

    def _fail(self, seq: int, error: InvalidInput) -> None:
        self._link.send(SeqFailed(seq, error.detail))
        self._leave(seq)

    def _leave(self, seq: int) -> None:
        """Close a seq. No step or check that names its pages runs after this."""
        stream = self._open.pop(seq)
        if seq in self._batch.seqs:
            self._batch.leave(seq)
        kv_ok = None
        if self._engine.config.recheck_at_end and stream.verify is not None:
            kv_ok = not self._compare(stream.verify)
        self._link.send(Stopped(seq, kv_ok))
