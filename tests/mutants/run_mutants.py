"""Switches off one rule of the services at a time; the tests that it names must fail.

The mutants of `duplet_sim` break core under a simulator. These break what stands around it, by a
changed line of source in a process of its own, and never in the tree. A line that is not there
any more, a test that does not run and a mutant that is wrong itself are errors and no kills.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants.broken_run import Report, run_without
from tests.mutants.rule import Rule
from tests.mutants.service_rules import RULES

HEAVY = [
    *("pytest", "pytest_asyncio", "pytest_timeout", "_hypothesis_pytestplugin", "hypothesis"),
    *("anyio.pytest_plugin", "_pytest.junitxml", "_pytest.pastebin", "_pytest.doctest", "pdb"),
    *("numpy", "torch", "safetensors.numpy", "xxhash", "msgspec", "prometheus_client"),
    *("pydantic_settings", "structlog", "rich.traceback"),
    *("grpc.aio", "grpc_health.v1.health_pb2_grpc", "grpc_status.rpc_status"),
    "grpc_reflection.v1alpha.reflection",
]
"""Loaded once for all runs: half of what each would take."""
WRONG = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "UnboundLocalError")
"""Raised by a mutant that is no statement about the rule."""


@dataclass(frozen=True)
class Verdict:
    killed: bool
    """Every test that the rule names failed."""
    how: str
    alive: bool = False
    """Every test ran, and not all failed. Neither killed nor alive: an error, as `how` says."""


def open_pool(jobs: int) -> ProcessPoolExecutor:
    """Runs so many at a time, each in a process of its own that has nothing of the product."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    return ProcessPoolExecutor(jobs, context, max_tasks_per_child=1)


def judge_all(pool: Executor, rules: Sequence[Rule]) -> Iterator[tuple[Rule, Verdict]]:
    """Verdicts in the order of the rules."""
    stale = {rule.name: why for rule in rules if (why := find_stale(rule))}
    sound = [rule for rule in rules if rule.name not in stale]
    reports = pool.map(run_without, sound)
    for rule in rules:
        if rule.name in stale:
            yield rule, Verdict(False, stale[rule.name])
        else:
            yield rule, judge(rule, next(reports))


def start_unharmed(pool: Executor, rules: Sequence[Rule]) -> Future[Report]:
    """The canary: all tests that the rules name, over modules that are loaded as changed ones and
    say what they always did. Nothing may fail."""
    firsts = {rule.module: rule for rule in reversed(rules)}.values()
    tests = tuple(test for rule in rules for test in rule.tests)
    idle = [replace(rule, becomes=rule.line, tests=tests) for rule in firsts]
    return pool.submit(run_without, *idle)


def judge_unharmed(report: Report, rules: Sequence[Rule]) -> str:
    """What fails with no rule off, or could not be run; nothing where all is well."""
    tests = {test for rule in rules for test in rule.tests}
    unrun = sorted(test for test in tests if not _among(test, report.passed))
    unloaded = sorted({rule.module for rule in rules} - set(report.loaded))
    if bad := [*report.failed, *report.broke, *unrun, *unloaded]:
        return f"with no rule off: {bad}\n{report.output[-2000:]}"
    return ""


def judge(rule: Rule, report: Report) -> Verdict:
    """What a run without the rule says."""
    survived = [test for test in rule.tests if not _among(test, report.failed)]
    wrong = [f"{test}: {why}" for test, why in report.failed.items() if why in WRONG]
    error = ""
    if report.broke:
        error = f"could not be run: {report.broke}"
    elif report.loaded != [rule.module]:
        error = "the changed module was not loaded"
    elif wrong:
        error = f"the mutant itself is wrong: {wrong}"
    elif missing := [test for test in survived if not _among(test, report.passed)]:
        error = f"did not run: {missing}"
    if error:
        return Verdict(False, f"{error}\n{report.output[-2000:]}")
    names = ", ".join(test.partition("::")[2] for test in survived or rule.tests)
    return Verdict(not survived, f"not noticed by {names}" if survived else names, bool(survived))


def find_stale(rule: Rule) -> str:
    """Why a rule cannot be switched off any more, or nothing."""
    spec = importlib.util.find_spec(rule.module)
    if spec is None or spec.origin is None:
        return f"there is no module {rule.module}"
    try:
        rule.switch_off(Path(spec.origin).read_text("utf-8"))
    except LookupError as error:
        return str(error)
    return ""


def _among(test: str, names: Collection[str]) -> bool:
    """Whether a test, or a case of a parametrised one, is there."""
    return any(name == test or name.startswith(f"{test}[") for name in names)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Turn rules of the services off, one at a time.")
    parser.add_argument("--only", default="", help="mutants with this in their name")
    parser.add_argument("--quick", action="store_true", help="without the slow ones")
    parser.add_argument("--jobs", type=int, default=4)  # some wait for what never comes
    options = parser.parse_args(argv)
    named = [rule for rule in RULES if options.only in rule.name]
    # The slow ones, which wait, come first: the others have the processors meanwhile.
    chosen = [rule for rule in named if rule.slow and not options.quick]
    chosen += [rule for rule in named if not rule.slow]
    if not chosen:
        parser.error(f"no mutant has {options.only!r} in its name")
    started = time.monotonic()
    killed = 0
    with open_pool(options.jobs) as pool:
        unharmed = start_unharmed(pool, chosen)
        for rule, verdict in judge_all(pool, chosen):
            killed += verdict.killed
            word = "killed" if verdict.killed else "ALIVE" if verdict.alive else "ERROR"
            print(f"{word:7} {rule.name}: {verdict.how}", flush=True)
        fault = judge_unharmed(unharmed.result(), chosen)
    print(f"{'FAILED' if fault else 'well':7} canary: {fault or 'with no rule off all tests pass'}")
    seconds = time.monotonic() - started
    print(f"{killed} of {len(chosen)} mutants of the services killed in {seconds:.0f} s")
    return 0 if killed == len(chosen) and not fault else 1


if __name__ == "__main__":
    sys.exit(main())
