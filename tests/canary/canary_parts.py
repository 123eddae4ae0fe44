"""Pairs, and sides and ears that follow a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_canary.ear import Heard
from duplet_canary.equivalence import MARGIN
from duplet_canary.journal import Journal
from duplet_canary.plan import Jobs, Pair, Plan, Side
from duplet_canary.speaker import Ask, Spoken
from duplet_canary.tally import Tally
from duplet_canary.utterances import Length, digest_of, made_utterances
from duplet_canary.watch import Sides, Watch

VOICES = ("amber", "cedar")
UTTERANCES = made_utterances(tuple(Length))
REFERENCE = 40
"""Phonemes of a pair that a test makes up."""


def plan(**changes: Any) -> Plan:
    whole: dict[str, Any] = {
        "model": "wren f00d",
        "recogniser": "stub 1",
        "texts": digest_of(UTTERANCES),
        "voices": VOICES,
    }
    return Plan(**{**whole, **changes})


def side(wrong: int | None = 0, voice: str = "amber", error: str = "", **more: Any) -> Side:
    whole: dict[str, Any] = {
        "digest": "00",
        "rows": 0 if error else 30,
        "finish": "" if error else "STOP",
        "error": error,
        "ttft_s": 0.1,
        "ttfa_s": 0.2,
        "rows_per_second": 50.0,
        "wrong": wrong,
        "sounds_like": voice,
    }
    return Side(**{**whole, **more})


def pair(
    number: int,
    monolith: Side,
    unit: Side,
    *,
    equal: bool = False,
    utterance: int | None = None,
    reference: int = REFERENCE,
) -> Pair:
    return Pair(
        number=number,
        utterance=number if utterance is None else utterance,
        length="short",
        voice="amber",
        reference=reference,
        equal=equal,
        monolith=monolith,
        unit=unit,
    )


def tally_of(pairs: Iterable[Pair]) -> Tally:
    tally = Tally()
    for one in pairs:
        tally.add(one)
    return tally


def prompt_of(text: str, voice: str) -> NDArray[np.int32]:
    """int32 [1 + characters, 2]: the voice, then the text."""
    rows = np.zeros((1 + len(text), 2), np.int32)
    rows[0, 0] = VOICES.index(voice)
    rows[1:, 0] = [ord(letter) for letter in text]
    return rows


class ScriptedSpeaker:
    """Says the prompt itself, with the seed in its second column; `change` comes before."""

    def __init__(self, change: Callable[[Ask], Ask | str] = lambda ask: ask) -> None:
        """`change` makes another request of one, or the error that it ends with."""
        self._change = change
        self.asked: list[Ask] = []

    async def say(self, ask: Ask) -> Spoken:
        self.asked.append(ask)
        changed = self._change(ask)
        if isinstance(changed, str):
            return Spoken(error=changed)
        rows = changed.prompt.copy()
        rows[:, 1] = changed.seed
        return Spoken(rows, "STOP", 0.1, 0.2, 50.0)


class ScriptedEar:
    """Reads the rows of ScriptedSpeaker: a letter is right, or it is not."""

    def __init__(self) -> None:
        self.heard = 0

    async def hear(self, rows: NDArray[np.int32], text: str) -> Heard:
        self.heard += 1
        letters = [chr(code) for code in rows[1:, 0]]
        wrong = sum(one != other for one, other in zip(letters, text, strict=True))
        return Heard(wrong, len(text), VOICES[int(rows[0, 0])])


def make_watch(
    unit: ScriptedSpeaker,
    ear: ScriptedEar | None = None,
    *,
    monolith: ScriptedSpeaker | None = None,
    journal: Journal | None = None,
    done: Sequence[Pair] = (),
    other_seeds: bool = False,
    on_pair: Callable[[Pair], None] = lambda _pair: None,
) -> Watch:
    sides = Sides(monolith or ScriptedSpeaker(), unit, prompt_of, ear)
    return Watch(
        sides,
        Jobs(plan(other_seeds=other_seeds), UTTERANCES),
        journal or Journal(None),
        done,
        margin=MARGIN,
        rows_must_equal=not other_seeds,
        on_pair=on_pair,
    )
