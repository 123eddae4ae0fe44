"""How overload's phases are judged."""

from __future__ import annotations

from bench.overload import report_phase, split
from bench.results import Report
from duplet_load.generator import Outcome
from duplet_load.record import Record


def record(outcome: str, *, rate: float = 60.0, stalls: int = 0, took_s: float = 0.02) -> Record:
    made = Record(0, 100, 0.0, outcome=outcome, rows_per_second=rate, stalls=stalls)
    made.took_s, made.lag_s = took_s, 0.25
    return made


def judged(records: list[Record], prefilled: int) -> dict[str, float]:
    report = Report("overload", "test")
    report_phase(report, split("p", Outcome(records=records), prefilled))
    return {result.case.removeprefix("p: "): result.value for result in report.results}


def test_what_was_promised_is_counted() -> None:
    good = [record("LENGTH"), record("STOP"), record("OVERLOADED", took_s=0.041)]
    found = judged(good, prefilled=2)
    assert (found["admitted"], found["refused"], found["ended otherwise"]) == (2, 1, 0)
    assert found["refused after, p99"] == 41
    assert found["sent late, p99"] == 250
    assert found["prompts computed for nobody"] == 0
    assert found["admitted streams that stalled"] == 0
    assert found["admitted streams below 42 rows/s"] == 0


def test_what_was_broken_is_counted() -> None:
    bad = [record("LENGTH", rate=41.9, stalls=1), record("KV_MISMATCH"), record("OVERLOADED")]
    found = judged(bad, prefilled=2)
    assert found["ended otherwise"] == 1
    assert found["prompts computed for nobody"] == 1
    assert found["admitted streams that stalled"] == 1
    assert found["admitted streams below 42 rows/s"] == 1
