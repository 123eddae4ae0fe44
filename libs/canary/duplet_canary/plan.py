"""What a run of the canary does, and the record of each of its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from duplet_canary.ear import Heard
from duplet_canary.speaker import Spoken
from duplet_canary.utterances import Utterance, digest_of

SEED_STEP = 1 << 20
"""Between the seeds of the two sides, where they are to differ."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What must not change while pairs are added up."""

    model: str
    """Name and fingerprint of the model on both sides."""
    recogniser: str
    """Name and version of what listens."""
    texts: str
    """Digest of the utterances."""
    voices: tuple[str, ...]
    first_seed: int = 0
    other_seeds: bool = False
    """The sides draw from different seeds: rows differ, and error rates must not."""
    damaged_pages: int = 0
    """Pages of every prompt that the unit damages, on purpose."""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_fields(found: dict[str, Any]) -> Plan:
        """
        Raises:
            TypeError, KeyError: not a plan of this version.
        """
        return Plan(**{**found, "voices": tuple(found["voices"])})

    def differences(self, other: Plan) -> list[str]:
        """Where another plan differs, a line a field."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(Plan))
        return [f"{name}: {own!r}, not {others!r}" for name, own, others in pairs if own != others]


@dataclass(frozen=True, slots=True)
class Job:
    """One pair that is to be sent."""

    number: int
    utterance: Utterance
    voice: str
    monolith_seed: int
    unit_seed: int

    @property
    def max_rows(self) -> int:
        """More than anybody needs to say it: speech takes one to two rows a letter."""
        return 40 + 3 * len(self.utterance.text)


class Jobs:
    """The pairs of a plan, by number, without end: every utterance by turns, the voices too."""

    def __init__(self, plan: Plan, utterances: Sequence[Utterance]) -> None:
        assert plan.texts == digest_of(utterances)
        self._plan = plan
        self._utterances = utterances

    def job(self, number: int) -> Job:
        """The same for ever."""
        count, voices = len(self._utterances), self._plan.voices
        seed = self._plan.first_seed + number
        return Job(
            number=number,
            utterance=self._utterances[number % count],
            # Shifted after each round, so that every voice says every utterance.
            voice=voices[(number + number // count) % len(voices)],
            monolith_seed=seed,
            unit_seed=seed + SEED_STEP if self._plan.other_seeds else seed,
        )


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a pair, as the log keeps it."""

    digest: str
    rows: int
    finish: str
    error: str
    ttft_s: float | None
    ttfa_s: float | None
    rows_per_second: float | None
    wrong: int | None
    """Errors by ear; None where nobody listened."""
    sounds_like: str

    @staticmethod
    def of(spoken: Spoken, heard: Heard | None) -> Side:
        return Side(
            digest=spoken.digest,
            rows=len(spoken.rows),
            finish=spoken.finish,
            error=spoken.error,
            ttft_s=spoken.ttft_s,
            ttfa_s=spoken.ttfa_s,
            rows_per_second=spoken.rows_per_second,
            wrong=None if heard is None else heard.errors,
            sounds_like="" if heard is None else heard.voice,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """One utterance from both sides."""

    number: int
    utterance: int
    length: str
    voice: str
    reference: int
    """Units (phonemes or words) that were to be heard; 0 where nobody listened."""
    equal: bool
    """Rows and end are the same."""
    monolith: Side
    unit: Side

    @property
    def answered(self) -> bool:
        """Both sides."""
        return not self.monolith.error and not self.unit.error

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_fields(found: dict[str, Any]) -> Pair:
        """
        Raises:
            TypeError, KeyError: not a pair of this version.
        """
        sides = {name: Side(**found[name]) for name in ("monolith", "unit")}
        return Pair(**{**found, **sides})
