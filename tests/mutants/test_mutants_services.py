"""Each rule of the services that is switched off is noticed, and the harness can say otherwise."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.mutants.all_mutants import run_all
from tests.mutants.broken_run import ROOT, Report
from tests.mutants.rule import Rule
from tests.mutants.rules_kvproxy import HEAD
from tests.mutants.run_mutants import Verdict, judge_all, judge_unharmed, open_pool
from tests.mutants.service_rules import RULES

LIMIT_S = 600
"""Of all mutants, on a busy machine."""
FIRST = replace(RULES[0], tests=RULES[0].tests[:1])


def judge_one(rule: Rule) -> Verdict:
    with open_pool(1) as pool:
        ((_, verdict),) = judge_all(pool, [rule])
    return verdict


@pytest.mark.timeout(LIMIT_S)
def test_every_rule_that_is_off_is_noticed() -> None:
    """But for the slow ones, which `make mutants` switches off as well."""
    quick = [rule for rule in RULES if not rule.slow]
    assert len(quick) >= 0.85 * len(RULES)
    command = [sys.executable, "-m", "tests.mutants.run_mutants", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    rest = [line for line in done.stdout.splitlines() if not line.startswith("killed")]
    assert done.returncode == 0, "\n".join(rest) + done.stderr
    assert rest[-1].startswith(f"{len(quick)} of {len(quick)} mutants")


def test_the_last_line_counts_all_mutants(capfd: pytest.CaptureFixture[str]) -> None:
    said = "print('killed  one'); print('{} mutants killed in 3 s')"
    parts = tuple(("-c", said.format(killed)) for killed in ("3 of 3", "2 of 2"))
    assert run_all(parts) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "5 of 5 mutants killed"
    assert run_all((*parts, ("-c", said.format("1 of 2")))) == 1
    assert capfd.readouterr().out.splitlines()[-1] == "6 of 7 mutants killed"
    assert run_all((*parts, ("-c", "raise SystemExit(1)"))) == 1


def test_a_rule_that_is_not_off_is_alive() -> None:
    verdict = judge_one(replace(FIRST, becomes=FIRST.line))
    assert verdict.alive and not verdict.killed
    assert verdict.how == "not noticed by test_what_is_refused_later_is_not_called_refused"


def test_one_test_that_passes_keeps_a_mutant_alive() -> None:
    more = f"{HEAD}::test_head_and_rest_are_the_copy"
    verdict = judge_one(replace(FIRST, tests=(*FIRST.tests, more)))
    assert verdict.alive and not verdict.killed
    assert verdict.how == "not noticed by test_head_and_rest_are_the_copy"


@pytest.mark.parametrize(
    "report",
    [
        Report(failed={FIRST.tests[0]: "AssertionError"}, loaded=[FIRST.module]),
        Report(loaded=[FIRST.module]),
        Report(passed=[*FIRST.tests]),
        Report(passed=[*FIRST.tests], loaded=[FIRST.module], broke=["a file"]),
    ],
    ids=["a test fails", "none ran", "not loaded", "could not be run"],
)
def test_the_canary_sees_what_has_nothing_to_do_with_a_rule(report: Report) -> None:
    assert judge_unharmed(report, [FIRST])
    well = Report(passed=[f"{FIRST.tests[0]}[3]"], loaded=[FIRST.module])
    assert not judge_unharmed(well, [FIRST])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"line": "    nobody wrote this"}, "has 0 times"),
        ({"line": "self"}, "times 'self'"),
        ({"module": "duplet_core.nosuch"}, "there is no module"),
        ({"becomes": "        raise nosuch"}, "the mutant itself is wrong"),
        ({"becomes": "        raise ("}, "could not be run"),
        ({"tests": (f"{HEAD}::test_nosuch",)}, "USAGE_ERROR"),
        ({"tests": ("tests/core/test_core_link.py",)}, "was not loaded"),
    ],
    ids=["gone", "twice", "no module", "no name", "no Python", "no test", "not loaded"],
)
def test_what_says_nothing_of_the_rule_is_no_kill(changed: dict[str, str], why: str) -> None:
    verdict = judge_one(replace(FIRST, **changed))  # type: ignore[arg-type]
    assert not verdict.killed and not verdict.alive
    assert why in verdict.how


def test_names_are_unique() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
