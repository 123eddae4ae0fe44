"""The figures that benchmarks note, and the tables made of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.admission_unit import bucket_quantile
from bench.results import Report, Result, quantile, read_results, render_table, write_table

ONE = Result("first", 1.25, "ms", "<= 2", "box", "2026-01-01", "abc", "python -m bench.x", 0.5)


def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed() -> None:
    values = list(range(1, 101))
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert quantile([7.0], 0.99) == 7.0
    assert quantile([3, 1, 2], 0.5) == 2


def test_a_histogram_gives_the_bound_above_its_quantile() -> None:
    before = {0.001: 5.0, 0.002: 5.0, math.inf: 6.0}
    after = {0.001: 5.0, 0.002: 104.0, math.inf: 106.0}
    assert bucket_quantile(before, after, 0.5) == 0.002
    assert bucket_quantile(before, after, 1.0) == math.inf
    assert bucket_quantile({}, before, 0.5) == 0.001
    with pytest.raises(ValueError, match="no admission"):
        bucket_quantile(after, after, 0.5)


def test_a_report_appends_and_says_where_it_comes_from(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        report = Report("speed", machine="two cards")
        report.add("a case", value, "ms", "<= 3")
        path = report.save(tmp_path)
    first, second = read_results(path)
    assert (first.value, second.value) == (1.0, 2.0)
    assert set(json.loads(path.read_text().splitlines()[0])) >= {"commit", "command", "date"}
    assert second.machine.endswith("; two cards")
    assert second.command.startswith("python -m bench.speed")
    table = path.with_suffix(".md").read_text()
    assert "| a case |     2 | ms   | <= 3   |" in table
    assert "1 |" not in table.replace("| a case", "")


def test_a_table_keeps_the_newest_of_each_machine(tmp_path: Path) -> None:
    path = tmp_path / "speed.jsonl"
    results = [ONE, replace(ONE, machine="other"), replace(ONE, value=9.5, date="2026-01-02")]
    report = Report("speed")
    report.results = results
    report.save(tmp_path)
    write_table(path)
    sections = path.with_suffix(".md").read_text().split("## ")
    assert [section.split("\n")[0] for section in sections[1:]] == ["box", "other"]
    assert "9.5" in sections[1] and "1.25" not in sections[1]
    assert "2026-01-02" in sections[1] and "2026-01-01" not in sections[1]
    assert "1.25" in sections[2]


def test_a_table_is_aligned_markdown() -> None:
    assert render_table([ONE]).splitlines() == [
        "| case  | value | unit | budget |",
        "| ----- | ----: | ---- | ------ |",
        "| first |  1.25 | ms   | <= 2   |",
    ]
