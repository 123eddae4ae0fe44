"""The command that searches all scopes, on all cores, and says what was searched."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context

from duplet_sim.hazards import label, labels
from duplet_sim.scopes import SCOPES, Scope
from duplet_sim.search import Explorer
from duplet_sim.violation import Violation

YOUNG_OBJECTS = 200_000
"""Objects between two looks of the garbage collector. The default is made for programs that
drop what they make; a search keeps nearly all of it, and looking costs a third of the time."""


@dataclass(frozen=True, slots=True)
class Job:
    """One scope, or the share of it whose runs begin with one kind of fault."""

    scope: str
    first: str
    limit: int | None


@dataclass(frozen=True, slots=True)
class Found:
    job: Job
    states: int
    steps: int
    machine_states: int
    complete: bool
    seconds: float
    """Of processor time."""
    violation: str
    marks: frozenset[str]
    """Rare paths that were taken, and the labels of the faults that happened."""


def search(job: Job) -> Found:
    gc.set_threshold(YOUNG_OBJECTS, 20, 100)
    explorer = Explorer(SCOPES[job.scope], job.limit, job.first)
    began = time.process_time()
    violation = ""
    try:
        explorer.run()
    except Violation as found:
        violation = f"{found.invariant}: {found.detail}"
    return Found(
        job,
        len(explorer.parents),
        explorer.transitions,
        len(explorer.interner),
        explorer.complete,
        time.process_time() - began,
        violation,
        frozenset(explorer.marks) | {label(step) for step in explorer.steps if step[0] == "fault"},
    )


def find_missing(scope: Scope, found: list[Found]) -> list[str]:
    """What a complete search of the scope should have met and has not: its marks, in some share
    or other, and in each share the fault that the share is for."""
    met = frozenset[str]().union(*(f.marks for f in found))
    missing = [mark for mark in scope.marks if mark not in met]
    return missing + [f.job.first for f in found if f.job.first and f.job.first not in f.marks]


def shares(scope: Scope, limit: int | None) -> list[Job]:
    """The jobs that search a scope."""
    firsts = labels(scope) if scope.spread else [""]
    return [Job(scope.name, first, limit) for first in firsts]


def describe(scope: Scope, found: list[Found]) -> str:
    """What was searched, in one line."""
    if scope.faults:
        faults = f"at most {scope.faults} faults a run of {', '.join(scope.kinds)}"
    else:
        faults = "no faults"
    states, steps = sum(f.states for f in found), sum(f.steps for f in found)
    most = max(f.machine_states for f in found)
    seconds = sum(f.seconds for f in found)
    into = f" in {len(found)} shares by the first fault" if scope.spread else ""
    voice = ", one voice" if scope.voice_rows else ""
    remote = ", prefill over TCP" if scope.remote else ""
    whole = "" if all(f.complete for f in found) else ", NOT complete"
    return (
        f"scope {scope.name}: {scope.requests} requests{voice}{remote}, {scope.decode_pages} pages,"
        f" 1 writer, {faults}, at most {scope.cancels} cancels or deadlines: {states} states{into},"
        f" {steps} steps, up to {most} machine states, {seconds:.0f} s{whole}"
    )


def _search_all(jobs: list[Job], cores: int) -> Iterator[Found]:
    if cores == 1:
        yield from map(search, jobs)
        return
    # A process a job: what a search has found is given back with its process.
    with get_context("fork").Pool(cores, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(search, jobs)


def _report(jobs: list[Job], results: Iterable[Found], shows: bool) -> tuple[int, int, int]:
    """Print each scope when its last share is done; all states, all violations, empty scopes."""
    left: dict[str, list[Found | None]] = {}
    for job in jobs:
        left.setdefault(job.scope, []).append(None)
    total, violations, empty = 0, 0, 0
    for found in results:
        name = found.job.scope
        total += found.states
        if shows:
            print(f"  {name} {found.job.first}: {found.states}, {found.seconds:.0f} s", flush=True)
        if found.violation:
            violations += 1
            print(f"scope {name}, {found.job.first or 'all'}: {found.violation}", flush=True)
        left[name][left[name].index(None)] = found
        done = [f for f in left[name] if f is not None]
        if len(done) == len(left[name]):
            print(describe(SCOPES[name], done), flush=True)
            missing = find_missing(SCOPES[name], done) if all(f.complete for f in done) else []
            if missing:
                empty += 1
                print(f"scope {name} is empty of {', '.join(missing)}", flush=True)
    return total, violations, empty


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scope", choices=sorted(SCOPES), action="append")
    parser.add_argument("--limit", type=int, help="stop after so many states (not complete)")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shares", action="store_true", help="print each share as it ends")
    options = parser.parse_args(argv)
    jobs = [job for name in options.scope or SCOPES for job in shares(SCOPES[name], options.limit)]
    began = time.perf_counter()
    total, violations, empty = _report(jobs, _search_all(jobs, options.cores), options.shares)
    print("states are compared exactly, by numbered parts, not by a hash")
    if not empty:
        print("every scope that was searched to its end took the rare paths that it is there for")
    print(f"{time.perf_counter() - began:.0f} s on {options.cores} cores")
    print(f"{total} states, {violations} violations")
    return 1 if violations or empty else 0


if __name__ == "__main__":
    sys.exit(main())
