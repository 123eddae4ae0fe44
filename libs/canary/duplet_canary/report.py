"""A run's result, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from duplet_canary.equivalence import Difference
from duplet_canary.tally import SIDES, Group, Tally, TimeName
from duplet_canary.verdict import Judgement

TARGET_POWERS = (0.8, 0.9)
_SHARES = {"p50": 0.5, "p95": 0.95}


def to_fields(
    tally: Tally, judgement: Judgement, margin: float, *, rows_must_equal: bool
) -> dict[str, Any]:
    """The result as JSON has it. Rates are shares, differences percentage points; None where
    nothing is known."""
    return {
        "verdict": judgement.verdict.value,
        "why": judgement.why,
        "pairs": tally.pairs,
        "answered": tally.all.answered,
        "unequal": tally.all.unequal,
        "rows_must_equal": rows_must_equal,
        "margin_points": 100 * margin,
        "heard": _difference_fields(tally.all.rates.difference(), margin),
        "groups": {
            name: {
                "answered": group.answered,
                "unequal": group.unequal,
                "heard": _difference_fields(group.rates.difference(), margin),
            }
            for name, group in sorted(tally.groups.items())
        },
        "sides": {name: _side_fields(tally, name) for name in SIDES},
    }


def describe(tally: Tally, judgement: Judgement, margin: float, *, rows_must_equal: bool) -> str:
    """The result as lines of text; the last one is the verdict."""
    lines = [
        f"{tally.pairs} pairs, {tally.all.answered} answered by both sides",
        _rows_line(tally.all, rows_must_equal=rows_must_equal),
        *_heard_lines(tally, margin),
        *_group_lines(tally),
        *_side_lines(tally),
        str(judgement),
    ]
    return "\n".join(lines)


def _rows_line(group: Group, *, rows_must_equal: bool) -> str:
    equal = group.answered - group.unequal
    meaning = "they must be" if rows_must_equal else "reported only"
    return f"rows equal in {equal} of {group.answered} pairs ({meaning})"


def _heard_lines(tally: Tally, margin: float) -> Iterator[str]:
    heard = tally.all.rates.difference()
    if heard is None:
        yield "nothing was heard"
        return
    points = 100 * margin
    yield (
        f"error rate: monolith {_percent(heard.monolith_rate)}, unit {_percent(heard.unit_rate)}; "
        f"{_interval(heard)}"
    )
    if not tally.all.unequal:
        yield "  no test is needed: equal rows sound equal"
        return
    accepted = "accepts" if heard.is_within(margin) else "does not accept"
    needed = ", ".join(f"{p:.0%}: {heard.pairs_needed(p, margin)}" for p in TARGET_POWERS)
    yield (
        f"  Student's t over {heard.clusters} utterances; equivalence test (two one-sided, "
        f"±{points:g} points) {accepted}, power {heard.power(margin):.2f}; pairs for power {needed}"
    )


def _group_lines(tally: Tally) -> Iterator[str]:
    for name, group in sorted(tally.groups.items()):
        line = f"  {name:14} {group.answered:6} pairs, {group.unequal} unequal"
        heard = group.rates.difference()
        if heard is not None:
            line += (
                f"; {_percent(heard.monolith_rate)}, {_percent(heard.unit_rate)}; "
                f"{_interval(heard)}"
            )
        yield line


def _side_lines(tally: Tally) -> Iterator[str]:
    for name in SIDES:
        side = tally.sides[name]
        first, audio = (_spread(side.times[kind]) for kind in (TimeName.TTFT, TimeName.TTFA))
        rate = _spread(side.times[TimeName.RATE])
        yield (
            f"{name:9} TTFT {_milliseconds(first)} ms, TTFA {_milliseconds(audio)} ms (p50, p95); "
            f"{_number(rate['p50'])} rows/s a stream; {side.at_limit} at their limit, "
            f"{side.wrong_voices} in another voice, {side.failures.total()} failed, "
            f"{side.not_now} turned away"
        )


def _side_fields(tally: Tally, name: Any) -> dict[str, Any]:
    side = tally.sides[name]
    return {
        "failures": dict(side.failures),
        "turned_away": side.not_now,
        "at_limit": side.at_limit,
        "rows": side.rows,
        "wrong_voices": side.wrong_voices,
        **{kind.value: _spread(times) for kind, times in side.times.items()},
    }


def _difference_fields(heard: Difference | None, margin: float) -> dict[str, Any] | None:
    if heard is None:
        return None
    low, high = heard.interval()
    return {
        "monolith_error_rate": heard.monolith_rate,
        "unit_error_rate": heard.unit_rate,
        "difference_points": 100 * heard.mean,
        "low_points": 100 * low if math.isfinite(low) else None,
        "high_points": 100 * high if math.isfinite(high) else None,
        "pairs": heard.pairs,
        "utterances": heard.clusters,
        "accepted": heard.is_within(margin),
        "power": heard.power(margin),
        "pairs_for_power": {f"{p:g}": heard.pairs_needed(p, margin) for p in TARGET_POWERS},
    }


def _spread(values: Iterable[float]) -> dict[str, float | None]:
    """The smallest value that at least the share of them does not exceed."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(_SHARES)
    return {
        name: ordered[max(0, math.ceil(share * len(ordered)) - 1)]
        for name, share in _SHARES.items()
    }


def _interval(heard: Difference) -> str:
    said = f"difference {100 * heard.mean:+.2f} points"
    low, high = heard.interval()
    # One utterance does not say how much they scatter.
    return f"{said} [{100 * low:+.2f}, {100 * high:+.2f}]" if math.isfinite(low) else said


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f} %"


def _milliseconds(spread: dict[str, float | None]) -> str:
    return ", ".join(_number(None if v is None else 1e3 * v) for v in spread.values())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
