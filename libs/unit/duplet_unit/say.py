"""A text spoken by a unit: its pieces requested one ahead, their rows turned into samples."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from duplet_client import AsyncClient, Finished, FinishReason, GenerateError, Rows, SamplingOptions
from duplet_core.errors import Reason, Unavailable
from duplet_core.playback import AUDIO_ROWS, NS, Playback
from duplet_voice.features import ROWS_PER_SECOND, SAMPLE_RATE
from duplet_voice.front_end import Piece
from duplet_voice.speech import Speech
from duplet_voice.vocoder import Samples

AT_ONCE: Final = 2
"""Requests of one text in flight: the piece that is heard, and the next one."""
TRIES: Final = 5
"""Of a piece that a busy unit refuses with a time to come again."""
_SILENT: Final = 10 ** (-50 / 20)
"""Effective value of samples, of 1, below which a piece is silent; speech has about 0.07."""
_FEWEST_ROWS_A_PHONEME: Final = 0.6
"""The quickest recording of the quickest voice has 0.9; speech with fewer has lost words."""


@dataclass(frozen=True, slots=True)
class SayOptions:
    """What all pieces of a text share."""

    voice: str
    sampling: SamplingOptions
    max_rows: int | None = None
    """Of each piece, where that is less than the front end allows."""
    timeout_s: float = 120.0


@dataclass(slots=True)
class SaidPiece:
    """One piece, as far as it was spoken."""

    phonemes: str
    rows: int = 0
    samples: int = 0
    energy: float = 0.0
    """Sum of squares."""
    reason: FinishReason | None = None

    @property
    def problem(self) -> str:
        """Why this is not the piece's speech; empty when nothing is known against it."""
        if self.reason is FinishReason.LENGTH:
            return f"was cut off after {self.rows} rows (LENGTH)"
        if self.rows < _FEWEST_ROWS_A_PHONEME * len(self.phonemes):
            return f"ended after {self.rows} rows, too few for {len(self.phonemes)} phonemes"
        if self.energy < _SILENT**2 * max(1, self.samples):
            return "is silent"
        return ""


@dataclass(slots=True)
class Said:
    """What came of a text, so far or in the end."""

    pieces: list[SaidPiece] = field(default_factory=list)
    samples: int = 0
    first_sent_ns: int = 0
    last_row_ns: int = 0
    audio_ns: int | None = None
    """When audio could start; None before that."""
    playback: Playback = field(default_factory=lambda: Playback(ROWS_PER_SECOND))
    """A player that started then."""

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def audio_s(self) -> float:
        return self.samples / SAMPLE_RATE

    @property
    def wall_s(self) -> float:
        """From the first request to the last row."""
        return (self.last_row_ns - self.first_sent_ns) / NS

    @property
    def ttfa_s(self) -> float | None:
        """From the first request to the row at which audio could start."""
        return None if self.audio_ns is None else (self.audio_ns - self.first_sent_ns) / NS

    @property
    def times_real_time(self) -> float:
        return self.audio_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def problems(self) -> list[str]:
        """Why this is not the whole text's speech; empty when all went well."""
        found = [
            f"piece {number} {piece.problem}"
            for number, piece in enumerate(self.pieces, 1)
            if piece.problem
        ]
        return found if self.pieces else ["nothing was spoken"]

    def progress(self) -> str:
        """How far it is."""
        rate = self.rows / self.wall_s if self.wall_s > 0 else 0.0
        piece = f"piece {len(self.pieces)}, " if len(self.pieces) > 1 else ""
        return f"{piece}{self.rows} rows, {self.audio_s:.1f} s of audio, {rate:.0f} rows/s"

    def summary(self) -> str:
        """All in one line."""
        ttfa = "-" if self.ttfa_s is None else f"{self.ttfa_s * 1e3:.0f}"
        starved = self.playback.stalled_ns / 1e6
        return (
            f"{self.audio_s:.2f} s of audio in {self.wall_s:.2f} s "
            f"({self.times_real_time:.1f} x real time), TTFA {ttfa} ms, "
            f"playback underrun {starved:.0f} ms; {self.rows} rows in "
            f"{len(self.pieces)} {'piece' if len(self.pieces) == 1 else 'pieces'}"
        )

    def to_fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "audio_s": self.audio_s,
            "wall_s": self.wall_s,
            "times_real_time": self.times_real_time,
            "ttfa_s": self.ttfa_s,
            "stalls": self.playback.stalls,
            "underrun_s": self.playback.stalled_ns / NS,
            "rows": self.rows,
            "pieces": [
                {"phonemes": p.phonemes, "rows": p.rows, "reason": p.reason and p.reason.value}
                for p in self.pieces
            ],
            "problems": self.problems,
        }

    def note_rows(self, count: int, now_ns: int) -> None:
        """`count` rows, next in the text's order, were there at `now_ns`."""
        # Rows of the next piece may have come before the last ones of this.
        self.last_row_ns = now_ns = max(self.last_row_ns, now_ns)
        self.playback.add(count, now_ns)
        if self.audio_ns is None and self.playback.rows >= AUDIO_ROWS:
            self.audio_ns = now_ns


class _Request:
    """One piece on its way. Owns its task; `close` ends it."""

    def __init__(self, client: AsyncClient, piece: Piece, options: SayOptions) -> None:
        self.piece = piece
        self._limit = min(piece.max_rows, options.max_rows or piece.max_rows)
        # Room for every message of the piece, so that reading never waits for who listens;
        # None: the task is over.
        self._events: asyncio.Queue[tuple[Rows | Finished, int] | None] = asyncio.Queue(
            self._limit + 2
        )
        self._has_rows = False
        self._task = asyncio.create_task(self._read(client, options))
        self._task.add_done_callback(lambda _: self._events.put_nowait(None))

    async def next_event(self) -> tuple[Rows | Finished, int]:
        """The next rows or the end, and when they came.

        Raises:
            GenerateError: the request failed.
            InvalidInput: it cannot be sent.
        """
        told = await self._events.get()
        if told is None:
            self._task.result()
            raise Unavailable(Reason.PEER_PROTOCOL, "the stream had no Finished")
        return told

    async def close(self) -> None:
        """End the request, whatever it is doing; its own failure was told or matters no more."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()

    async def _read(self, client: AsyncClient, options: SayOptions) -> None:
        for _ in range(TRIES - 1):
            try:
                await self._try(client, options)
                return
            except GenerateError as error:
                if error.retry_after_s is None or self._has_rows:
                    raise
                again_s = error.retry_after_s
            await asyncio.sleep(again_s)
        await self._try(client, options)

    async def _try(self, client: AsyncClient, options: SayOptions) -> None:
        generation = client.generate(
            self.piece.prompt,
            sampling=options.sampling,
            max_rows=self._limit,
            voice=options.voice,
            timeout_s=options.timeout_s,
        )
        async with generation:
            async for event in generation:
                if isinstance(event, Rows | Finished):
                    self._has_rows = True
                    self._events.put_nowait((event, time.monotonic_ns()))


async def say(
    client: AsyncClient,
    pieces: Iterator[Piece],
    speech: Speech,
    options: SayOptions,
    write: Callable[[Samples], Awaitable[None]],
    on_progress: Callable[[Said], None],
) -> Said:
    """Speak pieces one after the other without a gap; at most AT_ONCE are in flight.

    Args:
        write: takes the samples in order; while it waits, no further piece is requested.
        on_progress: hears of every message of rows.

    Raises:
        GenerateError: the unit refused a piece, or it failed.
        InvalidInput: a piece cannot be sent, or rows that came are no speech.
    """
    said = Said(first_sent_ns=time.monotonic_ns())
    flying: deque[_Request] = deque()

    def request_next() -> None:
        piece = next(pieces, None) if len(flying) < AT_ONCE else None
        if piece is not None:
            flying.append(_Request(client, piece, options))

    try:
        request_next()
        while flying:
            done = SaidPiece(flying[0].piece.phonemes)
            said.pieces.append(done)
            while done.reason is None:
                event, now_ns = await flying[0].next_event()
                if isinstance(event, Finished):
                    done.reason = event.reason
                    continue
                done.rows += len(event.rows)
                said.note_rows(len(event.rows), now_ns)
                await _hand_over(speech.push(event.rows), done, said, write)
                on_progress(said)
                # Not before this piece is heard, for its first rows must not wait.
                if said.playback.playing:
                    request_next()
            request_next()
            await flying.popleft().close()
    finally:
        for request in flying:
            await request.close()
    await _hand_over(speech.flush(), said.pieces[-1], said, write)
    if said.audio_ns is None and said.rows:
        # Shorter than a player waits for: it starts at the end.
        said.audio_ns = said.last_row_ns
    return said


async def _hand_over(
    samples: NDArray[np.float32],
    piece: SaidPiece,
    said: Said,
    write: Callable[[Samples], Awaitable[None]],
) -> None:
    piece.samples += len(samples)
    piece.energy += float(np.square(samples, dtype=np.float64).sum())
    said.samples += len(samples)
    if len(samples):
        await write(samples)


def check_spoken(said: Said) -> None:
    """
    Raises:
        Unavailable: ENGINE_FAILED; there is no speech at all.
    """
    if not said.rows:
        raise Unavailable(Reason.ENGINE_FAILED, "the unit ended the speech before its first row")
