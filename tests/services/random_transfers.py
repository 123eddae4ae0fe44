"""prefill and decode as players of a random schedule against a real kvproxy, and a book of what
every page of both pools holds meanwhile.

A page of decode's that nobody was granted holds FREE in every row; one that was given back
holds it again at once, so that a late write shows. A page of prefill's that was given back is
overwritten at once, so that a late read shows. The book's checks hold in any timing.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_core.effects import Received, StreamClosed, StreamOpened
from duplet_core.errors import Reason
from duplet_core.ids import Role, TransferId
from duplet_core.messages import (
    Abort,
    AbortAck,
    Drop,
    Grant,
    Handoff,
    Hello,
    Landed,
    Message,
    Move,
    Route,
    SourceReleased,
    TransferFailed,
)
from duplet_memory.pool import Pool
from tests.services.kvproxy_peers import LIMIT_S, ROW, KvproxyEnd, KvproxyProcess, OwnedPool
from tests.services.random_schedule import Act, Step
from tests.services.test_kvproxy_service_faults import PAGE_ROWS, PAGES

FREE = -1.0
"""In decode's pages that nobody was granted."""
GONE = -2.0
"""In prefill's pages whose rows were given back."""


@dataclass
class Prompt:
    """One transfer, as both players know it."""

    transfer: TransferId
    rows: int
    pages: tuple[int, ...]
    """In prefill's pool, in row order."""
    values: NDArray[np.float32]
    """What each row holds, all of it the same number that no other row ever has."""
    source_held: bool = True
    dest_pages: tuple[int, ...] = ()
    """Granted, and not given back."""
    is_granted: bool = False
    """Was, at some time: a Grant is said once."""
    is_aborted: bool = False
    moves_begun: bool = False
    moves_over: bool = False
    is_complete: bool = False
    """Every row was moved, by the rules: it may land."""
    is_denied: bool = False
    """prefill was told that it did not land, and never will."""


class Book:
    """Of both pools, lent: every page's holder and content. Writes all pages but granted ones."""

    def __init__(self, source: Pool, dest: Pool, seed: int) -> None:
        self._source, self._dest = source, dest
        self._chance = random.Random(seed)
        self._next_value = 0
        self._free_source = set(range(PAGES))
        self._free_dest = set(range(PAGES))
        self.prompts: dict[TransferId, Prompt] = {}
        """Those that hold pages."""
        self.faults: list[str] = []
        """What must never be."""
        self.counts: Counter[str] = Counter()
        self.changed = asyncio.Event()
        self._source.array[:] = GONE
        self._dest.array[:] = FREE

    async def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Until it is so, or a fault was found.

        Raises:
            AssertionError: it does not come.
        """
        try:
            async with asyncio.timeout(LIMIT_S):
                while not is_so() and not self.faults:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {LIMIT_S} s: {what}; {self.prompts}") from None

    def has_room(self, rows: int) -> bool:
        return min(len(self._free_source), len(self._free_dest)) >= _pages_of(rows)

    def begin(self, transfer: TransferId, rows: int) -> None:
        """Compute a prompt."""
        pages = self._draw(self._free_source, rows)
        first, self._next_value = self._next_value, self._next_value + len(pages) * PAGE_ROWS
        values = np.arange(first, self._next_value, dtype=np.float32)
        self._source.array[list(pages)] = values.reshape(-1, 1, 1, PAGE_ROWS, 1, 1)
        self.prompts[transfer] = Prompt(transfer, rows, pages, values[:rows])

    def reserve(self, prompt: Prompt) -> None:
        """Pages in decode's pool."""
        prompt.is_granted = True
        prompt.dest_pages = self._draw(self._free_dest, prompt.rows)

    def free_source(self, prompt: Prompt) -> None:
        if not prompt.source_held:
            return
        prompt.source_held = False
        self._source.array[list(prompt.pages)] = GONE
        self._free_source.update(prompt.pages)
        self._forget(prompt)

    def free_dest(self, prompt: Prompt) -> None:
        self._dest.array[list(prompt.dest_pages)] = FREE
        self._free_dest.update(prompt.dest_pages)
        prompt.dest_pages = ()
        self._forget(prompt)

    def check_landed(self, prompt: Prompt, rows: int) -> None:
        """decode's pages hold what prefill's held, and it may have landed at all."""
        if rows != prompt.rows or not prompt.is_complete or prompt.is_denied:
            self.faults.append(f"landed, {rows} rows: {prompt}")
        held = np.moveaxis(self._dest.array[list(prompt.dest_pages)], 3, 1)
        held = held.reshape(len(prompt.dest_pages) * PAGE_ROWS, -1)[: prompt.rows]
        if (held != prompt.values[:, None]).any():
            self.faults.append(f"landed with other rows: {held[:, 0].tolist()} in {prompt}")

    def check_free(self) -> None:
        """Nobody writes what nobody was granted."""
        free = sorted(self._free_dest)
        is_written = (self._dest.array[free] != FREE).any((1, 2, 3, 4, 5))
        if is_written.any():
            pages = [page for page, bad in zip(free, is_written, strict=True) if bad]
            self.faults.append(f"free pages were written: {pages}")

    @property
    def all_free(self) -> bool:
        return len(self._free_source) == len(self._free_dest) == PAGES

    def _draw(self, free: set[int], rows: int) -> tuple[int, ...]:
        pages = self._chance.sample(sorted(free), _pages_of(rows))
        free.difference_update(pages)
        return tuple(pages)

    def _forget(self, prompt: Prompt) -> None:
        if not prompt.source_held and not prompt.dest_pages:
            self.prompts.pop(prompt.transfer, None)


def _pages_of(rows: int) -> int:
    return -(-rows // PAGE_ROWS)


class Player(KvproxyEnd):
    """One side of the transfers in a book, over streams that come and go."""

    def __init__(self, role: Role, run_dir: Path, pool: OwnedPool, book: Book) -> None:
        super().__init__(role, run_dir, pool)
        self.book = book
        self.is_open = False
        """A Hello was said on a stream that we have not seen end."""
        self._broken = 0
        """The newest stream that is to end, or has."""
        self.on_ended: Callable[[Prompt], None] = lambda _: None
        """The other side is told, as lb would: this one's part of a transfer is over."""

    def break_stream(self) -> None:
        self.expect_end()
        if self.is_open:
            self.is_open = False
            self._dialer.close(self._stream, Reason.PEER_PROTOCOL, "the schedule says so")

    def expect_end(self) -> None:
        self._broken = self._stream

    @property
    def is_back(self) -> bool:
        """The stream that is to end has ended, and there is another."""
        return self.is_open and self._stream > self._broken

    def _take(self, event: Any) -> None:
        if isinstance(event, StreamOpened):
            self.held = self._list_held()
            super()._take(event)
            self.is_open = True
        elif isinstance(event, StreamClosed):
            self.is_open = False
            self.book.counts[f"streams of {self.role}"] += 1
        elif isinstance(event, Received) and not isinstance(event.message, Hello):
            self._hear(event.message)
        self.book.changed.set()

    def _list_held(self) -> tuple[TransferId, ...]:
        raise NotImplementedError

    def _hear(self, message: Message) -> None:
        raise NotImplementedError


class DecodePlayer(Player):
    ends_withheld = 0
    """As kvproxy said it last."""

    def grant(self, prompt: Prompt) -> None:
        if self.is_open and not prompt.is_granted:
            self.book.reserve(prompt)
            self.say(Grant(prompt.transfer, prompt.dest_pages, prompt.rows))

    def abort(self, prompt: Prompt) -> None:
        # Without a stream: the next Hello says it.
        if self.is_open and prompt.dest_pages:
            prompt.is_aborted = True
            self.say(Abort(prompt.transfer))

    def _list_held(self) -> tuple[TransferId, ...]:
        held = [p for p in self.book.prompts.values() if p.dest_pages]
        for prompt in held:
            prompt.is_aborted = True
        return tuple(p.transfer for p in held)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Route):
            self.ends_withheld = message.ends_withheld
        if not isinstance(message, Landed | TransferFailed | AbortAck):
            return
        book = self.book
        prompt = book.prompts.get(message.transfer)
        if prompt is None or not prompt.dest_pages:
            if isinstance(message, Landed):
                book.faults.append(f"landed in pages that it does not have: {message}")
            return
        if isinstance(message, Landed):
            book.check_landed(prompt, message.rows)
        elif isinstance(message, AbortAck) and not prompt.is_aborted:
            book.faults.append(f"acknowledged, and nobody asked: {prompt}")
        book.counts[type(message).__name__] += 1
        book.free_dest(prompt)
        self.on_ended(prompt)


class PrefillPlayer(Player):
    def move(self, prompt: Prompt, step: Step) -> None:
        if not self.is_open:
            prompt.moves_over = True
        if prompt.moves_over or not prompt.source_held:
            return
        prompt.moves_begun = True
        prompt.is_complete = step.completes
        first, last = step.start // PAGE_ROWS, (step.start + step.count - 1) // PAGE_ROWS
        pages = prompt.pages[first : last + 1]
        digests = tuple(bytes(16) for _ in prompt.pages)
        handoff = Handoff(ROW, digests, (0, 0, 0)) if step.has_handoff else None
        self.say(Move(prompt.transfer, step.start, step.count, pages, handoff))

    def drop(self, prompt: Prompt) -> None:
        # Without a stream: the next Hello says it.
        if self.is_open and prompt.source_held:
            prompt.moves_over = True
            self.say(Drop(prompt.transfer))

    def _list_held(self) -> tuple[TransferId, ...]:
        """What was not moved at all is nobody's but ours, and over: so is all that was not moved
        to its end."""
        held = [p for p in self.book.prompts.values() if p.source_held]
        for prompt in held:
            prompt.moves_over = True
            if not prompt.moves_begun:
                self._free(prompt)
        return tuple(p.transfer for p in held if p.moves_begun)

    def _hear(self, message: Message) -> None:
        if not isinstance(message, SourceReleased):
            return
        prompt = self.book.prompts.get(message.transfer)
        if prompt is None or not prompt.source_held:
            return
        if message.landed and not prompt.is_complete:
            self.book.faults.append(f"released as landed: {prompt}")
        self.book.counts["landings told to prefill" if message.landed else "releases"] += 1
        prompt.is_denied = not message.landed
        self._free(prompt, is_over=not message.landed)

    def _free(self, prompt: Prompt, is_over: bool = True) -> None:
        prompt.moves_over = True
        self.book.free_source(prompt)
        if is_over:
            self.on_ended(prompt)


class Play:
    """A schedule, step by step, until everything has come to rest."""

    def __init__(
        self, kvproxy: KvproxyProcess, book: Book, prefill: PrefillPlayer, decode: DecodePlayer
    ) -> None:
        self._kvproxy, self._book = kvproxy, book
        self._prefill, self._decode = prefill, decode
        prefill.on_ended = decode.abort
        decode.on_ended = prefill.drop

    async def run(self, schedule: list[Step], unknowns: int = 0) -> None:
        """Over early when the book has found a fault. So many transfers have a copy whose end is
        UNKNOWN (of `unordered_kvproxy`): all that is held of them stays so.

        Raises:
            ExceptionGroup: kvproxy left, a stream could not be served, or it does not come to
                rest.
        """
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(p.run()) for p in (self._decode, self._prefill)]
            running.append(tasks.create_task(self._watch()))
            await self._all_steps(schedule, unknowns)
            for task in running:
                task.cancel()

    async def _watch(self) -> None:
        code = await self._kvproxy.process.wait()
        raise AssertionError(f"kvproxy left with {code}: {self._kvproxy.log[-2000:]}")

    async def _all_steps(self, schedule: list[Step], unknowns: int) -> None:
        book = self._book
        await self._reopen()
        asked = [len(schedule) * (n + 1) // (unknowns + 2) for n in range(unknowns)]
        for number, step in enumerate(schedule):
            if number in asked:
                self._kvproxy.process.send_signal(signal.SIGUSR2)
            await self._take_step(step)
            book.check_free()
            if book.faults:
                return
        await self._reopen()
        for prompt in tuple(book.prompts.values()):
            self._end(prompt)
        if unknowns:
            await self._wait_withheld(unknowns)
        else:
            await book.wait(lambda: book.all_free, "all pages are free")
        book.check_free()

    async def _wait_withheld(self, unknowns: int) -> None:
        """All else has ended. An end that nobody can know was told if fewer are left."""
        book = self._book

        def rests() -> bool:
            left = len(book.prompts)
            return left < unknowns or left == self._decode.ends_withheld == unknowns

        await book.wait(rests, "only unknown ends are left")
        if len(book.prompts) < unknowns:
            book.faults.append("an unknown end was told")

    async def _take_step(self, step: Step) -> None:
        if step.act is Act.STOP:
            self._kvproxy.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(step.pause_s)
        if step.act is Act.STOP:
            self._kvproxy.process.send_signal(signal.SIGCONT)
        elif step.act is Act.BEGIN:
            await self._wait_room(step)
            self._book.begin(TransferId(f"{step.number:032x}"), step.rows)
        elif step.act is Act.REOPEN:
            await self._reopen()
        elif step.act in (Act.BREAK_PREFILL, Act.BREAK_DECODE):
            (self._prefill if step.act is Act.BREAK_PREFILL else self._decode).break_stream()
        elif step.act in (Act.JUNK_MOVE, Act.JUNK_GRANT, Act.ABORT_UNKNOWN):
            self._say_junk(step)
        else:
            if step.act is Act.GRANT:
                await self._wait_room(step)
            prompt = self._book.prompts.get(TransferId(f"{step.number:032x}"))
            if prompt is not None:
                self._play(step, prompt)

    def _play(self, step: Step, prompt: Prompt) -> None:
        if step.act is Act.GRANT:
            self._decode.grant(prompt)
        elif step.act is Act.MOVE:
            self._prefill.move(prompt, step)
        elif step.act is Act.ABORT:
            self._decode.abort(prompt)
        elif step.act is Act.DROP:
            self._prefill.drop(prompt)
        elif step.act is Act.END and not (prompt.is_granted and prompt.is_complete):
            self._end(prompt)

    def _end(self, prompt: Prompt) -> None:
        self._decode.abort(prompt)
        self._prefill.drop(prompt)

    def _say_junk(self, step: Step) -> None:
        nobodys = TransferId(f"{step.number + (1 << 64):032x}")
        if step.act is Act.ABORT_UNKNOWN and self._decode.is_open:
            self._decode.say(Abort(nobodys))
        elif step.act is Act.JUNK_GRANT and self._decode.is_open:
            grants = (Grant(nobodys, (PAGES + 3,), 1), Grant(nobodys, (0, 0), PAGE_ROWS + 1))
            self._decode.say(grants[step.number % len(grants)])
            self._decode.expect_end()
        elif step.act is Act.JUNK_MOVE and self._prefill.is_open:
            far = Move(nobodys, 0, 1, (PAGES,))
            moves = (far, Move(nobodys, 0, 0, ()), Move(nobodys, 0, 5 * PAGE_ROWS, (0,)))
            self._prefill.say(moves[step.number % len(moves)])
            self._prefill.expect_end()

    async def _reopen(self) -> None:
        ends = (self._prefill, self._decode)
        await self._book.wait(lambda: all(end.is_back for end in ends), "streams are back")

    async def _wait_room(self, step: Step) -> None:
        await self._book.wait(lambda: self._book.has_room(step.rows), "pages are free")
