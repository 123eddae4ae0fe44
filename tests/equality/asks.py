"""Requests of every kind, and the exact rows that came of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from duplet_client import (
    AsyncClient,
    Finished,
    FinishReason,
    Rows,
    SamplingOptions,
    rows_from_text,
)
from duplet_pages.spec import ModelSpec

VOICES = ("ada", "bo", "cleo", "dee", "eli", "fay")
TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.3)
WINDOWS = (0, 16, 64)
TOP_PS = (0.5, 0.9, 1.0)
TOP_KS = (1, 30, 200)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, made from its number alone."""

    number: int

    @property
    def voice(self) -> str:
        return VOICES[self.number % len(VOICES)]

    @property
    def voice_rows(self) -> int:
        """Two lengths a voice: what one of them caches is the beginning of the other."""
        return (8, 60, 130, 200)[self.number % 4]

    @property
    def text(self) -> str:
        return "so it goes, "[: 3 + self.number % 9] * (1 + self.number % 7) + str(self.number)

    @property
    def max_rows(self) -> int:
        return 1 if self.number % 40 == 0 else 10 + self.number % 31

    @property
    def sampling(self) -> SamplingOptions:
        n = self.number
        return SamplingOptions(
            temperature=TEMPERATURES[n % len(TEMPERATURES)],
            top_p=TOP_PS[n // 5 % len(TOP_PS)],
            top_k=TOP_KS[n // 3 % len(TOP_KS)],
            repetition_window=WINDOWS[n // 2 % len(WINDOWS)],
            seed=n,
        )

    def prompt(self, spec: ModelSpec) -> np.ndarray:
        """int32 [rows, columns]; 15 to 300 rows."""
        return rows_from_text(spec, self.text, self.voice, self.voice_rows)


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be the same everywhere, and how much of the prompt was cached here."""

    rows: bytes
    count: int
    reason: FinishReason
    cached_rows: int


async def read(client: AsyncClient, spec: ModelSpec, ask: Ask) -> Answer:
    """Send one request and read it to its end."""
    parts: list[np.ndarray] = []
    finished: Finished | None = None
    generation = client.generate(
        ask.prompt(spec),
        sampling=ask.sampling,
        max_rows=ask.max_rows,
        voice=ask.voice,
        timeout_s=100,
    )
    async with generation:
        async for event in generation:
            if isinstance(event, Rows):
                parts.append(event.rows)
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None
    rows = b"".join(part.tobytes() for part in parts)
    count = sum(len(part) for part in parts)
    assert count == finished.usage.output_rows
    return Answer(rows, count, finished.reason, finished.usage.cached_rows)


async def read_all(
    client: AsyncClient, spec: ModelSpec, asks: Iterable[Ask], at_once: int
) -> dict[int, Answer]:
    """Send them in order, so many at a time; answers by number."""
    answers: dict[int, Answer] = {}
    waiting = iter(asks)

    async def send() -> None:
        for ask in waiting:
            answers[ask.number] = await read(client, spec, ask)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(send())
    return answers


async def cancel_some(client: AsyncClient, spec: ModelSpec, asks: Iterable[Ask]) -> None:
    """Send them one after the other and leave each: at once, early, or in the middle."""
    for ask in asks:
        generation = client.generate(
            ask.prompt(spec), sampling=ask.sampling, max_rows=ask.max_rows, timeout_s=100
        )
        left = ask.number % 5
        async with generation:
            async for _ in generation:
                if left == 0:
                    break
                left -= 1


def assert_same(answers: Mapping[int, Answer], reference: Mapping[int, Answer]) -> None:
    """Every answer has exactly the reference's rows and end."""
    assert answers
    different = [
        f"request {number}: {answer.count} rows ({answer.reason.name}), "
        f"expected {expected.count} ({expected.reason.name})"
        for number, answer in sorted(answers.items())
        for expected in [reference[number]]
        if (answer.rows, answer.reason) != (expected.rows, expected.reason)
    ]
    assert not different, "\n".join(different)
