"""How many rows one lb process carries: `python -m bench.stream`.

A real lb between a stub of prefill and decode, which speaks the real peer streams, and client
processes that read. Each case is a new lb: an event loop, a number of streams, rows a message.
Where the machine has fewer cores than processes, rows/s tells of the machine; the CPU time
that lb takes for a million rows tells of lb.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.processes import clean_environment, cpu_seconds, resident_mb, running
from bench.results import MEASUREMENTS, QUANTILES, Report, quantile
from bench.stream_lb import LOOPS, UNMETERED
from duplet_unit.probe import is_serving

CLIENTS = 4
READY_S = 30.0
POLL_S = 0.05
RSS_BUDGET = "< 150"


@dataclass(frozen=True, slots=True)
class Case:
    """One lb and its streams."""

    loop: str
    streams: int
    rows_per_message: int
    rows: int
    """Of all streams together, about."""
    steps_per_s: int = 0
    """0: as many as there can be."""
    metered: bool = True
    """lb measures its streams, as it always does in the product."""
    otlp_endpoint: str = ""
    """Where lb sends spans."""

    @property
    def name(self) -> str:
        size = "1 row" if self.rows_per_message == 1 else f"{self.rows_per_message} rows"
        pace = f", {self.steps_per_s} steps/s" if self.steps_per_s else ""
        return f"{self.loop}, {self.streams} streams{pace}, {size} a message"


FULL = [
    *(
        Case(loop, streams, rows_per_message, rows)
        for streams in (64, 256)
        for rows_per_message, rows in ((1, 50_000), (8, 150_000))
        for loop in LOOPS
    ),
    *(Case(loop, 64, 1, 20_000, steps_per_s=50) for loop in LOOPS),
]
SMALL = [Case("asyncio", 8, 8, 400), Case("uvloop", 8, 1, 80, steps_per_s=50)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case gave."""

    rows: int
    delays_ns: list[int]
    """Of every message, from its newest row's step to its reading."""
    wall_s: float
    lb_cpu_s: float
    lb_rss_mb: float


async def run_case(case: Case) -> Outcome:
    """Start everything, stream, and stop everything."""
    rows = max(2, case.rows // case.streams)
    with tempfile.TemporaryDirectory(prefix="duplet-bench-") as folder:
        counters = Path(folder) / "counters"
        np.zeros(CLIENTS, dtype=np.int64).tofile(counters)
        address = f"unix:{folder}/speech.sock"
        environment = clean_environment(
            {
                "DUPLET_RUN_DIR": folder,
                "DUPLET_LB_LISTEN": address,
                "DUPLET_LOG_LEVEL": "warning",
                "DUPLET_LB_QUEUE_LIMIT": str(case.streams),
                "DUPLET_LB_OTLP_ENDPOINT": case.otlp_endpoint,
                **({} if case.metered else {UNMETERED: "1"}),
            }
        )
        pace = str(case.steps_per_s)
        stub_arguments = (folder, str(case.streams), str(rows), pace, str(counters))
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            lb = await enter(running("bench.stream_lb", case.loop, environment=environment))
            stub = await enter(running("bench.stream_stub", *stub_arguments))
            await stub.read()
            await wait_ready(address)
            sizes = (str(case.streams // CLIENTS), str(rows), str(case.rows_per_message))
            clients = [
                await enter(
                    running("bench.stream_client", address, *sizes, str(counters), str(index))
                )
                for index in range(CLIENTS)
            ]
            await asyncio.gather(*(client.read() for client in clients))  # all are admitted
            began_ns, cpu_before_s = time.monotonic_ns(), cpu_seconds(lb.pid)
            stub.tell("go")
            answers = [json.loads(await client.read()) for client in clients]
            ended_ns = max(answer["ended_ns"] for answer in answers)
            return Outcome(
                rows * case.streams,
                [delay_ns for answer in answers for delay_ns in answer["delays_ns"]],
                (ended_ns - began_ns) / 1e9,
                cpu_seconds(lb.pid) - cpu_before_s,
                resident_mb(lb.pid),
            )


async def wait_ready(address: str) -> None:
    """Wait until lb takes requests.

    Raises:
        TimeoutError: it does not.
    """
    async with asyncio.timeout(READY_S):
        while True:
            if await is_serving(address, "ready"):
                return
            await asyncio.sleep(POLL_S)


def report_case(report: Report, case: Case, outcome: Outcome) -> None:
    """Rates, and what they cost lb."""
    name = case.name
    report.add(f"{name}: rows", outcome.rows / outcome.wall_s, "rows/s")
    report.add(f"{name}: messages", len(outcome.delays_ns) / outcome.wall_s, "messages/s")
    cpu_s = outcome.lb_cpu_s / outcome.rows * 1e6
    report.add(f"{name}: CPU of lb a million rows", cpu_s, "s")
    report.add(f"{name}: cores that lb used", outcome.lb_cpu_s / outcome.wall_s, "cores")
    if case.steps_per_s:
        for quantile_name, share in QUANTILES.items():
            delay_ms = quantile(outcome.delays_ns, share) / 1e6
            report.add(f"{name}: step to client, {quantile_name}", delay_ms, "ms")
    report.add(f"{name}: lb_rss_mb", outcome.lb_rss_mb, "MB", RSS_BUDGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few rows: does it run at all?")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="folder of the results")
    options = parser.parse_args()
    report = Report("stream")
    for case in SMALL if options.small else FULL:
        report_case(report, case, asyncio.run(run_case(case)))
        print(case.name, flush=True)
    report.save(options.out)
    print(report.table())


if __name__ == "__main__":
    main()
