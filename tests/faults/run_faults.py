"""All faults on real processes: `python -m tests.faults.run_faults`.

A unit on the CPU under load, its copies slow and out of order, so that faults meet copies in
flight; checksums are taken before the first step and again at the end of each stream, where a
late write shows. A control run with one rule switched off must produce a mismatch, or nothing
here proves anything.

FAULTS_CHECKS=N goes through all of them again and again, each time in another order, until so many
KV checks were made.

`--gpu 0,1` puts the engines on two GPUs: the product's own copies, pauses and kills.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_unit.gpus import parse_gpus
from tests.e2e.live_unit import LiveUnit, live_unit
from tests.e2e.streams import Ask, Stream, known_spec, read_all
from tests.faults.control import run_storm
from tests.faults.fault_cases import (
    ALL_CASES,
    PAUSES_AND_KILLS,
    Case,
    Outcome,
    Scene,
    run_case,
)
from tests.faults.quarantine import QUARANTINE_CASES, quarantine_settings, run_quarantine_case

LONGEST_WAIT_S = 0.1
"""A client has its error within this after the unit knew, and lb's no within this after the time
that it may wait for room."""

SETTINGS = {
    # A slow copy takes 0.4 s: less than what would count as a withheld end.
    "SLOW_COPY_S": "0.05",
    "DUPLET_DECODE_TRANSFER_DEADLINE_S": "1.5",
}
UNORDERED = "tests.faults.unordered_kvproxy"
SLOW = "tests.faults.slow_kvproxy"
CARELESS = "tests.faults.careless_decode"
ASKS = [Ask(seed, max_rows=30) for seed in range(100, 112)]


@dataclass(frozen=True, slots=True)
class Ground:
    """What the cases run on."""

    settings: Mapping[str, str]
    modules: Mapping[Role, str]
    gpus: tuple[str, ...]
    cases: tuple[Case, ...]
    asks: list[Ask]
    same_share: float
    rounds: int
    """Requests of each client before each fault."""


ON_CPU = Ground(SETTINGS, {Role.KVPROXY: UNORDERED}, (), ALL_CASES, ASKS, 1.0, 1)


def on_gpus(gpus: tuple[str, ...]) -> Ground:
    """The pair: a model whose float32 leaves most streams the same in any company.

    An engine's start takes many seconds there and a request few milliseconds: with more requests
    before each fault, every fault once comes to 13,000 checks."""
    settings = {
        **SETTINGS,
        "SLOW_COPY_S": "0.004",
        "DUPLET_PREFILL_DTYPE": "float32",
        "DUPLET_DECODE_DTYPE": "float32",
        "DUPLET_PREFILL_POOL_PAGES": "2048",
        "DUPLET_DECODE_POOL_PAGES": "2048",
    }
    asks = [Ask(seed, max_rows=30) for seed in range(100, 140)]
    return Ground(settings, {Role.KVPROXY: SLOW}, gpus, PAUSES_AND_KILLS, asks, 0.95, 16)


@dataclass(slots=True)
class Report:
    """What came of everything so far."""

    console: Console
    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    kv_checks: int = 0
    mismatches: int = 0

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        errors = ", ".join(f"{name} {count}" for name, count in sorted(outcome.errors.items()))
        self.console.print(
            f"ok    {outcome.name}: {outcome.good} good, {errors or 'no error'}, "
            f"{outcome.seconds:.1f} s",
            highlight=False,
        )
        for error in outcome.times.unexplained:
            self.failures.append(f"{outcome.name}: nobody said why: {error}")

    def fail(self, name: str, why: str) -> None:
        self.failures.append(f"{name}: {why}")
        self.console.print(f"FAILED {name}: {why}", highlight=False, markup=False)

    def show(self) -> None:
        table = Table(show_edge=False, pad_edge=False)
        headings = ("fault", "runs", "good", "failed", "worst wait, ms", "refused", "worst, ms")
        for heading in headings:
            table.add_column(heading)
        for name in dict.fromkeys(outcome.name for outcome in self.outcomes):
            runs = [outcome for outcome in self.outcomes if outcome.name == name]
            good = sum(run.good for run in runs)
            failed = [wait for run in runs for wait in run.times.failed_s]
            refused = [wait for run in runs for wait in run.times.refused_s]
            table.add_row(name, str(len(runs)), str(good), *_told(failed), *_told(refused))
        self.console.print(table)

    def worst_failed_s(self) -> float:
        """Longest wait for the error of a request that failed."""
        return max((s for run in self.outcomes for s in run.times.failed_s), default=0.0)

    def worst_refused_s(self) -> float:
        """Longest wait for a no."""
        return max((s for run in self.outcomes for s in run.times.refused_s), default=0.0)


def _told(waits_s: list[float]) -> tuple[str, str]:
    """How many, and the longest in ms."""
    return str(len(waits_s)), f"{max(waits_s) * 1e3:.0f}" if waits_s else "-"


@asynccontextmanager
async def scene_of(
    ground: Ground, report: Report, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Scene]:
    """A unit with its reference rows; its checks go into the report, failed or not. `settings`
    stand over the ground's."""
    told = {**ground.settings, **(settings or {})}
    running = live_unit(told, modules=ground.modules, gpus=ground.gpus)
    async with running as unit, kept_logs(unit, report):
        async with AsyncClient(unit.listen) as client:
            spec = await known_spec(client)
            reference: list[Stream] = await read_all(client, spec, ground.asks)
        assert all(stream.error is None for stream in reference)
        scene = Scene(unit, spec, ground.asks, reference, ground.same_share, rounds=ground.rounds)
        try:
            yield scene
        finally:
            await scene.observe()
            report.kv_checks += scene.kv_checks
            report.mismatches += scene.mismatches


@asynccontextmanager
async def kept_logs(unit: LiveUnit, report: Report) -> AsyncIterator[None]:
    """Keep the services' logs where something failed."""
    before = len(report.failures)
    try:
        yield
    finally:
        if len(report.failures) > before or sys.exc_info()[0] is not None:
            kept = Path(tempfile.mkdtemp(prefix="duplet-faults-"))
            shutil.copytree(unit.run_dir / "logs", kept, dirs_exist_ok=True)
            report.console.print(f"logs kept in {kept}")


async def run_one(scene: Scene, case: Case, report: Report) -> bool:
    """Run a case; False when it failed, and the unit cannot be trusted any more."""
    try:
        report.add(await run_case(scene, case))
    except (AssertionError, TimeoutError) as error:
        report.fail(case.name, str(error) or type(error).__name__)
        return False
    checks, mismatches = report.kv_checks + scene.kv_checks, report.mismatches + scene.mismatches
    report.console.print(f"      {checks} KV checks, {mismatches} mismatches")
    return True


async def run_cases(ground: Ground, cases: list[Case], report: Report) -> None:
    """Each case once, on one unit; on a new one after a failure."""
    waiting = list(cases)
    while waiting:
        async with scene_of(ground, report) as scene:
            while waiting and await run_one(scene, waiting.pop(0), report):
                pass


async def run_until(ground: Ground, checks: int, seed: int, report: Report) -> None:
    """Rounds of all cases, each in an order of its own, on one unit until so many KV checks were
    made; the quarantine, which needs a small pool, on another one meanwhile."""
    order = random.Random(seed)
    report.console.print(f"order of seed {seed}")
    waiting: list[Case | None] = []
    async with scene_of(ground, report) as scene:
        while report.kv_checks + scene.kv_checks < checks and not report.failures:
            if not waiting:
                waiting = [*ground.cases, *([None] if ground is ON_CPU else [])]
                order.shuffle(waiting)
            case = waiting.pop()
            await (run_quarantine(report) if case is None else run_one(scene, case, report))


async def run_quarantine(report: Report) -> None:
    async with scene_of(ON_CPU, report, quarantine_settings()) as scene:
        for name in QUARANTINE_CASES:
            try:
                report.add(await run_quarantine_case(scene, name))
            except (AssertionError, TimeoutError) as error:
                report.fail(name, str(error) or type(error).__name__)
                return


async def run_control(report: Report) -> None:
    """The same storm with all rules and with one switched off."""
    for decode, wanted in (("", False), (CARELESS, True)):
        storm = await run_storm(UNORDERED, decode)
        name = "control, one rule off" if wanted else "control, all rules"
        report.console.print(f"      {name}: {storm.describe()}", markup=False)
        if not wanted:
            report.kv_checks += storm.kv_checks
            report.mismatches += storm.mismatches
        if not storm.given_up or (storm.mismatches > 0) is not wanted:
            report.fail(name, "a mismatch had to show" if wanted else "no mismatch may show")


def close(report: Report) -> bool:
    """The verdict; its last line is the figure."""
    report.show()
    failed_s, refused_s = report.worst_failed_s(), report.worst_refused_s()
    for what, worst_s in (("an error that the unit knew", failed_s), ("a no", refused_s)):
        if worst_s > LONGEST_WAIT_S:
            report.failures.append(f"a client waited {worst_s * 1e3:.0f} ms for {what}")
    for failure in report.failures:
        report.console.print(f"FAILED {failure}", markup=False, highlight=False)
    report.console.print(
        f"worst wait for an error {failed_s * 1e3:.0f} ms, for a no {refused_s * 1e3:.0f} ms, "
        f"{len(report.failures)} failures"
    )
    report.console.print(f"kv checks {report.kv_checks}, mismatches {report.mismatches}")
    return not report.failures and report.mismatches == 0 and report.kv_checks > 0


async def run(ground: Ground, only: str, checks: int, seed: int) -> bool:
    report = Report(Console(width=110))
    if checks:
        await run_until(ground, checks, seed, report)
    else:
        await run_cases(ground, [case for case in ground.cases if only in case.name], report)
        if ground is ON_CPU and (not only or only in "quarantine"):
            await run_quarantine(report)
    if ground is ON_CPU and (not only or only in "control"):
        await run_control(report)
    return close(report)


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults on real processes.")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="order of a long run")
    parser.add_argument("--gpu", default="", help="GPUs of prefill and decode, as 0,1")
    options = parser.parse_args()
    checks = int(os.environ.get("FAULTS_CHECKS", "0"))
    ground = ON_CPU
    if options.gpu:
        ground = on_gpus(parse_gpus(options.gpu, monolith=False))
    return 0 if asyncio.run(run(ground, options.only, checks, options.seed)) else 1


if __name__ == "__main__":
    sys.exit(main())
