"""Moving KV between two pools on the CPU, against one contiguous copy of as many bytes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.results import quantile
from duplet_kvproxy.transport import copy_shared_memory
from duplet_memory.layout import describe_pool
from duplet_memory.plan import check_copy
from duplet_memory.pool import create_pool

PAGES = 24
SHAPE: dict[str, Any] = {
    "layers": 36,
    "page_rows": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "pages": PAGES,
    "arrangement": "page-major",
}
"""The article's model: 2.25 MiB a page."""
MOVED = 12
"""Pages of one copy, anywhere in both pools."""


def move_over_contiguous(rounds: int) -> float:
    """Median time of a move, planned and checked as kvproxy does it, over that of one copy of
    its bytes within one array; both have their turn in each round."""
    source, dest = (create_pool(describe_pool(**SHAPE)) for _ in range(2))
    try:
        source.memory[:] = 1
        dest.memory[:] = 2
        draw = np.random.default_rng(7)
        size = MOVED * source.description.page_bytes
        rows = MOVED * source.description.page_rows
        moved_ns, copied_ns = [], []
        for _ in range(rounds):
            froms, tos = (draw.permutation(PAGES)[:MOVED].tolist() for _ in range(2))
            began_ns = time.perf_counter_ns()
            copy = check_copy(source.description, froms, dest.description, tos, 0, rows)
            copy_shared_memory(copy, source, dest)
            between_ns = time.perf_counter_ns()
            dest.memory[-size:] = source.memory[-size:]
            moved_ns.append(between_ns - began_ns)
            copied_ns.append(time.perf_counter_ns() - between_ns)
        return quantile(moved_ns, 0.5) / quantile(copied_ns, 0.5)
    finally:
        source.close()
        dest.close()
