"""The table of KV movement between two GPUs: `make gpu-bench`, or `python -m bench.kv_move`.

Runs every condition in processes of its own (idle, both GPUs busy, both busy under MPS, and a
real kvproxy over gRPC) and writes each measured value to FOLDER/kv_move.jsonl, one object a
line, and the named results beside their budgets to FOLDER/kv_move.md. A condition that fails
leaves its results out, and says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 150
KERNELS = ("push", "pull", "staged")


@dataclass(frozen=True)
class Result:
    """One named result and how it follows from measured cases."""

    name: str
    meaning: str
    value: float | None
    unit: str
    budget: float | None = None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.budget is None:
            return "reported"
        return "met" if self.value <= self.budget else "MISSED"


def run_part(module: str, *arguments: str, more: Mapping[str, str] | None = None) -> list[Any]:
    """One part's lines; none, with a word on stderr, when it failed or took too long."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **(more or {})}
    part = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        text, _ = part.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # Its owners and peers too: all of them are in the session that we started.
        os.killpg(part.pid, 9)
        text, _ = part.communicate()
    if part.returncode:
        print(f"{' '.join(command)}: ended with {part.returncode}", file=sys.stderr)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for line in lines:
        print(json.dumps(line), flush=True)
    return lines


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """A daemon of our own, and the environment in which clients find it."""
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        environment = dict.fromkeys(names, folder)
        control = "nvidia-cuda-mps-control"
        own = {**os.environ, **environment}
        subprocess.run([control, "-d"], env=own, check=True)
        try:
            yield environment
        finally:
            subprocess.run([control], input="quit\n", text=True, env=own, check=False)


def name_results(lines: list[Any]) -> list[Result]:
    """The table, from whatever was measured."""
    by_case = {line["case"]: line for line in lines}

    def value(case: str, field: str = "value") -> float | None:
        line = by_case.get(case)
        return None if line is None else float(line[field])

    def best(condition: str) -> tuple[float | None, str]:
        found = [(value(f"layer-major-2048.{k}.{condition}", "ratio"), k) for k in KERNELS]
        known = [(ratio, kernel) for ratio, kernel in found if ratio is not None]
        return min(known) if known else (None, "none")

    def quotient(above: str, below: str) -> float | None:
        a, b = value(above), value(below)
        return None if a is None or b is None else a / b

    idle, under_mps, busy = best("idle"), best("mps"), best("busy")
    page_major = value("page-major-2048.pages.busy", "ratio")
    landed = "move-to-landed.8-in-flight.less-link"
    churned = quotient("page-major-2048.churned.busy", "page-major-2048.fresh.busy")
    return [
        Result(
            "kv_page_major_busy_ratio",
            "2,048 rows in random pages of 16, `pages`, both GPUs busy, no MPS",
            page_major,
            "ratio",
            1.10,
        ),
        Result(
            "kv_page_major_checksum_ratio",
            "the same, plus the time of all digests in both engines, one after the other",
            value("digest.in-all-ratio.busy"),
            "ratio",
            1.25,
        ),
        Result(
            "kv_page_major_checksum_exposed_ratio",
            "the same, with the digests that are on the way: the last chunk's (256 rows) at "
            "prefill, all at decode",
            value("digest.exposed-ratio.busy"),
            "ratio",
        ),
        Result(
            "kv_scattered_layer_major_ratio",
            f"layer-major, 147,456 fragments, GPUs idle, by `{idle[1]}`",
            idle[0],
            "ratio",
            1.15,
        ),
        Result(
            "kv_scattered_busy_mps_ratio",
            f"the same, both busy, under MPS, by `{under_mps[1]}`",
            under_mps[0],
            "ratio",
            1.35,
        ),
        Result(
            "kv_scattered_busy_ratio",
            f"the same, both busy, no MPS, by `{busy[1]}`",
            busy[0],
            "ratio",
        ),
        Result(
            "kv_small_128_ms",
            "128 rows in random pages of 16, `pages`, both busy, no MPS",
            value("page-major-128.pages.busy"),
            "ms",
            0.12,
        ),
        Result(
            "kv_move_to_landed_p50_ms",
            "last Move sent to Landed received over gRPC, 1,500 rows in 6 Moves 4 ms apart, both "
            "busy, 8 in flight, less the link's own queueing",
            value(f"{landed}.p50"),
            "ms",
            2.5,
        ),
        Result("kv_move_to_landed_p99_ms", "the same, p99", value(f"{landed}.p99"), "ms", 5.0),
        Result(
            "kv_churned_over_fresh_ratio",
            "pages after a day of 20 requests/s against pages in order, both busy",
            churned,
            "ratio",
            1.05,
        ),
        Result(
            "decode_slowdown_by_transfers_ratio",
            "a memory-bound step while 20 requests/s of 1,500 rows arrive, against none",
            value("decode-step.with-over-without.busy"),
            "ratio",
            1.02,
        ),
    ]


def write_table(path: Path, results: list[Result], stamp: Mapping[str, str]) -> None:
    rows = [
        "# KV between two GPUs",
        "",
        f"Measured on {stamp['machine']}, {stamp['date']}, commit {stamp['commit']}, by "
        f"`{stamp['command']}`. Ratios are to one contiguous copy of the same bytes, in turns in "
        "the same run, times are medians from the request to the synchronised event. Every case "
        "was checked row for row before it was timed. All measured values: `kv_move.jsonl`.",
        "",
        "| result | case | value | budget | |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        value = "" if result.value is None else f"{result.value:.3f} {result.unit}"
        budget = "" if result.budget is None else f"≤ {result.budget:g}"
        rows.append(
            f"| `{result.name}` | {result.meaning} | {value} | {budget} | {result.verdict} |"
        )
    path.write_text("\n".join(rows) + "\n")


def machine() -> str:
    """What the GPUs call themselves."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True)
    lines = done.stdout.split("\n")
    return f"{sum(bool(line) for line in lines)} x {lines[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="kv_move")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements"))
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        print("kv_move: no GPU here; this needs two of one machine", file=sys.stderr)
        return 2
    lines = run_part("bench.kv_move_run", "busy") + run_part("bench.kv_move_run", "idle")
    lines += run_part("bench.kv_move_grpc")
    with mps() as environment:
        lines += run_part("bench.kv_move_run", "mps", more=environment)
    results = name_results(lines)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    stamp = {"machine": machine(), "date": today, "commit": options.commit}
    stamp["command"] = "python -m bench.kv_move"
    budgets = [
        {"case": r.name, "value": r.value, "unit": r.unit, "budget": r.budget} for r in results
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "kv_move.jsonl").open("w") as file:
        for line in budgets + lines:
            file.write(json.dumps({**line, **stamp}) + "\n")
    write_table(options.out / "kv_move.md", results, stamp)
    print((options.out / "kv_move.md").read_text())
    return 1 if any(r.verdict == "MISSED" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
