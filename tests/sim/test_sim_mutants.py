"""Each rule that is turned off breaks the invariant that its mutant names."""

from __future__ import annotations

import pytest

from duplet_sim.mutant import Mutant
from duplet_sim.mutants import MUTANTS, judge, main
from duplet_sim.simulator import Simulator


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_mutant_is_killed_by_the_invariant_it_names(mutant: Mutant) -> None:
    verdict = judge(mutant)
    assert verdict.killed, verdict.how


def test_a_mutant_is_gone_after_its_run() -> None:
    for mutant in MUTANTS:
        if mutant.every:
            judge(mutant)
    for seed in range(20):
        Simulator(seed).run()


def test_an_unharmed_core_is_no_killed_mutant() -> None:
    # The harness must be able to say "alive": a patch that changes nothing.
    idle = Mutant("nothing", "late-write", lambda stack: None, seeds=50)
    assert not judge(idle).killed
    always = Mutant("nothing", "liveness", lambda stack: None, seeds=20, every=True)
    assert not judge(always).killed


def test_names_are_unique_and_canaries_are_there() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert any(mutant.every for mutant in MUTANTS)


def test_the_last_line_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "canary"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 mutants killed"
