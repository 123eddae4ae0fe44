"""From prefill's last `Move` to decode's `Landed`, through a real kvproxy over gRPC.

`python -m bench.kv_move_grpc CASE`: kvproxy with its own transport choice, two peers that own
pools and whose engines work. One JSON object a line, as `kv_move_run` prints them, as soon as it
is measured. The case `cpu` needs no GPU: small rows in shared memory, so that what is measured is
all but the copy; there is no link to take away.

| phase | arrivals |
|---|---|
| `one` | one prompt at a time, a chunk of 256 rows every 4 ms, which is what it takes to compute |
| `turns` | 8 prompts open, which an engine computes in turns, a chunk every 4 ms |
| `bursts` | 8 prompts open, a chunk of each in one step of 32 ms: 8 Moves leave together |
| `at-once` | 8 transfers in a closed loop without an engine: kvproxy's event loop is full |
| `one-kvproxy`, `one-kvproxy-each` | two units' prompts through one kvproxy, or one each |

`less-link` takes away what an ideal link without any overhead would need: each Move's bytes at
the contiguous copy's speed, in the order in which the Moves left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bench.kv_move_peer import Phase
from bench.kv_move_run import say
from duplet_memory.cuda_driver import open_devices

ROW_BYTES = 36 * 2 * 2048
STEP_S = 0.004
"""About what a prefill step of 256 rows takes."""
SKIPPED = 24
"""First transfers of a phase that do not count."""
LIMIT_S = 55
"""Starting processes and pools included; what was told until then stands."""
LINK_GB_S = 385.0
"""Of one contiguous copy, measured by `kv_move_run`."""


@dataclass(frozen=True)
class Case:
    """Phases that run one after the other in the same processes."""

    prefix: str
    transports: str
    phases: tuple[Phase, ...]
    arrangement: str = "page-major"
    units: int = 1
    on_gpu: bool = True


ONE = Phase("one", 130, 1, STEP_S)
LOADED = (
    ONE,
    Phase("turns", 260, 8, STEP_S),
    Phase("bursts", 260, 8, 8 * STEP_S, 8),
    Phase("at-once", 200, 8, 0.0),
)
SHORT = tuple(replace(phase, transfers=2 * SKIPPED) for phase in LOADED)
PREFIX = "move-to-landed"
CASES = {
    "grpc": Case(PREFIX, "pages", (*LOADED, Phase("one-kvproxy", 400, 16, STEP_S, 2))),
    "units": Case(PREFIX, "pages", (Phase("one-kvproxy-each", 200, 8, STEP_S),), units=2),
    "fragments": Case(f"{PREFIX}.layer-major.push-or-pull", "push,pull", (ONE,), "layer-major"),
    "staged": Case(f"{PREFIX}.layer-major.staged", "staged", (ONE,), "layer-major"),
    "host": Case(f"{PREFIX}.page-major.host", "host", (ONE,)),
    "cpu": Case(f"{PREFIX}.cpu", "shm", SHORT, on_gpu=False),
}

Sides = tuple[dict[str, Any], dict[str, Any]]
"""What prefill's and decode's peer printed about a phase."""


def run_units(case: Case) -> Iterator[list[Sides]]:
    """Run a case's units at once, each with a kvproxy; the engines of the first one work.
    Yields every phase's sides, one a unit, when the phase is over."""
    started: list[subprocess.Popen[Any]] = []
    peers: list[subprocess.Popen[str]] = []
    ends = [d.uuid for d in (open_devices()[0], open_devices()[-1])] if case.on_gpu else ["", ""]

    def end_all() -> None:
        for process in (*started, *peers):
            process.kill()

    watchdog = threading.Timer(LIMIT_S, end_all)
    with ExitStack() as stack:
        for unit in range(case.units):
            run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv"))
            environment = {**os.environ, "DUPLET_RUN_DIR": run_dir, "DUPLET_LOG_LEVEL": "warning"}
            environment["DUPLET_KVPROXY_TRANSPORTS"] = case.transports
            kvproxy = [sys.executable, "-m", "duplet_kvproxy"]
            started.append(subprocess.Popen(kvproxy, env=environment))
            plan: dict[str, Any] = {"run_dir": run_dir, "arrangement": case.arrangement}
            plan["phases"] = [asdict(phase) for phase in case.phases]
            for role, device, load in (("prefill", ends[0], "matmul"), ("decode", ends[1], "sum")):
                own = {"device": device, "load": "" if unit else load}
                peer = [sys.executable, "-m", "bench.kv_move_peer", role, json.dumps(plan | own)]
                peers.append(subprocess.Popen(peer, stdout=subprocess.PIPE, text=True))
        watchdog.start()
        try:
            for _ in case.phases:
                told = [read_side(peer) for peer in peers]
                yield list(zip(told[::2], told[1::2], strict=True))
        finally:
            watchdog.cancel()
            end_all()
            for process in (*started, *peers):
                process.communicate()


def read_side(peer: subprocess.Popen[str]) -> dict[str, Any]:
    """The next phase of one peer; log lines are passed over."""
    assert peer.stdout is not None
    for line in peer.stdout:
        if line.startswith('{"times"'):
            side: dict[str, Any] = json.loads(line)
            return side
    raise SystemExit(f"a peer ended with {peer.wait()}, or the case's {LIMIT_S} s were over")


def link_free_ns(moves: list[list[int]]) -> dict[int, float]:
    """When an ideal link would have carried each Move, by the time at which it left."""
    free, result = 0.0, {}
    for sent_ns, rows in moves:
        free = max(free, sent_ns) + rows * ROW_BYTES / LINK_GB_S
        result[sent_ns] = free
    return result


def tell(case: Case, phase: Phase, sides: list[Sides]) -> None:
    """Say p50 and p99 of a phase, as measured and less the link's own queueing."""
    took_ms, less_ms = [], []
    for prefill, decode in sides:
        ideal = link_free_ns(prefill["moves"])
        for number in sorted(map(int, prefill["times"]))[SKIPPED:]:
            sent, landed = prefill["times"][str(number)], decode["times"][str(number)]
            took_ms.append((landed - sent) / 1e6)
            if case.on_gpu:
                less_ms.append((landed - ideal[sent]) / 1e6)
    told = {"": took_ms, ".less-link": less_ms} if less_ms else {"": took_ms}
    for name, values in told.items():
        p50, p99 = (float(p) for p in np.percentile(values, [50, 99]))
        say(f"{case.prefix}.{phase.name}{name}.p50", p50, "ms")
        say(f"{case.prefix}.{phase.name}{name}.p99", p99, "ms")


def main() -> int:
    if sys.argv[1:] not in [[name] for name in CASES]:
        print(f"which case: {', '.join(CASES)}", file=sys.stderr)
        return 2
    case = CASES[sys.argv[1]]
    for phase, sides in zip(case.phases, run_units(case), strict=True):
        tell(case, phase, sides)
    return 0


if __name__ == "__main__":
    sys.exit(main())
