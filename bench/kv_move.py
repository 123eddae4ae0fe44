"""The table of KV movement between two GPUs: `make gpu-bench`, or `python -m bench.kv_move`.

Runs every part in processes of its own, most in half a minute and none longer than LIMIT_S:
both GPUs busy, idle, busy under MPS, each for page-major and layer-major pools and for kernels
launched in other forms; a real kvproxy over gRPC. A value is printed when it is measured, and
added to docs/measurements/kv_move.jsonl at the end of its part. The names with a budget follow
from cases; what each means stands in docs/measurements/kv_move.notes.md. A part that fails or takes
too long leaves out what it had not measured, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

from bench.results import MEASUREMENTS, Report

LIMIT_S = 60
KERNELS = ("push", "pull", "staged")
CONDITIONS = ("busy", "idle", "mps")
FORMS = ("page-major", "layer-major", "launches")
WAYS = ("grpc", "units", "fragments", "staged", "host")
"""Cases of `kv_move_grpc` on GPUs."""
PARTS = (
    *(f"{condition}-{form}" for condition in CONDITIONS for form in FORMS),
    *WAYS,
)

Measured = dict[str, tuple[float, str]]
"""Case → value and unit."""

BUDGETS = {
    "kv_page_major_busy_ratio": "<= 1.10",
    "kv_page_major_checksum_ratio": "<= 1.25",
    "kv_scattered_layer_major_ratio": "<= 1.15",
    "kv_scattered_busy_mps_ratio": "<= 1.35",
    "kv_small_128_ms": "<= 0.12",
    "kv_move_to_landed_p50_ms": "<= 2.5",
    "kv_move_to_landed_p99_ms": "<= 5",
    "kv_move_to_landed_bursts_p99_ms": "<= 5",
    "kv_churned_over_fresh_ratio": "<= 1.05",
    "decode_slowdown_by_transfers_ratio": "<= 1.02",
}
"""Other named results are reported."""

SAME_AS = {
    "kv_page_major_busy_ratio": "page-major-2048.pages.busy.ratio",
    "kv_page_major_mps_ratio": "page-major-2048.pages.mps.ratio",
    "kv_page_major_checksum_ratio": "digest.exposed.busy.ratio",
    "kv_page_major_checksum_in_turn_ratio": "digest.one-after-the-other.busy.ratio",
    "kv_small_128_ms": "page-major-128.pages.busy",
    "kv_move_to_landed_p50_ms": "move-to-landed.one.less-link.p50",
    "kv_move_to_landed_p99_ms": "move-to-landed.turns.less-link.p99",
    "kv_move_to_landed_bursts_p99_ms": "move-to-landed.bursts.less-link.p99",
    "kv_through_host_ratio": "page-major-2048.host.busy.ratio",
    "decode_slowdown_by_transfers_ratio": "decode-step.with-over-without.busy",
    "kv_landed_by_pages_p50_ms": "move-to-landed.one.p50",
    "kv_landed_by_fragments_p50_ms": "move-to-landed.layer-major.push-or-pull.one.p50",
    "kv_landed_by_staging_p50_ms": "move-to-landed.layer-major.staged.one.p50",
    "kv_landed_through_host_p50_ms": "move-to-landed.page-major.host.one.p50",
    "kv_two_units_one_kvproxy_p99_ms": "move-to-landed.one-kvproxy.p99",
    "kv_two_units_one_each_p99_ms": "move-to-landed.one-kvproxy-each.p99",
}

QUOTIENTS = {
    "kv_churned_over_fresh_ratio": ("page-major-2048.churned.busy", "page-major-2048.fresh.busy"),
    "kv_push_over_pull_idle_ratio": ("layer-major-2048.push.idle", "layer-major-2048.pull.idle"),
    "kv_push_over_pull_busy_ratio": ("layer-major-2048.push.busy", "layer-major-2048.pull.busy"),
    "kv_push_over_pull_mps_ratio": ("layer-major-2048.push.mps", "layer-major-2048.pull.mps"),
}
"""Push gathers at the source, pull at the destination."""

BEST_KERNEL = {
    "kv_scattered_layer_major_ratio": "idle",
    "kv_scattered_busy_mps_ratio": "mps",
    "kv_scattered_busy_ratio": "busy",
}


def run_part(module: str, *arguments: str, more: Mapping[str, str] | None = None) -> Measured:
    """What one part measured, told as it comes; less, with a word on stderr, when it failed or
    took too long."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, **(more or {})}
    measured: Measured = {}
    # A session of its own: whoever ends it ends its owners and peers too.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as part:
        watchdog = Timer(LIMIT_S, os.killpg, (part.pid, signal.SIGKILL))
        watchdog.start()
        assert part.stdout is not None
        try:
            for line in part.stdout:
                if line.startswith('{"case"'):
                    found = json.loads(line)
                    measured[found["case"]] = found["value"], found["unit"]
                    print(f"{found['case']}: {found['value']:g} {found['unit']}", flush=True)
            code = part.wait()
        finally:
            watchdog.cancel()
    if code:
        print(f"{' '.join(command)}: ended with {code}", file=sys.stderr)
    return measured


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


def choose_parts(text: str) -> list[str]:
    """The parts that are named by commas, each by its name or by the name's beginning: `busy`,
    `idle-layer-major`.

    Raises:
        ValueError: nothing is called so.
    """
    chosen = []
    for name in text.split(","):
        found = [part for part in PARTS if part == name or part.startswith(f"{name}-")]
        if not found:
            raise ValueError(f"{name}: none of {', '.join(PARTS)}")
        chosen += found
    return list(dict.fromkeys(chosen))


def measure(part: str) -> Measured:
    """One of PARTS."""
    if part in WAYS:
        return run_part("bench.kv_move_grpc", part)
    condition, _, form = part.partition("-")
    if condition == "mps":
        with mps() as environment:
            return run_part("bench.kv_move_run", condition, form, more=environment)
    return run_part("bench.kv_move_run", condition, form)


def name_results(measured: Measured) -> Measured:
    """The named results that follow from what was measured."""
    named: Measured = {}
    for name, case in SAME_AS.items():
        if case in measured:
            named[name] = measured[case]
    for name, (above, below) in QUOTIENTS.items():
        if above in measured and below in measured:
            named[name] = measured[above][0] / measured[below][0], "ratio"
    for name, condition in BEST_KERNEL.items():
        cases = [f"layer-major-2048.{kernel}.{condition}.ratio" for kernel in KERNELS]
        if found := [measured[case] for case in cases if case in measured]:
            named[name] = min(found)
    order = [*BUDGETS, *(name for name in named if name not in BUDGETS)]
    return {name: named[name] for name in order if name in named}


def machine() -> str:
    """What the GPUs call themselves."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True)
    lines = done.stdout.split("\n")
    return f"{sum(bool(line) for line in lines)} x {lines[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="kv_move")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS)
    shown = f"by commas, each by its beginning or whole: {', '.join(PARTS)}"
    parser.add_argument("--parts", default=",".join(PARTS), help=shown)
    options = parser.parse_args()
    try:
        parts = choose_parts(options.parts)
    except ValueError as error:
        parser.error(f"--parts: {error}")
    if shutil.which("nvidia-smi") is None:
        print("kv_move: no GPU here; this needs two of one machine", file=sys.stderr)
        return 2
    measured: Measured = {}
    told: Measured = {}
    for part in parts:
        report = Report("kv_move", machine())
        own = measure(part)
        measured |= own
        # A name is told again when another part has changed what it follows from.
        named = {n: v for n, v in name_results(measured).items() if told.get(n) != v}
        told |= named
        for name, (value, unit) in named.items():
            report.add(name, value, unit, BUDGETS.get(name, ""))
        for case, (value, unit) in own.items():
            report.add(case, value, unit)
        report.save(options.out)
    summary = Report("kv_move", machine())
    for name, (value, unit) in name_results(measured).items():
        summary.add(name, value, unit, BUDGETS.get(name, ""))
    print(summary.table())
    return 1 if "MISSED" in summary.table() else 0


if __name__ == "__main__":
    sys.exit(main())
