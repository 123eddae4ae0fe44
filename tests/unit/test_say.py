"""`say`: pieces in order, two in flight at most, and what is wrong is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from duplet_client import Finished, FinishReason, GenerateError, Rows, SamplingOptions, Usage
from duplet_client.timing import make_timeline
from duplet_core.errors import Unavailable
from duplet_unit.say import AT_ONCE, TRIES, Said, SayOptions, check_spoken, say
from duplet_voice.features import ROW_SAMPLES
from duplet_voice.front_end import Piece
from duplet_voice.vocoder import Samples

OPTIONS = SayOptions("amber", SamplingOptions(seed=1))


class LoudSpeech:
    """In place of the vocoder: each row is ROW_SAMPLES of its own first code."""

    def push(self, rows: np.ndarray) -> Samples:
        return np.repeat(rows[:, 1].astype(np.float32) / 1000, ROW_SAMPLES)

    def flush(self) -> Samples:
        return np.full(5, 0.5, np.float32)


@dataclass
class Answer:
    """What the unit does with one piece."""

    rows: int = 40
    level: int = 500
    reason: FinishReason = FinishReason.STOP
    error: GenerateError | None = None
    """In place of everything."""
    fails_after: int | None = None
    """Rows after which it breaks."""


@dataclass
class FakeUnit:
    """In place of the client: answers piece by piece, and counts what is in flight."""

    answers: list[Answer]
    flying: int = 0
    most_flying: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    """How many rows had been told, of all pieces, when each request began."""
    told: int = 0
    closed: int = 0

    def generate(self, prompt: np.ndarray, **options: Any) -> FakeGeneration:
        self.asked.append(options)
        self.begun.append(self.told)
        return FakeGeneration(self, self.answers.pop(0))


@dataclass
class FakeGeneration:
    unit: FakeUnit
    answer: Answer

    async def __aenter__(self) -> FakeGeneration:
        self.unit.flying += 1
        self.unit.most_flying = max(self.unit.most_flying, self.unit.flying)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.unit.flying -= 1
        self.unit.closed += 1

    async def __aiter__(self) -> AsyncIterator[Rows | Finished]:
        answer = self.answer
        if answer.error is not None:
            raise answer.error
        for index in range(answer.rows):
            await asyncio.sleep(0)
            if index == answer.fails_after:
                raise GenerateError(grpc.StatusCode.UNAVAILABLE, "DECODE_LOST", "decode is gone")
            self.unit.told += 1
            yield Rows(index, np.full((1, 11), answer.level, np.int32))
        usage = Usage(10, 0, answer.rows, 1)
        yield Finished(answer.reason, usage, make_timeline(0, [], 1))


def pieces(count: int, phonemes: str = "a" * 30) -> Iterator[Piece]:
    for _ in range(count):
        yield Piece(np.zeros((3, 11), np.int32), phonemes, 100)


async def said_by(
    unit: FakeUnit, count: int, options: SayOptions = OPTIONS, phonemes: str = "a" * 30
) -> tuple[Said, np.ndarray]:
    heard: list[Samples] = []

    async def write(samples: Samples) -> None:
        heard.append(samples)

    said = await say(
        unit,  # type: ignore[arg-type]
        pieces(count, phonemes),
        LoudSpeech(),  # type: ignore[arg-type]
        options,
        write,
        lambda _: None,
    )
    return said, np.concatenate(heard)


async def turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def turns_until(reached: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if reached():
            return
        await asyncio.sleep(0)
    raise AssertionError("it was not reached")


async def test_pieces_are_heard_in_order_without_a_gap() -> None:
    unit = FakeUnit([Answer(level=100 + number) for number in range(5)])
    said, heard = await said_by(unit, 5)
    rows = np.repeat((100 + np.arange(5)) / np.float32(1000), 40 * ROW_SAMPLES)
    assert np.array_equal(heard[:-5], rows.astype(np.float32))
    assert said.samples == len(heard)
    assert said.rows == 200 and len(said.pieces) == 5
    assert not said.problems
    assert said.ttfa_s is not None and said.wall_s >= said.ttfa_s


async def test_the_next_piece_is_requested_once_this_one_plays_and_no_further_one() -> None:
    unit = FakeUnit([Answer() for _ in range(6)])
    await said_by(unit, 6)
    assert unit.most_flying == AT_ONCE
    assert unit.begun[0] == 0
    assert unit.begun[1] >= 9
    assert unit.closed == 6 and unit.flying == 0


async def test_a_listener_who_waits_holds_back_further_pieces() -> None:
    unit = FakeUnit([Answer() for _ in range(6)])
    gate = asyncio.Event()

    async def write(samples: Samples) -> None:
        if unit.told >= 20:
            await gate.wait()

    speaking = asyncio.create_task(
        say(unit, pieces(6), LoudSpeech(), OPTIONS, write, lambda _: None)  # type: ignore[arg-type]
    )
    await turns_until(lambda: unit.told >= 80)  # both in flight are read to their end meanwhile
    await turns_of_the_loop(200)
    assert len(unit.asked) == AT_ONCE
    gate.set()
    assert len((await speaking).pieces) == 6


async def test_every_piece_has_the_options() -> None:
    unit = FakeUnit([Answer(), Answer()])
    await said_by(unit, 2, SayOptions("cedar", SamplingOptions(seed=7), 60, 9.0))
    for asked in unit.asked:
        assert (asked["voice"], asked["max_rows"], asked["timeout_s"]) == ("cedar", 60, 9.0)
        assert asked["sampling"].seed == 7


async def test_the_front_end_bounds_what_the_caller_asks_for() -> None:
    unit = FakeUnit([Answer()])
    await said_by(unit, 1, SayOptions("amber", SamplingOptions(), 5000))
    assert unit.asked[0]["max_rows"] == 100


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(reason=FinishReason.LENGTH), "piece 2 was cut off after 40 rows (LENGTH)"),
        (Answer(level=0), "piece 2 is silent"),
        (Answer(level=2), "piece 2 is silent"),
        (Answer(rows=17), "piece 2 ended after 17 rows, too few for 30 phonemes"),
        (Answer(rows=0), "piece 2 ended after 0 rows, too few for 30 phonemes"),
    ],
)
async def test_what_is_not_the_whole_speech_is_said(answer: Answer, problem: str) -> None:
    said, _ = await said_by(FakeUnit([Answer(), answer, Answer()]), 3)
    assert said.problems == [problem]
    assert said.to_fields()["problems"] == [problem]


async def test_no_row_at_all_is_an_error() -> None:
    said, _ = await said_by(FakeUnit([Answer(rows=0)]), 1)
    with pytest.raises(Unavailable, match="before its first row"):
        check_spoken(said)


async def test_speech_shorter_than_a_player_waits_for_starts_at_its_end() -> None:
    said, _ = await said_by(FakeUnit([Answer(rows=5)]), 1, phonemes="hI.")
    assert not said.problems
    assert said.ttfa_s == said.wall_s
    assert said.playback.stalls == 0


def test_an_underrun_is_the_time_in_which_a_player_had_nothing() -> None:
    said = Said()
    row_ns = 1_000_000_000 * 1024 // 22_050
    said.note_rows(9, 1_000)
    said.note_rows(1, 1_000 + 10 * row_ns)
    # Rows of the next piece came before; they count from when these were there.
    said.note_rows(5, 2_000)
    assert said.audio_ns == 1_000
    assert said.playback.stalls == 1
    assert said.playback.stalled_ns == pytest.approx(row_ns, rel=1e-3)
    assert said.last_row_ns == 1_000 + 10 * row_ns
    assert "playback underrun 46 ms" in said.summary()


async def test_a_failure_ends_everything_in_flight() -> None:
    unit = FakeUnit([Answer(fails_after=20), Answer(rows=10_000), Answer()])
    with pytest.raises(GenerateError, match="DECODE_LOST"):
        await said_by(unit, 3)
    assert unit.flying == 0
    assert len(unit.asked) == 2


async def test_a_cancel_ends_everything_in_flight() -> None:
    unit = FakeUnit([Answer(rows=90), Answer(rows=90), Answer()])
    speaking = asyncio.create_task(said_by(unit, 3))
    await turns_until(lambda: unit.most_flying == 2)
    speaking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await speaking
    assert unit.flying == 0


def busy() -> GenerateError:
    return GenerateError(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", "full", 0.0)


async def test_a_busy_unit_is_asked_again() -> None:
    unit = FakeUnit([Answer(), *[Answer(error=busy())] * (TRIES - 1), Answer()])
    said, _ = await said_by(unit, 2)
    assert said.rows == 80


async def test_but_not_for_ever_and_not_without_a_time() -> None:
    unit = FakeUnit([Answer(error=busy())] * (TRIES + 1))
    with pytest.raises(GenerateError, match="OVERLOADED"):
        await said_by(unit, 1)
    assert len(unit.asked) == TRIES
    unit = FakeUnit(
        [Answer(error=GenerateError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "no"))] * 2
    )
    with pytest.raises(GenerateError, match="DRAINING"):
        await said_by(unit, 1)
    assert len(unit.asked) == 1
