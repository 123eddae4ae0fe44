"""From prefill's last `Move` to decode's `Landed`, through a real kvproxy over gRPC.

`python -m bench.kv_move_grpc`: kvproxy with its own transport choice, two peers that own pools
and whose engines work. One JSON object a line, as `kv_move_run` prints them.

| phase | arrivals |
|---|---|
| `one` | one prompt at a time, a chunk of 256 rows every 4 ms, which is what it takes to compute |
| `turns` | 8 prompts open, which an engine computes in turns, a chunk every 4 ms |
| `bursts` | 8 prompts open, a chunk of each in one step of 32 ms: 8 Moves leave together |
| `at-once` | 8 transfers in a closed loop without an engine: kvproxy's event loop is full |

`less-link` takes away what an ideal link without any overhead would need: each Move's bytes at
the contiguous copy's speed, in the order in which the Moves left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.kv_move_peer import Phase
from bench.kv_move_run import say
from duplet_memory.cuda_driver import open_devices

ROW_BYTES = 36 * 2 * 2048
STEP_S = 0.004
"""About what a prefill step of 256 rows takes."""
SKIPPED = 40
"""First transfers of a phase that do not count."""
LIMIT_S = 75
LINK_GB_S = 385.0
"""Of one contiguous copy, measured by `kv_move_run`."""

ONE = Phase("one", 250, 1, STEP_S)
PHASES = [
    ONE,
    Phase("turns", 400, 8, STEP_S),
    Phase("bursts", 400, 8, 8 * STEP_S, 8),
    Phase("at-once", 300, 8, 0.0),
]
TWO_UNITS = Phase("one-kvproxy", 600, 16, STEP_S, 2)
EACH_UNIT = Phase("one-kvproxy-each", 300, 8, STEP_S)

Sides = tuple[dict[str, Any], dict[str, Any]]
"""What prefill's and decode's peer printed."""


def run_units(
    units: int, phases: list[Phase], transports: str, arrangement: str = "page-major"
) -> list[Sides]:
    """Run so many units at once, each with a kvproxy; the engines of the first one work."""
    devices = open_devices()
    started: list[subprocess.Popen[Any]] = []
    peers: list[subprocess.Popen[str]] = []
    with ExitStack() as stack:
        for unit in range(units):
            run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv"))
            environment = {**os.environ, "DUPLET_RUN_DIR": run_dir, "DUPLET_LOG_LEVEL": "warning"}
            environment["DUPLET_KVPROXY_TRANSPORTS"] = transports
            kvproxy = [sys.executable, "-m", "duplet_kvproxy"]
            started.append(subprocess.Popen(kvproxy, env=environment))
            plan: dict[str, Any] = {"run_dir": run_dir, "arrangement": arrangement}
            plan["phases"] = [asdict(phase) for phase in phases]
            for role, device, load in (
                ("prefill", devices[0], "matmul"),
                ("decode", devices[-1], "sum"),
            ):
                own = {"device": device.uuid, "load": "" if unit else load}
                peer = [sys.executable, "-m", "bench.kv_move_peer", role, json.dumps(plan | own)]
                peers.append(subprocess.Popen(peer, stdout=subprocess.PIPE, text=True))
        try:
            texts = [peer.communicate(timeout=LIMIT_S)[0] for peer in peers]
        finally:
            for process in (*started, *peers):
                process.kill()
                process.wait()
    # Log lines come first.
    lines = [json.loads(text.splitlines()[-1]) for text in texts]
    return list(zip(lines[::2], lines[1::2], strict=True))


def link_free_ns(moves: list[list[int]]) -> dict[int, float]:
    """When an ideal link would have carried each Move, by the time at which it left."""
    free, result = 0.0, {}
    for sent_ns, rows in moves:
        free = max(free, sent_ns) + rows * ROW_BYTES / LINK_GB_S
        result[sent_ns] = free
    return result


def tell(phases: list[Phase], sides: list[Sides], prefix: str = "move-to-landed") -> None:
    """Say p50 and p99 of each phase, as measured and less the link's own queueing."""
    first = 0
    for phase in phases:
        took_ms, less_ms = [], []
        for prefill, decode in sides:
            ideal = link_free_ns(prefill["moves"])
            for number in range(first + SKIPPED, first + phase.transfers):
                sent, landed = prefill["times"][str(number)], decode["times"][str(number)]
                took_ms.append((landed - sent) / 1e6)
                less_ms.append((landed - ideal[sent]) / 1e6)
        first += phase.transfers
        for name, values in (("", took_ms), (".less-link", less_ms)):
            p50, p99 = (float(p) for p in np.percentile(values, [50, 99]))
            say(f"{prefix}.{phase.name}{name}.p50", p50, "ms")
            say(f"{prefix}.{phase.name}{name}.p99", p99, "ms")


def main() -> int:
    phases = [*PHASES, TWO_UNITS]
    tell(phases, run_units(1, phases, "pages"))
    tell([EACH_UNIT], run_units(2, [EACH_UNIT], "pages"))
    for transports, arrangement in (
        ("push,pull", "layer-major"),
        ("staged", "layer-major"),
        ("host", "page-major"),
    ):
        sides = run_units(1, [ONE], transports, arrangement)
        tell([ONE], sides, f"move-to-landed.{arrangement}.{transports.replace(',', '-or-')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
