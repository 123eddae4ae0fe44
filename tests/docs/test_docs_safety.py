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


def test_what_brings_a_fault_back_exists() -> None:
    page = PAGE.read_text("utf-8")
    mutants = set(re.findall(r"mutant “([^”]+)”", page))
    tests = set(re.findall(r"`(tests/[^`]+\.py)::(\w+)`", page))
    assert mutants
    assert mutants <= {mutant.name for mutant in MUTANTS}
    assert tests
    for path, name in tests:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), (path, name)


def test_the_rules_of_the_services_are_those_that_are_switched_off() -> None:
    page = PAGE.read_text("utf-8")
    section = page.partition("## Rules outside the simulator\n")[2].partition("\n## ")[0]
    assert sorted(re.findall("“([^”]+)”", section)) == sorted(rule.name for rule in RULES)
