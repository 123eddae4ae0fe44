"""How many streams the load generator reads: `python -m bench.generator`.

The generator is `duplet bench`'s. It stands before a real lb whose prefill and decode are a stub
(`bench.stream_stub`) that sends a row of every stream on time, whoever reads, and says how late
it was itself: *lag* is how much later than due its event loops woke, and so read what had come.
A stream keeps the pace when it has its rows at 99 % of the stub's rate; where lb is the slower
one, CPU and lag of both say so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.processes import clean_environment, cpu_seconds, running
from bench.results import MEASUREMENTS, Report, quantile
from bench.stream import wait_ready
from duplet_load.generator import Load, Outcome, run_load
from duplet_load.trace import Arrival

LOOP = "uvloop"
PROMPT_ROWS = 64
KEEPS_PACE = 0.99
LAG_BUDGET = "<= 10"


@dataclass(frozen=True, slots=True)
class Case:
    """Streams, their pace, and who reads them."""

    streams: int
    rows_per_s: int
    rows: int
    """Of one stream."""
    processes: int

    @property
    def name(self) -> str:
        return f"{self.streams} streams at {self.rows_per_s} rows/s, {self.processes} processes"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one case gave."""

    outcome: Outcome
    lb_cpu_s: float
    generator_cpu_s: float

    @property
    def rows(self) -> int:
        return sum(record.rows for record in self.outcome.records)


async def run_case(case: Case) -> Reading:
    """Start everything, read all streams, and stop everything."""
    with tempfile.TemporaryDirectory(prefix="duplet-bench-") as folder:
        address = f"unix:{folder}/speech.sock"
        environment = clean_environment(
            {
                "DUPLET_RUN_DIR": folder,
                "DUPLET_LB_LISTEN": address,
                "DUPLET_LOG_LEVEL": "warning",
                "DUPLET_LB_QUEUE_LIMIT": str(case.streams),
            }
        )
        arguments = (folder, str(case.streams), str(case.rows), str(case.rows_per_s), "-")
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            lb = await enter(running("bench.stream_lb", LOOP, environment=environment))
            stub = await enter(running("bench.stream_stub", *arguments))
            await stub.read()
            await wait_ready(address)
            stub.tell("go")  # as soon as all are admitted
            arrivals = [
                Arrival(0.0, ((f"voice-{index % 8}", PROMPT_ROWS),), case.rows)
                for index in range(case.streams)
            ]
            lb_before_s, own_before_s = cpu_seconds(lb.pid), children_cpu_s()
            load = Load(address, case.processes, case.streams)
            outcome = await run_load(load, arrivals, lambda _: None)
            lb_s = cpu_seconds(lb.pid) - lb_before_s
            # The client processes are the only children that have ended.
            return Reading(outcome, lb_s, children_cpu_s() - own_before_s)


def children_cpu_s() -> float:
    """CPU seconds of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report_case(report: Report, case: Case, reading: Reading) -> None:
    """How late the generator was, what it kept up with, what it cost."""
    records = reading.outcome.records
    pace = KEEPS_PACE * case.rows_per_s
    kept = sum(record.well and (record.rows_per_second or 0) >= pace for record in records)
    name = case.name
    at_pace = f"generator_streams_at_{case.rows_per_s}_rows"
    report.add(f"{name}: {at_pace}", kept, "streams", f">= {case.streams}")
    lag_ms = 1e3 * quantile(reading.outcome.lateness_s, 0.99)
    report.add(f"{name}: generator_lag_p99_ms", lag_ms, "ms", LAG_BUDGET)
    report.add(f"{name}: longest lag", 1e3 * max(reading.outcome.lateness_s), "ms")
    gap_s = reading.outcome.gaps.quantile(0.99) or 0.0
    report.add(f"{name}: gap between rows, p99", 1e3 * gap_s, "ms")
    seconds = case.rows / case.rows_per_s
    report.add(f"{name}: cores of the generator", reading.generator_cpu_s / seconds, "cores")
    report.add(f"{name}: cores of lb", reading.lb_cpu_s / seconds, "cores")
    cpu_s = reading.generator_cpu_s / reading.rows * 1e6
    report.add(f"{name}: CPU of the generator a million rows", cpu_s, "s")


def main() -> None:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rows-per-s", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--processes", type=int, default=max(1, cores // 2), help="that read")
    parser.add_argument("--small", action="store_true", help="a few rows: does it run at all?")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="folder of the results")
    options = parser.parse_args()
    rows = round(options.seconds * options.rows_per_s)
    case = Case(options.streams, options.rows_per_s, rows, options.processes)
    if options.small:
        case = Case(8, 60, 60, 2)
    report = Report("generator")
    report_case(report, case, asyncio.run(run_case(case)))
    report.save(options.out)
    print(report.table())


if __name__ == "__main__":
    main()
