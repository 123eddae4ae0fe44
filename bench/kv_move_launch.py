"""What the host does between a request and a kernel's launch: `python -m bench.kv_move_launch`.

2,048 rows of a layer-major pool, by `pull`, on a driver that answers at once; the kernel is
compiled, nothing runs. Prints one JSON object a line, microseconds in the median: `hot` with
nothing in between, `cold` with the caches swept. `first` is until the first launch, which is the
head's where a copy has one, `whole` until all is launched, `without-head` the same in one launch;
`packing` is what it takes to write the page numbers down, which is part of the check.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from bench.kv_move_unit import SHAPE
from duplet_kvproxy import gpu_queue, kernel_build
from duplet_kvproxy.head_start import HEAD_PAGES, LEAST_HEADS, start_checked
from duplet_kvproxy.move_direct import DirectMover
from duplet_memory.layout import PoolDescription, describe_pool

ROWS = 2048
POOL_ROWS = 16_384
VARIANTS = 8
ROUNDS = 80
SWEPT_BYTES = 32 << 20


class Gpu:
    """A GPU that does nothing, nor does making it the current one."""

    capability = 90

    def attribute(self, name: str) -> int:
        return 132

    def use(self) -> None:
        pass


class Driver:
    """Answers every call. Owns what it lends as pinned memory."""

    def __init__(self) -> None:
        self._memory: list[NDArray[np.uint8]] = []
        self.launched_ns: list[int] = []

    def call(self, name: str, *arguments: Any) -> int:
        if name == "cuMemHostAlloc":
            self._memory.append(np.zeros(arguments[0], np.uint8))
            return int(self._memory[-1].ctypes.data)
        return 1

    def call_quickly(self, name: str, *arguments: int) -> None:
        if name == "cuLaunchKernel":
            self.launched_ns.append(time.perf_counter_ns())


class Place:
    """A pool that is only described."""

    def __init__(self, page_rows: int) -> None:
        self.description: PoolDescription = describe_pool(
            **SHAPE, page_rows=page_rows, pages=POOL_ROWS // page_rows, arrangement="layer-major"
        )

    def address(self, device: Any) -> int:
        return 1 << 40


def measure(page_rows: int, is_cold: bool, rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds until the first launch, until the last with a head and without, and of
    packing."""
    driver, gpu = Driver(), Gpu()
    source, dest = Place(page_rows), Place(page_rows)
    chance = np.random.default_rng(1)
    count = ROWS // page_rows
    pages = POOL_ROWS // page_rows
    lists = [
        [tuple(chance.permutation(pages)[:count].tolist()) for _ in range(2)]
        for _ in range(VARIANTS)
    ]
    packing = struct.Struct(f"={count}q")
    swept = np.zeros(SWEPT_BYTES, np.uint8)
    times: dict[str, list[int]] = {"first": [], "whole": [], "without-head": [], "packing": []}
    with ExitStack() as stack:
        for module in (gpu_queue, kernel_build):
            stack.enter_context(patch.object(module, "call", driver.call))
            stack.enter_context(patch.object(module, "call_quickly", driver.call_quickly))
        ends: Any = (gpu, gpu)
        mover = DirectMover("pull", *ends)
        mover.prepare(source.description.row_bytes)
        for turn in range(rounds):
            from_pages, to_pages = lists[turn % VARIANTS]
            pools = (source, from_pages, dest, to_pages)
            for head_pages, first, last in (
                (HEAD_PAGES, "first", "whole"),
                (ROWS, "", "without-head"),
            ):
                if is_cold:
                    swept[::64] += 1
                driver.launched_ns.clear()
                began_ns = time.perf_counter_ns()
                flight, _ = start_checked(mover, *pools, 0, ROWS, head_pages)
                ended_ns = time.perf_counter_ns()
                flight.wait()
                times[last].append(ended_ns - began_ns)
                if first:
                    times[first].append(driver.launched_ns[0] - began_ns)
                has_head = count >= LEAST_HEADS * head_pages
                assert len(driver.launched_ns) == 1 + has_head
            began_ns = time.perf_counter_ns()
            for numbers in (from_pages, to_pages):
                packing.pack(*numbers)
            times["packing"].append(time.perf_counter_ns() - began_ns)
    return {name: statistics.median(values) / 1e3 for name, values in times.items()}


def main() -> int:
    for page_rows in (1, 16):
        for is_cold in (False, True):
            found = measure(page_rows, is_cold)
            state = "cold" if is_cold else "hot"
            for name, value in found.items():
                case = f"request-to-launch.{ROWS // page_rows}-pages.{state}.{name}"
                print(json.dumps({"case": case, "value": round(value, 1), "unit": "us"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
