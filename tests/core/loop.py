"""The four machines wired together in memory: one queue, messages in order, true page contents.

The pools' contents are kept apart from the machines: a copy moves what the source page truly
holds, and is checked against decode's ledger when it writes. Copies and engine work wait in
lists of their own, so that a test decides when they are done.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from duplet_core import engine
from duplet_core.decode import DecodeMachine
from duplet_core.decode_state import DecodeConfig
from duplet_core.effects import (
    Close,
    CopyDone,
    CopyResult,
    Effect,
    Ended,
    Event,
    Exit,
    FromEngineEvent,
    InstanceDied,
    LifelineUp,
    Received,
    Rows,
    Send,
    StartCopy,
    StreamClosed,
    StreamOpened,
    ToEngineEffect,
)
from duplet_core.front import FrontMachine
from duplet_core.front_state import FrontConfig
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.ledger import PageState
from duplet_core.machine import Machine
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer import WriterMachine
from duplet_core.writer_state import WriterConfig
from tests.core.samples import PAGE_ROWS, ROW, SPEC

DIALED = {
    (Role.LB, Role.PREFILL),
    (Role.LB, Role.DECODE),
    (Role.PREFILL, Role.KVPROXY),
    (Role.DECODE, Role.KVPROXY),
}
PAGES = 12
Cell = tuple[bytes, int]
"""What a row's KV stands for: the prompt and the row's position."""


class PrefillEngine:
    """Computes six rows a chunk; owner of the source pool's contents."""

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], Cell] = {}
        self.open: dict[int, tuple[engine.Start, int]] = {}

    def take(self, message: engine.ToEngine) -> list[engine.FromEngine]:
        if isinstance(message, engine.Start):
            self.open[message.seq] = (message, 0)
        elif isinstance(message, engine.Stop) and message.seq in self.open:
            del self.open[message.seq]
            return [engine.Stopped(message.seq, None)]
        return []

    def work(self) -> list[engine.FromEngine]:
        """One chunk of the oldest sequence."""
        if not self.open:
            return []
        seq, (start, done) = next(iter(self.open.items()))
        rows = len(start.rows) // len(ROW)
        upto = min(rows, done + 6)
        for row in range(done, upto):
            cell = (start.pages[row // PAGE_ROWS], row % PAGE_ROWS)
            self.memory[cell] = (start.rows, row)
        pages = -(-upto // PAGE_ROWS) if upto == rows else upto // PAGE_ROWS
        digests = (start.rows[:16],) * (pages - done // PAGE_ROWS)
        if upto < rows:
            self.open[seq] = (start, upto)
            return [engine.ChunkDone(seq, upto, digests, None, False, 1, 2)]
        del self.open[seq]
        return [engine.ChunkDone(seq, rows, digests, ROW, False, 1, 2)]


class DecodeEngine:
    """Verifies by true contents, then makes one row a step; owner of decode's pool's contents."""

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], Cell] = {}
        self.verifying: dict[int, engine.Verify] = {}
        self.running: dict[int, list[int]] = {}
        """Rows made and rows at most, a sequence; empty lists wait for their Start."""
        self.steps = 0

    def take(self, message: engine.ToEngine) -> list[engine.FromEngine]:
        if isinstance(message, engine.Verify):
            self.verifying[message.seq] = message
        elif isinstance(message, engine.Start):
            self.running[message.seq] = [1, message.max_rows]
        elif isinstance(message, engine.Stop):
            known = self.verifying.pop(message.seq, None) or self.running.pop(message.seq, None)
            if known is not None:
                return [engine.Stopped(message.seq, None)]
        return []

    def work(self) -> list[engine.FromEngine]:
        """Every check that waits, then one step of all streams."""
        said: list[engine.FromEngine] = []
        for seq, check in self.verifying.items():
            cells = [
                self.memory.get((check.pages[row // PAGE_ROWS], row % PAGE_ROWS))
                for row in range(check.rows)
            ]
            prompt = cells[0][0] if cells[0] else b""
            good = cells == [(prompt, row) for row in range(check.rows)]
            good = good and all(digest == prompt[:16] for digest in check.digests)
            said.append(engine.Verified(seq, check.transfer, good, "contents differ"))
            self.running[seq] = []
        self.verifying.clear()
        live = [seq for seq, state in self.running.items() if state]
        if not live:
            return said
        self.steps += 1
        ends = []
        for seq in live:
            self.running[seq][0] += 1
            if self.running[seq][0] >= self.running[seq][1]:
                ends.append((seq, False))
        rows = ROW * len(live)
        said.append(engine.StepDone(self.steps, tuple(live), rows, tuple(ends), 3, 4))
        for seq, _ in ends:
            del self.running[seq]
            said.append(engine.Stopped(seq, None))
        return said


class Loop:
    """A unit of four processes. `late_copies`: copies end only when all else is idle."""

    def __init__(self, *, late_copies: bool = False) -> None:
        self.now = 1
        self.late_copies = late_copies
        self.machines: dict[Role, Machine] = {}
        self.engines: dict[Role, PrefillEngine | DecodeEngine] = {}
        self.queue: deque[tuple[Role, Event]] = deque()
        self.copies: list[StartCopy] = []
        self.streams: dict[tuple[Role, Role], int] = {}
        self.ended: dict[TransferId, Ended] = {}
        self.rows: dict[TransferId, int] = {}
        self.lives = 0
        self._last_stream = 0
        for role in (Role.KVPROXY, Role.DECODE, Role.PREFILL, Role.LB):
            self.start(role)
        self.dial()
        self.run()

    # --- processes and streams ------------------------------------------------------

    def start(self, role: Role) -> None:
        """A new life of one service."""
        self.lives += 1
        name = InstanceId(f"{role}-{self.lives}")
        if role is Role.LB:
            self.machines[role] = FrontMachine(name, FrontConfig())
        elif role is Role.PREFILL:
            self.machines[role] = PrefillMachine(name, PrefillConfig(PAGES, PAGE_ROWS, SPEC))
            self.engines[role] = PrefillEngine()
        elif role is Role.DECODE:
            config = DecodeConfig(PAGES, PAGE_ROWS, 3, 40, SPEC)
            self.machines[role] = DecodeMachine(name, config)
            self.engines[role] = DecodeEngine()
        else:
            self.machines[role] = WriterMachine(name, WriterConfig())
        for peer in (Role.PREFILL, Role.DECODE):
            if role in (peer, Role.KVPROXY) and {peer, Role.KVPROXY} <= set(self.machines):
                instance = self.machines[peer].instance
                pool = LifelineUp(peer, instance, PAGES, PAGE_ROWS)
                self.queue.append((Role.KVPROXY, pool))
                writer = LifelineUp(Role.KVPROXY, self.machines[Role.KVPROXY].instance)
                self.queue.append((peer, writer))

    def kill(self, role: Role) -> None:
        """The process exits: its streams end, the kernel tells, what it queued is gone."""
        instance = self.machines.pop(role).instance
        self.engines.pop(role, None)
        self.queue = deque((to, e) for to, e in self.queue if to is not role)
        if role is Role.KVPROXY:
            self.copies.clear()
        for pair in [p for p in self.streams if role in p]:
            self.cut(*pair)
        if role is not Role.LB:
            for peer in [p for p in self.machines if (p, role) in DIALED or (role, p) in DIALED]:
                if peer is not Role.LB:
                    self.queue.append((peer, InstanceDied(role, instance)))

    def dial(self) -> None:
        """Open every stream that is missing."""
        for dialer, acceptor in sorted(DIALED):
            if (dialer, acceptor) not in self.streams and {dialer, acceptor} <= set(self.machines):
                self._last_stream += 1
                self.streams[dialer, acceptor] = self._last_stream
                self.queue.append((dialer, StreamOpened(acceptor, self._last_stream)))

    def cut(self, dialer: Role, acceptor: Role) -> None:
        """A stream breaks; what was under way on it is lost."""
        stream = self.streams.pop((dialer, acceptor))
        kept = deque(
            (to, e)
            for to, e in self.queue
            if not (isinstance(e, Received | StreamOpened) and e.stream == stream)
        )
        self.queue = kept
        for end, other in ((dialer, acceptor), (acceptor, dialer)):
            if end in self.machines:
                self.queue.append((end, StreamClosed(other, stream)))

    # --- running ---------------------------------------------------------------------

    def feed(self, role: Role, event: Event) -> None:
        self.now += 1
        self.execute(role, self.machines[role].receive(event, self.now))

    def step(self) -> bool:
        """One event, or one piece of work when no event waits; False when all is idle."""
        if self.queue:
            self.feed(*self.queue.popleft())
            return True
        if self.copies and not self.late_copies:
            self.end_copy()
            return True
        for role, worker in self.engines.items():
            if said := worker.work():
                self.queue.extend((role, FromEngineEvent(m)) for m in said)
                return True
        if self.copies:
            self.end_copy()
            return True
        return False

    def run(self) -> None:
        steps = 0
        while self.step():
            steps += 1
            assert steps < 5_000, "the loop does not come to rest"

    def rest(self) -> None:
        """Run, then let timers fire until none is left."""
        self.run()
        for _ in range(20):
            due = {r: t for r, m in self.machines.items() if (t := m.next_timer()) is not None}
            if not due:
                return
            self.now = max(self.now, min(due.values()))
            for role in due:
                self.execute(role, self.machines[role].handle_timer(self.now))
            self.run()
        raise AssertionError("timers never end")

    def execute(self, role: Role, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                pair = (role, effect.peer) if (role, effect.peer) in DIALED else (effect.peer, role)
                if self.streams.get(pair) == effect.stream:
                    message = Received(role, effect.stream, effect.message)
                    self.queue.append((effect.peer, message))
            elif isinstance(effect, Close):
                pair = (role, effect.peer) if (role, effect.peer) in DIALED else (effect.peer, role)
                if self.streams.get(pair) == effect.stream:
                    self.cut(*pair)
            elif isinstance(effect, ToEngineEffect):
                said = self.engines[role].take(effect.message)
                self.queue.extend((role, FromEngineEvent(m)) for m in said)
            elif isinstance(effect, StartCopy):
                self.copies.append(effect)
            elif isinstance(effect, Rows):
                assert effect.transfer not in self.ended, "a row after the end"
                self.rows[effect.transfer] = self.rows.get(effect.transfer, 0) + 1
            elif isinstance(effect, Ended):
                assert effect.transfer not in self.ended, "two ends of one request"
                self.ended[effect.transfer] = effect
            else:
                assert not isinstance(effect, Exit), effect

    def end_copy(self) -> None:
        """The oldest copy writes, is checked against the ledger, and is told."""
        copy = self.copies.pop(0)
        decode = self.machines.get(Role.DECODE)
        if decode is not None and decode.instance == copy.dest:
            self._write(copy, decode)
        done = CopyDone(copy.copy, CopyResult.OK, "", self.now)
        self.queue.append((Role.KVPROXY, done))

    def _write(self, copy: StartCopy, decode: Any) -> None:
        holding = decode.transfers.ledger.holding(copy.transfer)
        assert holding.state in (PageState.GRANTED, PageState.QUARANTINED), "a late write"
        assert set(copy.dest_pages) <= set(holding.pages), "a write to another's page"
        prefill: Any = self.machines.get(Role.PREFILL)
        if prefill is None or prefill.instance != copy.source:
            return  # the contents died with their owner; nobody may read them either
        assert set(copy.source_pages) <= set(prefill.jobs.pages.pages_of(copy.transfer))
        source, dest = self.engines[Role.PREFILL].memory, self.engines[Role.DECODE].memory
        first_page = copy.start_row // PAGE_ROWS
        for row in range(copy.start_row, copy.start_row + copy.count):
            index, offset = row // PAGE_ROWS - first_page, row % PAGE_ROWS
            dest[copy.dest_pages[index], offset] = source[copy.source_pages[index], offset]

    # --- what is left ----------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """What is still held anywhere, in words; empty when every page is free."""
        decode: Any = self.machines[Role.DECODE]
        prefill: Any = self.machines[Role.PREFILL]
        writer: Any = self.machines[Role.KVPROXY]
        front: Any = self.machines[Role.LB]
        decode.transfers.ledger.check()
        prefill.jobs.pages.check()
        held = {
            "decode's pages": PAGES - decode.transfers.ledger.count(PageState.FREE),
            "decode's transfers": len(decode.transfers.by_transfer),
            "decode's sequences": len(decode.transfers.by_seq),
            "prefill's pages": PAGES - prefill.jobs.pages.free,
            "prefill's jobs": len(prefill.jobs.by_transfer),
            "the writer's transfers": len(writer.transfers.by_id),
            "mappings of the dead": len(writer.pools) - 2,
            "lb's requests": len(front.requests),
        }
        return [f"{what}: {count}" for what, count in held.items() if count]
