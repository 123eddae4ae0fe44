"""docs/logs.md tells of every event that a service logs, and of no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from duplet_core.ids import Role
from duplet_decode.__main__ import DecodeSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "logs.md").read_text("utf-8")
ROW = re.compile(r"^\| `(?P<event>.+?)` \| (?P<level>\w+) \| (?P<of>[\w, ]+) \| (?P<text>.+) \|$")

FOLDERS = [
    *(ROOT / "libs").glob("*/duplet_*"),
    *(ROOT / "services").glob("*/duplet_*"),
]
LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
OF_MACHINES = "info"
"""The level of the effect `Log`."""

PASSED_ON = {"effect.event": "of `Log`, found where it is made", "warning": "of settings"}
"""Calls whose event is a variable."""
OF_SETTINGS = ("damage_pages is …", "warning")
ENGINE, ALL = "engine", "all"


def rows() -> list[dict[str, str]]:
    return [found.groupdict() for line in PAGE.splitlines() if (found := ROW.match(line))]


def sources() -> Iterator[tuple[Path, ast.Call]]:
    for folder in FOLDERS:
        for path in sorted(folder.glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    yield path, node


def logged() -> Iterator[tuple[str, str, Path]]:
    """(event, level, where) of every call that logs.

    Raises:
        AssertionError: an event is made of parts, so that no page can name it.
    """
    for path, call in sources():
        if isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS and call.args:
            level = call.func.attr
        elif isinstance(call.func, ast.Name) and call.func.id == "Log":
            level = OF_MACHINES
        else:
            continue
        event = call.args[0]
        if isinstance(event, ast.Constant):
            yield str(event.value), level, path
        else:
            assert ast.unparse(event) in PASSED_ON, f"{path.name}: {ast.unparse(call)}"


def test_page_and_code_name_the_same_events() -> None:
    of_page = [(row["event"], row["level"]) for row in rows()]
    assert len(of_page) == len(set(of_page)), "an event stands twice"
    of_code = {(event, level) for event, level, _ in logged()}
    assert len(of_code) > 40
    assert set(of_page) == of_code | {OF_SETTINGS}


def test_settings_have_one_warning() -> None:
    [told] = DecodeSettings(damage_pages=1).warnings()
    assert told.startswith(OF_SETTINGS[0].rstrip("…"))


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['event']}, {row['level']}")
def test_who_says_it_is_who_has_it(row: dict[str, str]) -> None:
    """Where one service alone has the call, the page names that service alone."""
    said_by = row["of"].split(", ")
    assert set(said_by) <= {*Role, ENGINE, ALL}
    where = {p for event, level, p in logged() if (event, level) == (row["event"], row["level"])}
    packages = {path.parent.name.removeprefix("duplet_") for path in where}
    if packages and packages <= {*Role, ENGINE}:
        assert set(said_by) == packages
