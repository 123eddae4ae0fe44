"""Runs every mutant against the simulator until the invariant it names breaks."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace

from duplet_core.ids import Role
from duplet_sim import rules, rules_again, rules_shared, rules_told
from duplet_sim.mutant import Mutant
from duplet_sim.scopes import SCOPES
from duplet_sim.search import Explorer
from duplet_sim.simulator import Simulator
from duplet_sim.swarm import draw, host_config
from duplet_sim.violation import Violation

MUTANTS = (*rules.MUTANTS, *rules_again.MUTANTS, *rules_shared.MUTANTS, *rules_told.MUTANTS)


@dataclass(frozen=True, slots=True)
class Verdict:
    killed: bool
    how: str


def judge(mutant: Mutant, seeds: int | None = None) -> Verdict:
    """Whether the mutant breaks the invariant that it names, within its budget."""
    with ExitStack() as stack:
        mutant.apply(stack)
        if mutant.search:
            return _search(mutant)
        return _simulate(mutant, mutant.seeds if seeds is None else seeds)


def _search(mutant: Mutant) -> Verdict:
    explorer = Explorer(SCOPES[mutant.search])
    try:
        explorer.run()
    except Violation as violation:
        found = violation.invariant == mutant.invariant
        return Verdict(found, f"{violation.invariant} after {len(explorer.parents)} states")
    return Verdict(False, f"no violation in {len(explorer.parents)} states")


def _simulate(mutant: Mutant, seeds: int) -> Verdict:
    others: dict[str, int] = {}
    failed = 0
    for seed in range(seeds):
        found = _violation(mutant, seed)
        if found == mutant.invariant:
            failed += 1
            if not mutant.every:
                return Verdict(True, f"seed {seed}")
        elif found:
            others[found] = others.get(found, 0) + 1
            failed += mutant.every
    if mutant.every:
        return Verdict(failed == seeds, f"{failed} of {seeds} seeds")
    return Verdict(False, f"alive after {seeds} seeds, others broken: {others or 'none'}")


def _violation(mutant: Mutant, seed: int) -> str:
    """The invariant that breaks under this seed, or nothing."""
    swarm = draw(seed)
    host = host_config(swarm.config.decode, 64) if mutant.host else None
    swarm = replace(
        swarm,
        config=replace(swarm.config, host=host),
        timed=swarm.timed | mutant.timed,
        chances=swarm.chances | mutant.chances,
        requests=mutant.requests or swarm.requests,
        probe=swarm.probe or mutant.every,
    )
    simulator = Simulator(seed, swarm)
    if mutant.old_writer:
        simulator.machines[Role.KVPROXY] = [rules.OldWriter]
    try:
        simulator.run()
    except Violation as violation:
        return violation.invariant
    except LookupError:
        return "crash"  # a machine without one of its rules may not find what it looks for
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Turn rules of the core off, one at a time.")
    parser.add_argument("--only", help="mutants with this in their name")
    options = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if not options.only or options.only in m.name]
    killed = 0
    for mutant in chosen:
        verdict = judge(mutant)
        killed += verdict.killed
        word = "killed" if verdict.killed else "ALIVE"
        print(f"{word:7} {mutant.name}: {mutant.invariant}, {verdict.how}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
