"""What a run amounts to."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from duplet_load.generator import Outcome
from duplet_load.plots import plot_run
from duplet_load.record import Gaps, Record
from duplet_load.summary import describe, save, summarize

NS = 1_000_000_000


def outcome() -> Outcome:
    made = Outcome(began_ns=5 * NS, ended_ns=15 * NS, kv_checks=99)
    for n in range(100):
        record = Record(n, 1_000, n / 10, lag_s=0.001 * n, outcome="LENGTH", rows=100)
        record.ttft_s, record.ttfa_s = n / 100, n / 50
        record.rows_per_second = 40.0 + n
        record.cached_rows = 750
        made.records.append(record)
        made.gaps.add(0.01)
    made.records[7].stalls, made.records[7].stalled_s = 3, 0.25
    made.records.append(Record(100, 1_000, 0.0, outcome="OVERLOADED"))
    made.gaps.add(1.0)
    return made


def test_figures_of_a_run() -> None:
    found = summarize(outcome())
    assert found["requests"] == 101
    assert found["outcomes"] == {"LENGTH": 100, "OVERLOADED": 1}
    assert found["rows_per_second"] == 1_000
    assert found["ttft_s"] == {"p50": 0.49, "p90": 0.89, "p95": 0.94, "p99": 0.98, "max": 0.99}
    assert found["stream_rows_per_second"] == {"min": 40.0, "p1": 40.0, "p50": 89.0}
    assert found["streams_below_floor"] == 2
    assert (found["stalls"], found["stalled_streams"], found["stalled_s"]) == (3, 1, 0.25)
    assert found["gap_s"]["p50"] == pytest.approx(0.01, rel=0.03)
    assert found["gap_s"]["max"] == pytest.approx(1.0, rel=0.03)
    assert found["cached_share"] == 0.75
    text = describe(found)
    assert "100 LENGTH, 1 OVERLOADED" in text
    assert "2 streams below 42" in text


def test_a_run_without_an_answer_has_no_figures() -> None:
    found = summarize(Outcome(began_ns=1, ended_ns=1))
    assert found["ttfa_s"]["p99"] is None
    assert found["rows_per_second"] is None
    assert describe(found)


def test_files_of_a_run(tmp_path: Path) -> None:
    save(outcome(), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["requests"] == 101
    lines = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == list(range(101))
    with (tmp_path / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[7]["stalls"] == "3"
    plot_run(outcome().records, tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 10_000


def test_gaps_merge_and_keep_two_percent() -> None:
    one, two = Gaps(), Gaps()
    for n in range(1, 1_001):
        one.add(n / 1_000)
    two.merge({str(key): count for key, count in one.classes.items()})
    two.merge({str(key): count for key, count in one.classes.items()})
    for share in (0.01, 0.5, 0.9, 0.99):
        found = two.quantile(share)
        assert found is not None
        assert share <= found <= share * 1.04
    assert Gaps().quantile(0.5) is None
