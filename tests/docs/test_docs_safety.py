"""docs/safety.md and the code agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.machine_tables import BLOCK, MACHINES, PAGE, rendered, table
from duplet_sim.mutants import MUTANTS
from tests.mutants.service_rules import RULES

ROOT = Path(__file__).parents[2]


def test_every_machines_table_is_the_codes() -> None:
    page = PAGE.read_text("utf-8")
    assert {match["name"] for match in BLOCK.finditer(page)} == set(MACHINES)
    assert page == rendered(page), "run `make tables`"


def test_a_table_has_a_row_an_input_and_says_what_is_done() -> None:
    states, inputs, _ = MACHINES["decode"]
    lines = table("decode").splitlines()
    assert len(lines) == 2 + len(list(inputs))
    assert all(line.count(" | ") == len(list(states)) for line in (lines[0], *lines[2:]))
    (died,) = [line for line in lines if line.startswith("| **WRITER_DIED**")]
    assert died.endswith("| fail free | · | · | · | prove |")


def test_a_changed_table_is_noticed() -> None:
    page = PAGE.read_text("utf-8")
    assert rendered(page.replace("| fail free |", "| ignore |")) == page


@pytest.mark.parametrize("rule", [f"S{number}" for number in range(1, 13)])
def test_every_rule_is_there(rule: str) -> None:
    assert f"**{rule}**" in PAGE.read_text("utf-8")


FAULTS = PAGE.read_text("utf-8").partition("## Faults found so far\n")[2]
ROWS = [line.split(" | ") for line in FAULTS.splitlines() if line.startswith("| ")][1:]
KNOWN = {mutant.name for mutant in MUTANTS} | {rule.name for rule in RULES}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| ")[:50])
def test_what_brings_a_fault_back_exists(row: list[str]) -> None:
    by = row[-1]
    mutants = set(re.findall("“([^”]+)”", by))
    assert mutants <= KNOWN
    tests = re.findall(r"`(tests/[^`]+\.py)(?:::(\w+))?`", by)
    assert mutants or tests
    for path, name in tests:
        text = (ROOT / path).read_text("utf-8")
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.M), (path, name)


def test_the_rules_of_the_services_are_those_that_are_switched_off() -> None:
    page = PAGE.read_text("utf-8")
    section = page.partition("## Rules outside the simulator\n")[2].partition("\n## ")[0]
    assert sorted(re.findall("“([^”]+)”", section)) == sorted(rule.name for rule in RULES)
