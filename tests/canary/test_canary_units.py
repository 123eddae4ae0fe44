"""The canary between a monolith and a unit of real processes, one of them damaged on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from duplet_unit.canary_command import DIFFERENT, NOT_ENOUGH
from duplet_unit.commands import app
from duplet_unit.terminal import WRONG_USAGE

STARTS_S = 400
"""Seven processes start, on a machine that may do other things."""


def canary(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["canary", *arguments])


def of_tiny(*arguments: str) -> Result:
    """Rows alone: the tiny model says nothing."""
    common = ("--start", "--model", "tiny", "--recogniser", "none", "--lengths", "short", "--json")
    return canary(*common, *arguments)


def fields(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(STARTS_S)
def test_a_sound_unit_says_the_same(tmp_path: Path) -> None:
    log = tmp_path / "canary.jsonl"
    result = of_tiny("--pairs", "4", "--log", str(log))
    assert result.exit_code == NOT_ENOUGH, result.output
    assert fields(result)["why"] == "rows equal in 4 of 4 pairs; 200 are asked for"
    assert fields(result)["kv"] == "kv checks 4, mismatches 0"
    assert len(log.read_text().splitlines()) == 5


@pytest.mark.timeout(STARTS_S)
def test_damaged_kv_raises_the_alarm_and_no_check_notices() -> None:
    result = of_tiny("--pairs", "6", "--inject", "1", "--at-once", "2")
    assert result.exit_code == DIFFERENT, result.output
    found = fields(result)
    assert found["verdict"] == "different"
    assert found["unequal"] >= 4
    assert found["kv"] == (
        "kv checks 6, mismatches 0; damaged on purpose: 1 of every prompt's pages"
    ), "from decode's setting to lb's answer"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give either --start, or both --monolith and --unit"),
        (("--monolith", "localhost:1"), "--monolith and --unit go together"),
        (("--start", "--unit", "localhost:1"), "give either --start"),
        (
            ("--monolith", "localhost:1", "--unit", "localhost:2", "--inject", "1"),
            "--inject needs --start",
        ),
        (
            ("--monolith", "localhost:1", "--unit", "localhost:1"),
            "is on both sides",
        ),
        (("--start", "--model", "tiny"), "--model tiny has no voice to hear"),
        (("--start", "--lengths", "tall"), "'tall' is not a valid Length"),
        (("--start", "--lengths", "short,short"), "names one twice"),
        (("--start", "--pairs=-1"), "greater than or equal to 0"),
        (("--start", "--recogniser", "cat"), "'cat' is not one of"),
    ],
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], told: str) -> None:
    result = canary(*arguments)
    assert result.exit_code == WRONG_USAGE
    said = " ".join(result.output.replace("│", " ").split())
    assert told in said


def test_sides_that_are_not_there_are_told() -> None:
    result = canary("--monolith", "127.0.0.1:8", "--unit", "127.0.0.1:9", "--pairs", "1")
    assert result.exit_code == 1
    assert "no unit answers there" in result.output
