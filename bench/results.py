"""Results of benchmarks: one JSON object a line, and the tables made from them.

`docs/measurements/NAME.jsonl` only grows; `NAME.md` beside it shows `NAME.notes.md`, written by
hand where cases need words, and the newest value of every case on every machine.
`python -m bench.results FILE.jsonl…` makes the tables again.
"""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASUREMENTS = ROOT / "docs" / "measurements"

QUANTILES = {"p50": 0.50, "p99": 0.99}

COMMIT_VARIABLE = "BENCH_COMMIT"
"""Names the commit where the tree was copied without its history."""


@dataclass(frozen=True, slots=True)
class Result:
    """One measured number and where it comes from."""

    case: str
    value: float
    unit: str
    """Of the value: 'ms', 'rows/s', 'ratio', …"""
    budget: str
    """What it must be, such as '<= 1'; empty where nothing is asked."""
    machine: str
    date: str
    """UTC, to the second."""
    commit: str
    """With '+' when the tree held changes beyond it."""
    command: str
    load: float | None
    """How many processes wanted a core in the minute before the run, on average; None: unknown."""


class Report:
    """The results of one run."""

    def __init__(self, name: str, machine: str = "", module: str = "") -> None:
        """`name`: of the files under docs/measurements; `machine`: what to say beyond its CPU;
        `module`: of bench, where it is not called as the files are."""
        self.name = name
        self.results: list[Result] = []
        self._machine = "; ".join(filter(None, (describe_machine(), machine)))
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._commit = find_commit()
        self._command = " ".join(["python -m bench." + (module or name), *_arguments(sys.argv[1:])])
        self._load = round(os.getloadavg()[0], 1)

    def add(self, case: str, value: float, unit: str, budget: str = "") -> None:
        """Note one number."""
        origin = (self._machine, self._date, self._commit, self._command, self._load)
        self.results.append(Result(case, value, unit, budget, *origin))

    def another(self) -> Report:
        """An empty one of the same run."""
        other = copy.copy(self)
        other.results = []
        return other

    def save(self, folder: Path = MEASUREMENTS) -> Path:
        """Append to the folder's .jsonl and make its table; returns the .jsonl."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(result)) + "\n" for result in self.results)
        write_table(path)
        return path

    def table(self) -> str:
        """This run's results as a Markdown table."""
        return render_table(self.results)


def read_results(path: Path) -> list[Result]:
    """All results of a .jsonl file, oldest first."""
    lines = path.read_text("utf-8").splitlines()
    return [Result(**json.loads(line)) for line in lines if line]


def write_table(path: Path) -> None:
    """Make the .md beside a .jsonl: the newest value of each case, a section a machine."""
    machines: dict[str, dict[str, Result]] = {}
    for result in read_results(path):
        newest = machines.setdefault(result.machine, {})
        newest.pop(result.case, None)  # a case stands where its newest run put it
        newest[result.case] = result
    parts = [f"# {path.stem}"]
    notes = path.with_suffix(".notes.md")
    if notes.exists():
        parts.append(notes.read_text("utf-8").strip())
    parts.append("A '+' behind a commit: the tree held changes beyond it.")
    for machine, newest in machines.items():
        results = list(newest.values())
        runs = dict.fromkeys(
            f"`{r.command}`, commit {r.commit}, {r.date}{_said_load(r.load)}" for r in results
        )
        parts += [f"## {machine}", "\n".join(f"- {run}" for run in runs), render_table(results)]
    path.with_suffix(".md").write_text("\n\n".join(parts) + "\n", "utf-8")


def render_table(results: Iterable[Result]) -> str:
    """Case, value, unit and budget as a Markdown table."""
    rows = [("case", "value", "unit", "budget")]
    rows += [(r.case, _format(r.value), r.unit, _judged(r)) for r in results]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for case, value, unit, budget in rows:
        cells = (case.ljust(widths[0]), value.rjust(widths[1]), unit.ljust(widths[2]))
        lines.append(f"| {' | '.join(cells)} | {budget.ljust(widths[3])} |")
    rule = [width * "-" for width in widths]
    rule[1] = rule[1][:-1] + ":"
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def _said_load(load: float | None) -> str:
    return "" if load is None else f", load {load:g} before it"


def _format(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _arguments(given: Sequence[str]) -> list[str]:
    """What decides the results; where they were written to does not."""
    kept = list(given)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return kept


def _judged(result: Result) -> str:
    """The budget, and whether it was missed."""
    limit = re.fullmatch(r"(<=|<|>=|>) ?([0-9.]+)", result.budget)
    if limit is None:
        return result.budget
    sign, bound = limit[1], float(limit[2])
    met = {
        "<=": result.value <= bound,
        "<": result.value < bound,
        ">=": result.value >= bound,
        ">": result.value > bound,
    }[sign]
    return result.budget if met else f"{result.budget} MISSED"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def describe_machine() -> str:
    """Cores, processor, Python."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {_processor()}, Python {platform.python_version()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.machine()


def find_commit() -> str:
    """The commit of the tree; 'unknown' without a repository and without COMMIT_VARIABLE."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(ROOT), *arguments)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_table(Path(name))
