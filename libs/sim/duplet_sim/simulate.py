"""Runs seeds, on one core or more, and tells the story of one."""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from duplet_core import machine
from duplet_sim.simulator import Simulator
from duplet_sim.story import tell
from duplet_sim.violation import Violation

_PORTION = 500
"""Seeds that one process runs before it tells what it found."""

_WORLDS = 10
"""A world is full of cycles. So many are collected at a time: soon enough for the next ones to
use the same memory, which the processor has at hand."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a portion of seeds came to."""

    seeds: int
    events: int
    cpu_s: float
    violations: tuple[str, ...]


def trace_hash(seed: int) -> str:
    """Equal stories have equal hashes."""
    return hashlib.sha256("\n".join(tell(seed)).encode()).hexdigest()


def simulate(first: int, count: int) -> Found:
    """Run `count` seeds from `first` on. The time is all that it takes, memory given back."""
    gc.collect()
    gc.freeze()
    gc.disable()
    began, events, violations = time.process_time(), 0, []
    for seed in range(first, first + count):
        simulator = Simulator(seed)
        try:
            simulator.run()
        except Violation as violation:
            violations.append(f"seed {seed}: {violation}")
        events += simulator.events
        if seed % _WORLDS == 0:
            gc.collect()
    seconds = time.process_time() - began
    gc.enable()
    gc.unfreeze()
    return Found(count, events, seconds, tuple(violations))


def simulate_all(first: int, count: int, jobs: int) -> Iterator[Found]:
    """The same in portions, by `jobs` processes."""
    starts = range(first, first + count, _PORTION)
    counts = [min(_PORTION, first + count - start) for start in starts]
    if jobs == 1:
        yield from map(simulate, starts, counts)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(simulate, starts, counts)


def _print_story(seed: int) -> None:
    try:
        print("\n".join(tell(seed)), flush=True)
    except BrokenPipeError:
        # Whoever read it has enough; Python would complain again when it closes its output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate a unit under faults, seed by seed.")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes; 0: one a core")
    parser.add_argument("--trace", action="store_true", help="tell the story of --seed")
    options = parser.parse_args(argv)
    if options.trace:
        _print_story(options.seed)
        return 0
    events, violations, cpu_s, began = 0, 0, 0.0, time.perf_counter()
    for found in simulate_all(options.seed, options.seeds, options.jobs or os.cpu_count() or 1):
        events += found.events
        cpu_s += found.cpu_s
        violations += len(found.violations)
        for line in found.violations:
            print(line, flush=True)
    how = "uncompiled" if str(machine.__file__).endswith(".py") else "compiled"
    print(
        f"{events} events, {events / options.seeds:.0f} a schedule, {events / cpu_s:.0f} a second "
        f"of one core, {how}; {time.perf_counter() - began:.0f} s"
    )
    print(
        f"{options.seeds} schedules, {options.seeds / cpu_s:.0f} a second of one core, "
        f"{violations} violations"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
