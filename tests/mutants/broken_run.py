"""One run of some tests with lines of some modules replaced, in memory, in a process of its own.

Nothing of the product may be loaded in that process before: what is loaded cannot be changed.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.mutants.rule import Rule

ROOT = Path(__file__).parents[2]
TEST_LIMIT_S = 10
"""Without its rule a test may wait for what never comes; all take less than a second with it."""


@dataclass(eq=False)
class Report:
    """What came of the tests, by pytest's names for them. A plugin of pytest's."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Those that failed by themselves, and the exception's name."""
    broke: list[str] = field(default_factory=list)
    """Files and tests that could not be run at all."""
    loaded: list[str] = field(default_factory=list)
    """Changed modules."""
    output: str = ""

    def pytest_exception_interact(self, call: Any, report: Any) -> None:
        if report.when == "call":
            self.failed[report.nodeid] = call.excinfo.typename
        elif report.nodeid not in self.failed:  # what fails leaves things behind
            self.broke.append(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


class ChangedModules(MetaPathFinder):
    """Comes before all other finders; knows the changed modules only."""

    def __init__(self, rules: Mapping[str, Rule], loaded: list[str]) -> None:
        self._rules = rules
        self._loaded = loaded

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._rules:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _ChangedLoader(fullname, spec.origin, self._rules[fullname])
        self._loaded.append(fullname)
        return spec


class _ChangedLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, rule: Rule) -> None:
        super().__init__(fullname, path)
        self._rule = rule

    def get_code(self, fullname: str) -> CodeType:
        """From the source: what is compiled on disk is the unchanged module."""
        source = self.get_source(fullname)
        assert source is not None
        return compile(self._rule.switch_off(source), self.path, "exec", dont_inherit=True)


def run_without(*rules: Rule) -> Report:
    """Run the tests of rules of different modules, with all of them off. This process is good for
    nothing else afterwards."""
    report = Report()
    os.chdir(ROOT)
    sys.meta_path.insert(0, ChangedModules({r.module: r for r in rules}, report.loaded))
    tests = dict.fromkeys(test for rule in rules for test in rule.tests)
    options = ["-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}", "--tb=short"]
    # Plugins of pytest's are among what whoever started this has loaded.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code: int = pytest.ExitCode.TESTS_FAILED
    with redirect_stdout(io.StringIO()) as output:
        try:
            code = pytest.main([*options, *tests], plugins=[report])
        except (ExceptionGroup, pytest.PytestUnraisableExceptionWarning) as left:
            # Said when all tests are over, of what was never closed: as whatever fails leaves it.
            if not report.failed:
                report.broke.append(f"left behind: {left!r}")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        report.broke.append(f"pytest: {pytest.ExitCode(code).name}")
    report.output = output.getvalue()
    return report
