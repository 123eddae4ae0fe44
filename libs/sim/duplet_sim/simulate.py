"""Runs seeds, and tells the story of one."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import Any

from duplet_core.effects import Effect, Log
from duplet_sim.parts import Process
from duplet_sim.simulator import Simulator
from duplet_sim.violation import Violation


def trace_of(seed: int) -> list[str]:
    """The story of a seed, a line an event or effect; it ends with the violation, if any."""
    lines: list[str] = []
    simulator = Simulator(seed)

    def event(process: Process, what: Any) -> None:
        name = type(what).__name__ if type(what).__name__ == "Timer" else repr(what)
        lines.append(f"{simulator.now:6} {process.instance:9} <- {name}")

    def effect(process: Process, what: Effect) -> None:
        if not isinstance(what, Log):
            lines.append(f"{simulator.now:6} {process.instance:9} -> {what!r}")

    simulator.on_event, simulator.on_effect = event, effect
    try:
        simulator.run()
    except Violation as violation:
        lines.append(f"{simulator.now:6} VIOLATION {violation}")
    return lines


def trace_hash(seed: int) -> str:
    return hashlib.sha256("\n".join(trace_of(seed)).encode()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate a unit under faults, seed by seed.")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--trace", action="store_true", help="tell the story of --seed")
    options = parser.parse_args(argv)
    if options.trace:
        print("\n".join(trace_of(options.seed)))
        return 0
    began, events, violations = time.process_time(), 0, 0
    for seed in range(options.seed, options.seed + options.seeds):
        simulator = Simulator(seed)
        try:
            simulator.run()
        except Violation as violation:
            violations += 1
            print(f"seed {seed}: {violation}")
        events += simulator.events
    seconds = time.process_time() - began
    print(
        f"{options.seeds} schedules, {events // options.seeds} events each, "
        f"{options.seeds / seconds:.0f} schedules a CPU second, {violations} violations"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
