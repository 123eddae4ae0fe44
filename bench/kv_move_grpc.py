"""From prefill's last `Move` to decode's `Landed`, through a real kvproxy over gRPC.

`python -m bench.kv_move_grpc`: kvproxy with its own transport choice, two peers that own pools
and whose engines work. One JSON object a line, as `kv_move_run` prints them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from bench.kv_move_run import say
from duplet_memory.cuda_driver import open_devices

ROWS = 1500
CHUNK_ROWS = 256
ROW_BYTES = 36 * 2 * 2048
CHUNK_S = 0.004
"""Between a transfer's Moves: about what a prefill step of so many rows takes. With 0 all of a
transfer's Moves leave at once."""
TRANSFERS = 400
SKIPPED = 50
LIMIT_S = 45
LINK_GB_S = 368.0
"""Of one contiguous copy, measured by `kv_move_run`; turns bytes ahead into queueing."""


def run_unit(window: int, chunk_s: float) -> tuple[dict[str, int], dict[str, int]]:
    """Times of prefill's last Moves and of decode's Landed, by transfer."""
    devices = open_devices()
    with tempfile.TemporaryDirectory(prefix="kv") as run_dir:
        environment = {
            **os.environ,
            "DUPLET_RUN_DIR": run_dir,
            "DUPLET_KVPROXY_TRANSPORTS": "pages,push,staged",
            "DUPLET_LOG_LEVEL": "warning",
        }
        kvproxy = [sys.executable, "-m", "duplet_kvproxy"]
        processes: list[subprocess.Popen[Any]] = [subprocess.Popen(kvproxy, env=environment)]
        plan = {"run_dir": run_dir, "transfers": TRANSFERS, "window": window}
        plan |= {"rows": ROWS, "chunk_rows": CHUNK_ROWS, "chunk_s": chunk_s}
        own = {
            "prefill": {"device": devices[0].uuid, "load": "matmul"},
            "decode": {"device": devices[-1].uuid, "load": "sum"},
        }
        for role, more in own.items():
            peer = [sys.executable, "-m", "bench.kv_move_peer", role, json.dumps(plan | more)]
            processes.append(subprocess.Popen(peer, stdout=subprocess.PIPE, text=True))
        try:
            texts = [p.communicate(timeout=LIMIT_S)[0] for p in processes[1:]]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    # Log lines come first.
    sent, landed = (json.loads(text.splitlines()[-1]) for text in texts)
    return sent, landed


def tell(window: int, chunk_s: float) -> None:
    """Say p50 and p99 of a window, as measured and less the link's own queueing."""
    sent, landed = run_unit(window, chunk_s)
    case = f"move-to-landed.{window}-in-flight" + ("" if chunk_s else ".at-once")
    numbers = sorted(int(n) for n in landed if int(n) >= SKIPPED)
    took_ms, less_ms = [], []
    for number in numbers:
        start, end = sent[str(number)], landed[str(number)]
        # Transfers before this one that had not landed when its last Move left.
        ahead = sum(1 for n in range(max(0, number - window), number) if landed[str(n)] > start)
        took_ms.append((end - start) / 1e6)
        # Without pauses the whole transfer is still to be moved, else its last chunk.
        rows = ROWS if not chunk_s else ROWS % CHUNK_ROWS or CHUNK_ROWS
        less_ms.append(took_ms[-1] - (ahead + 1) * rows * ROW_BYTES / LINK_GB_S / 1e6)
    for name, values in (("", took_ms), (".less-link", less_ms)):
        p50, p99 = (float(p) for p in np.percentile(values, [50, 99]))
        more: dict[str, Any] = {"transfers": len(values), "rows": ROWS}
        say(f"{case}{name}.p50", p50, "ms", **more)
        say(f"{case}{name}.p99", p99, "ms", **more)


def main() -> int:
    tell(1, CHUNK_S)
    tell(8, CHUNK_S)
    tell(8, 0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
