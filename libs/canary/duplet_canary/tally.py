"""Sums over pairs: error rates, voices, rows, failures, times. Its size does not grow with them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from duplet_canary.equivalence import PairedRates
from duplet_canary.plan import Pair, Side
from duplet_canary.speaker import NOT_NOW

KEPT_TIMES = 10_000
"""Newest times of each kind that percentiles are made of."""

SideName = Literal["monolith", "unit"]
SIDES: tuple[SideName, ...] = ("monolith", "unit")


class TimeName(StrEnum):
    """What is timed."""

    TTFT = "ttft_s"
    TTFA = "ttfa_s"
    RATE = "rows_per_second"


@dataclass(slots=True)
class SideTally:
    """One side's own."""

    failures: Counter[str] = field(default_factory=Counter)
    """Requests by reason that failed though it was not for load."""
    not_now: int = 0
    """Requests that were turned away for load."""
    at_limit: int = 0
    """Answers that ended by LENGTH."""
    rows: int = 0
    wrong_voices: int = 0
    """Answers that sound like another voice than was asked for."""
    times: dict[TimeName, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=KEPT_TIMES) for name in TimeName}
    )

    def add(self, side: Side, voice: str) -> None:
        if side.error in NOT_NOW:
            self.not_now += 1
        elif side.error:
            self.failures[side.error] += 1
        else:
            self.rows += side.rows
            self.at_limit += side.finish == "LENGTH"
            self.wrong_voices += is_wrong_voice(side, voice)
            for name, times in self.times.items():
                value = getattr(side, name)
                if value is not None:
                    times.append(value)


@dataclass(slots=True)
class Group:
    """Pairs of one length or voice, or all."""

    answered: int = 0
    unequal: int = 0
    rates: PairedRates = field(default_factory=PairedRates)
    """Errors by ear."""

    def add(self, pair: Pair) -> None:
        self.answered += 1
        self.unequal += not pair.equal
        m, u = pair.monolith.wrong, pair.unit.wrong
        if m is not None and u is not None and pair.reference:
            self.rates.add(pair.utterance, m, u, pair.reference)


class Tally:
    """All pairs of a run so far."""

    def __init__(self) -> None:
        self.pairs = 0
        self.all = Group()
        self.groups: dict[str, Group] = {}
        """By 'short' ... and 'voice amber' ..."""
        self.voices = PairedRates()
        """Wrong voices; one a pair."""
        self.sides: dict[SideName, SideTally] = {name: SideTally() for name in SIDES}

    def add(self, pair: Pair) -> None:
        self.pairs += 1
        self.sides["monolith"].add(pair.monolith, pair.voice)
        self.sides["unit"].add(pair.unit, pair.voice)
        if not pair.answered:
            return
        self.all.add(pair)
        for name in (pair.length, f"voice {pair.voice}"):
            self.groups.setdefault(name, Group()).add(pair)
        if pair.monolith.sounds_like and pair.unit.sounds_like:
            monolith, unit = (is_wrong_voice(s, pair.voice) for s in (pair.monolith, pair.unit))
            self.voices.add(pair.utterance, monolith, unit, 1)


def is_wrong_voice(side: Side, voice: str) -> bool:
    """Whether it sounds like another voice."""
    return side.sounds_like not in ("", voice)
