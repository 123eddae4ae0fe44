"""What the sums mean: the verdict at the end, and the alarm on the way there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from duplet_canary.equivalence import Difference
from duplet_canary.tally import Tally

ENOUGH_EQUAL_PAIRS = 200
"""Without any unequal pair among so many, at most 1.5 % of all pairs are unequal (with 95 %
confidence); those would have to be 33 points worse on average to move the rate by half a point."""

ENOUGH_POWER = 0.8
FEW_CLUSTERS = 8
"""Fewer utterances say nothing about how much pairs scatter."""
ENOUGH_CLUSTERS = 30
"""So many before two sides may be called equivalent by ear."""

ALARM_CONFIDENCE = 0.999
"""The alarm looks after every pair, so that it asks for more than the verdict, which looks once."""

UNINTELLIGIBLE = 0.5
"""Error rate of the monolith from which an ear that hears no difference has heard nothing."""

MOST_FAILURES = 0.01
"""Share of pairs that one side may fail more often than the other; two always may."""


class Verdict(StrEnum):
    EQUIVALENT = "equivalent"
    DIFFERENT = "different"
    NOT_ENOUGH_PAIRS = "not enough pairs"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and the reason for it."""

    verdict: Verdict
    why: str

    def __str__(self) -> str:
        return f"{self.verdict} ({self.why})"


def find_alarm(tally: Tally, margin: float, *, rows_must_equal: bool) -> str:
    """Why somebody should look now; empty while all is well."""
    if rows_must_equal and tally.all.unequal:
        return f"rows unequal in {tally.all.unequal} of {tally.all.answered} pairs"
    failed, spared = (tally.sides[name].failures.total() for name in ("unit", "monolith"))
    if failed - spared > max(2, MOST_FAILURES * tally.pairs):
        reasons = ", ".join(f"{n} {name}" for name, n in tally.sides["unit"].failures.items())
        return (
            f"the unit failed {failed} of {tally.pairs} requests, the monolith {spared}: {reasons}"
        )
    voices = tally.voices.difference()
    if voices is not None and _is_known(voices) and voices.excludes_zero(ALARM_CONFIDENCE):
        return (
            f"{tally.sides['unit'].wrong_voices} answers of the unit sound like another voice, "
            f"{tally.sides['monolith'].wrong_voices} of the monolith"
        )
    heard = tally.all.rates.difference()
    if (
        heard is not None
        and _is_known(heard)
        and heard.excludes_zero(ALARM_CONFIDENCE)
        and not heard.is_within(margin)
    ):
        return f"the error rates differ by {100 * heard.mean:+.2f} points"
    return ""


def judge(tally: Tally, margin: float, *, rows_must_equal: bool) -> Judgement:
    """The verdict over all pairs so far. `margin`: of the error rates, as a share.

    Equal rows sound equal, so where rows must be equal and are, in enough pairs, the rates need
    no statistics. Elsewhere 'equivalent' is said only by an equivalence test with power.
    """
    alarm = find_alarm(tally, margin, rows_must_equal=rows_must_equal)
    if alarm:
        return Judgement(Verdict.DIFFERENT, alarm)
    answered, unequal = tally.all.answered, tally.all.unequal
    if rows_must_equal:
        why = f"rows equal in {answered} of {answered} pairs"
        if answered < ENOUGH_EQUAL_PAIRS:
            why = f"{why}; {ENOUGH_EQUAL_PAIRS} are asked for"
            return Judgement(Verdict.NOT_ENOUGH_PAIRS, why)
        return Judgement(Verdict.EQUIVALENT, why)
    heard = tally.all.rates.difference()
    if heard is None:
        return Judgement(
            Verdict.NOT_ENOUGH_PAIRS, f"nobody listened; rows unequal in {unequal} of {answered}"
        )
    return _judge_by_ear(heard, margin)


def _judge_by_ear(heard: Difference, margin: float) -> Judgement:
    low, high = heard.interval()
    interval = (
        f"difference {100 * heard.mean:+.2f} points, 95 % interval "
        f"[{100 * low:+.2f}, {100 * high:+.2f}]"
    )
    if heard.monolith_rate > UNINTELLIGIBLE:
        rate = f"{100 * heard.monolith_rate:.0f} % of the monolith is misheard"
        return Judgement(Verdict.NOT_ENOUGH_PAIRS, f"{rate}: no number of pairs would tell")
    power = heard.power(margin)
    accepted = heard.is_within(margin) and power >= ENOUGH_POWER
    if accepted and heard.clusters >= ENOUGH_CLUSTERS and heard.standard_error > 0:
        told = f"inside ±{100 * margin:g}, power {power:.2f}"
        return Judgement(Verdict.EQUIVALENT, f"{interval}, {told}")
    if _is_known(heard) and heard.excludes_zero() and not heard.is_within(margin):
        return Judgement(Verdict.DIFFERENT, interval)
    needed = max(heard.pairs_needed(ENOUGH_POWER, margin), ENOUGH_CLUSTERS)
    return Judgement(
        Verdict.NOT_ENOUGH_PAIRS,
        f"{interval}; {heard.pairs} pairs have power {power:.2f}, "
        f"{needed} would have {ENOUGH_POWER:g}",
    )


def _is_known(difference: Difference) -> bool:
    """Whether there are enough utterances to trust the interval at all."""
    return difference.clusters >= FEW_CLUSTERS
