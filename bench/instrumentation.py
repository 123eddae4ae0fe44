"""What it costs to measure: `python -m bench.instrumentation`.

*Unit*: two units on the CPU that differ in one thing: the counters and histograms of the second
do nothing (`bench.unmetered`). Both get the same load in turns, and the figure is the rows that
a second of CPU gives, all processes of the unit together, with measuring over without.
*lb*: the same for lb alone at its fullest, between a stub and clients (`bench.stream`); there
is no model, so this is the dearest that measuring can be. *Spans*: lb alone with requests of
120 rows, with an endpoint for OpenTelemetry over without one; without one, nothing of it is
loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.processes import children_of, clean_environment, cpu_seconds
from bench.results import MEASUREMENTS, ROOT, Report, quantile
from bench.stream import Case, run_case
from duplet_load.generator import Load, run_load
from duplet_load.synth import Synth, make_trace
from duplet_load.trace import Arrival
from duplet_unit.gpus import model_settings
from duplet_unit.supervisor import Supervisor
from duplet_unit.unit import free_local_address, owned_run_dir, unit_environment, unit_services
from duplet_unit.up import in_background, make_supervisor

RATIO = "instrumentation_throughput_ratio"
BUDGET = ">= 0.99"
LB_RATIO = "lb alone, 64 streams, 8 rows a message: throughput ratio"
LISTENERS = 16
TIMEOUT_S = 300.0
"""Of a request: others may want the cores, too."""
ROWS_PER_MESSAGE = 8
"""A message of few rows costs lb so much that what is counted of a row hardly shows."""
LOAD = Synth(
    requests=64, voices=4, prompt_least=60, prompt_most=120, output_least=100, output_most=120
)
SETTINGS = {
    "DUPLET_LOG_LEVEL": "warning",
    "DUPLET_DECODE_SLOTS": "32",
    "DUPLET_DECODE_FLOOR_ROWS_PER_S": "0",
}
FULLEST = Case("uvloop", 64, 8, 150_000)
NO_COLLECTOR = "http://127.0.0.1:9"
"""Nobody listens there: the spans are made, queued and dropped."""
SHORT_STREAMS = Case("uvloop", 64, 8, 7_680)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    unit_turns: int
    """Pairs of turns; each pair begins with the other one of the two."""
    lb_turns: int
    requests: int
    """Of a unit's turn."""
    lb_rows: int
    """Of lb's turn, and of one with spans."""
    span_rows: int


FULL = Size(unit_turns=12, lb_turns=6, requests=64, lb_rows=150_000, span_rows=7_680)
SMALL = Size(unit_turns=1, lb_turns=1, requests=8, lb_rows=1_024, span_rows=1_024)

RowCost = Callable[[], Coroutine[Any, Any, float]]
"""Runs once; CPU seconds a row."""


@dataclass(slots=True)
class CountedUnit:
    """One unit under load. Owned by `running_unit`."""

    address: str
    supervisor: Supervisor

    def cpu_s(self) -> float:
        """All processes of the unit so far."""
        pids = [self.supervisor.pid(name) for name in ("lb", "prefill", "decode", "kvproxy")]
        own = [pid for pid in pids if pid is not None]
        return sum(cpu_seconds(pid) for one in own for pid in (one, *children_of(one)))

    async def row_cost_s(self, arrivals: Sequence[Arrival]) -> float:
        """CPU seconds a row of one turn."""
        before_s = self.cpu_s()
        load = Load(
            self.address, 1, LISTENERS, rows_per_message=ROWS_PER_MESSAGE, timeout_s=TIMEOUT_S
        )
        outcome = await run_load(load, arrivals, lambda _: None)
        failed = [record.outcome for record in outcome.records if not record.well]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {sorted(set(failed))}")
        rows = sum(record.rows for record in outcome.records)
        if not rows:
            raise RuntimeError("the model stops at once: nothing is measured")
        return (self.cpu_s() - before_s) / rows


@asynccontextmanager
async def running_unit(metered: bool, model: str = "tiny") -> AsyncIterator[CountedUnit]:
    """A unit on the CPU while the context lasts."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = clean_environment({**SETTINGS, **model_settings(model), "PYTHONPATH": path})
    with owned_run_dir(None) as run_dir:
        listen = free_local_address()
        services = unit_services(run_dir, listen, unit_environment(environment))
        if not metered:
            command = (sys.executable, "-m", "bench.unmetered")
            services = [replace(s, argv=(*command, s.name)) for s in services]
        supervisor = make_supervisor(services, run_dir, lambda _: None)
        async with in_background(supervisor):
            if not await supervisor.wait_ready():
                raise RuntimeError(f"the unit did not start: {supervisor.failure}")
            yield CountedUnit(listen, supervisor)


async def ratios(turns: int, first: RowCost, second: RowCost) -> list[float]:
    """second's cost over first's, a pair of turns each; what changes meanwhile meets both."""
    found = []
    for turn in range(turns):
        if turn % 2:
            second_s, first_s = await second(), await first()
        else:
            first_s, second_s = await first(), await second()
        found.append(second_s / first_s)
    return found


async def unit_ratios(size: Size) -> list[float]:
    """Throughput of the unit that measures over that of the one that does not."""
    arrivals = make_trace(replace(LOAD, requests=size.requests))
    async with AsyncExitStack() as stack:
        units = [await stack.enter_async_context(running_unit(m)) for m in (True, False)]
        for unit in units:
            await unit.row_cost_s(arrivals)  # the first turn of a process is slower
        counting, silent = ((lambda u=u: u.row_cost_s(arrivals)) for u in units)
        return await ratios(size.unit_turns, counting, silent)


async def lb_row_cost_s(case: Case) -> float:
    """CPU seconds a row of a new lb."""
    outcome = await run_case(case)
    return outcome.lb_cpu_s / outcome.rows


async def lb_ratios(turns: int, first: Case, second: Case) -> list[float]:
    """lb's CPU for a row in `second` over that in `first`."""
    return await ratios(turns, lambda: lb_row_cost_s(first), lambda: lb_row_cost_s(second))


def report_ratios(report: Report, name: str, found: Sequence[float], budget: str = "") -> None:
    """The median pair, and the pairs around it."""
    report.add(name, quantile(found, 0.5), "ratio", budget)
    report.add(f"{name}: lowest pair", min(found), "ratio")
    report.add(f"{name}: highest pair", max(found), "ratio")


async def measure_unit(report: Report, size: Size) -> None:
    """The budget's figure."""
    report_ratios(report, RATIO, await unit_ratios(size), BUDGET)


async def measure_lb(report: Report, size: Size) -> None:
    """lb with nothing but rows to carry."""
    metered = replace(FULLEST, rows=size.lb_rows)
    found = await lb_ratios(size.lb_turns, metered, replace(metered, metered=False))
    report_ratios(report, LB_RATIO, found)


async def measure_spans(report: Report, size: Size) -> None:
    """lb that makes spans; needs the OTLP exporter."""
    untraced = replace(SHORT_STREAMS, rows=size.span_rows)
    traced = replace(untraced, otlp_endpoint=NO_COLLECTOR)
    found = await lb_ratios(size.lb_turns, traced, untraced)
    report_ratios(report, "lb alone, streams of 120 rows, spans: throughput ratio", found)


PARTS = {"unit": measure_unit, "lb": measure_lb, "spans": measure_spans}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--turns", type=int, default=0, help="pairs of turns")
    parser.add_argument("--small", action="store_true", help="one turn: does it run at all?")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="folder of the results")
    options = parser.parse_args()
    size = SMALL if options.small else FULL
    if options.turns:
        size = replace(size, unit_turns=options.turns, lb_turns=options.turns)
    report = Report("instrumentation")
    for name in options.part or PARTS:
        asyncio.run(PARTS[name](report, size))
    report.save(options.out)
    print(report.table())


if __name__ == "__main__":
    main()
