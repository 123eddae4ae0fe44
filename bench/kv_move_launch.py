"""What the host does between a checked request and a kernel's launch: `python -m
bench.kv_move_launch`.

2,048 rows of a layer-major pool, by `pull`, on a driver that answers at once; the kernel is
compiled, nothing runs. Prints one JSON object a line, microseconds in the median: `hot` with
nothing in between, `cold` with the caches swept; `packing` is what it takes to write the page
numbers down, which is part of the check.
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
from duplet_kvproxy.move_direct import DirectMover
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import check_copy

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
        self.launches = 0

    def call(self, name: str, *arguments: Any) -> int:
        if name == "cuMemHostAlloc":
            self._memory.append(np.zeros(arguments[0], np.uint8))
            return int(self._memory[-1].ctypes.data)
        return 1

    def call_quickly(self, name: str, *arguments: int) -> None:
        self.launches += name == "cuLaunchKernel"


class Place:
    """A pool that is only described."""

    def __init__(self, page_rows: int) -> None:
        self.description: PoolDescription = describe_pool(
            **SHAPE, page_rows=page_rows, pages=POOL_ROWS // page_rows, arrangement="layer-major"
        )

    def address(self, device: Any) -> int:
        return 1 << 40


def measure(page_rows: int, is_cold: bool, rounds: int = ROUNDS) -> dict[str, float]:
    """Microseconds of the check, of plan, tables and launch, of both, and of packing."""
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
    times: dict[str, list[int]] = {"check": [], "launch": [], "whole": [], "packing": []}
    with ExitStack() as stack:
        for module in (gpu_queue, kernel_build):
            stack.enter_context(patch.object(module, "call", driver.call))
            stack.enter_context(patch.object(module, "call_quickly", driver.call_quickly))
        ends: Any = (gpu, gpu)
        mover = DirectMover("pull", *ends)
        mover.prepare(source.description.row_bytes)
        for turn in range(rounds):
            from_pages, to_pages = lists[turn % VARIANTS]
            if is_cold:
                swept[::64] += 1
            began_ns = time.perf_counter_ns()
            copy = check_copy(source.description, from_pages, dest.description, to_pages, 0, ROWS)
            checked_ns = time.perf_counter_ns()
            flight: Any = mover.start(copy, source, dest)
            launched_ns = time.perf_counter_ns()
            flight.wait()
            times["check"].append(checked_ns - began_ns)
            times["launch"].append(launched_ns - checked_ns)
            times["whole"].append(launched_ns - began_ns)
            began_ns = time.perf_counter_ns()
            for numbers in (from_pages, to_pages):
                packing.pack(*numbers)
            times["packing"].append(time.perf_counter_ns() - began_ns)
    assert driver.launches == rounds
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
