"""What counts as slower, and what earlier figures are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.regression import (
    GROUPS,
    Figures,
    Group,
    Verdict,
    Watch,
    beat_s,
    earlier_figures,
    render,
    run,
)
from bench.results import MEASUREMENTS, Result, describe_machine, read_results

COST = Watch("cost", 0.25)
RATE = Watch("rate", 0.1, higher_is_better=True)
ONE = Result("cost", 2.0, "ratio", "", "box", "2026-01-01", "abc", "python", 0.5)


@pytest.mark.parametrize(
    ("watch", "value", "before", "word"),
    [
        (COST, 1.25, 1.0, "ok"),
        (COST, 1.26, 1.0, "slower"),
        (COST, 0.81, 1.0, "ok"),
        (COST, 0.79, 1.0, "faster"),
        (COST, 0.0, 1.0, "faster"),
        (COST, 5.0, None, "new"),
        (COST, 0.1, 0.0, "slower"),
        (COST, 0.0, 0.0, "ok"),
        (RATE, 0.92, 1.0, "ok"),
        (RATE, 0.9, 1.0, "slower"),
        (RATE, 1.09, 1.0, "ok"),
        (RATE, 1.12, 1.0, "faster"),
        (RATE, 0.0, 1.0, "slower"),
    ],
)
def test_a_word_for_each_figure(
    watch: Watch, value: float, before: float | None, word: str
) -> None:
    assert Verdict(watch, value, before).word == word


def test_this_machines_newest_figures_come_first() -> None:
    other = replace(ONE, machine="other", value=9.0)
    newer = replace(ONE, value=3.0)
    assert earlier_figures([], "box") == ("", {})
    assert earlier_figures([ONE, newer, other], "box") == ("box", {"cost": 3.0})
    assert earlier_figures([ONE, newer, other], "new") == ("other", {"cost": 9.0})


def grouped(values: Iterator[float], watch: Watch = COST) -> Group:
    """A group that measures the next of the values each time."""

    async def measure() -> Figures:
        return {watch.case: next(values)}

    return Group("made up", measure, [watch])


def known(folder: Path, value: float, watch: Watch = COST) -> None:
    """Write down that the figure was so on this machine."""
    assert run([grouped(iter([value]), watch)], folder, update=True) == 0


def test_a_run_that_updates_is_what_the_next_is_compared_with(tmp_path: Path) -> None:
    known(tmp_path, 1.0)
    [noted] = read_results(tmp_path / "bench.jsonl")
    assert (noted.case, noted.value, noted.machine) == ("cost", 1.0, describe_machine())
    assert noted.command.startswith("python -m bench.regression")
    assert run([grouped(iter([1.2]))], tmp_path, update=False) == 0
    assert run([grouped(iter([1.3, 1.3]))], tmp_path, update=False) == 1
    known(tmp_path, 2.0)
    assert run([grouped(iter([1.3]))], tmp_path, update=False) == 0
    assert len(read_results(tmp_path / "bench.jsonl")) == 2


def test_what_seems_slower_is_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known(tmp_path, 1.0)
    known(tmp_path, 1.0, RATE)
    assert run([grouped(iter([1.9, 1.1]))], tmp_path, update=False) == 0
    assert run([grouped(iter([0.5, 0.95]), RATE)], tmp_path, update=False) == 0
    capsys.readouterr()
    assert run([grouped(iter([1.9, 1.8]))], tmp_path, update=False) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "slower: cost"
    assert said[-2].split() == ["cost", "1.8", "1", "+80.0%", "25%", "slower"]


def test_a_group_that_does_not_measure_what_it_promises_fails(tmp_path: Path) -> None:
    async def measure() -> Figures:
        return {}

    with pytest.raises(KeyError, match="cost"):
        run([Group("made up", measure, [COST])], tmp_path, update=False)


def test_cases_are_unique_and_have_earlier_figures() -> None:
    cases = [watch.case for group in GROUPS for watch in group.watches]
    assert len(set(cases)) == len(cases)
    noted = {result.case for result in read_results(MEASUREMENTS / "bench.jsonl")}
    assert set(cases) <= noted, "run `make bench UPDATE=1`"


def test_a_new_figure_has_nothing_to_be_compared_with() -> None:
    line = render([Verdict(COST, 1.5, None)]).splitlines()[1]
    assert line.split() == ["cost", "1.5", "-", "-", "25%", "new"]


def test_a_beat_takes_time() -> None:
    assert 0 < beat_s() < 10
