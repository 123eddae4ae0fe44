"""Three times as many requests as fit, and 500 at once: `python -m bench.overload [--gpu 0,1]`.

The unit admits what keeps every stream at the floor. Those that it admits must not stall, the
rest must hear so at once, and prefill must not have worked for them. Three phases on one unit:
listeners who double until the unit has seen its fill, a burst, and a flood at three times the
rate at which the burst's streams would be replaced. Each is written down when it is over.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.results import MEASUREMENTS, Report
from bench.systems import UNIT, running
from duplet_load.generator import Load, Outcome, run_load
from duplet_load.record import Record
from duplet_load.summary import FLOOR, quantile
from duplet_load.synth import Synth, make_trace
from duplet_load.trace import Arrival
from duplet_unit.gpus import model_settings

REFUSED_WITHIN_MS = 50
REFUSED = ("OVERLOADED",)


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase came to."""

    name: str
    admitted: Sequence[Record]
    refused: Sequence[Record]
    other: Sequence[Record]
    """Ended in any other way: a failure of the unit or of the bench."""
    prefilled: int
    """Prompts that prefill took."""
    outcome: Outcome


def split(name: str, outcome: Outcome, prefilled: int) -> Phase:
    """Sort the requests of a phase by how they ended."""
    records = outcome.records
    return Phase(
        name,
        [r for r in records if r.well],
        [r for r in records if r.outcome in REFUSED],
        [r for r in records if not r.well and r.outcome not in REFUSED],
        prefilled,
        outcome,
    )


def prompts_taken(port: int) -> int:
    """How many prompts prefill has computed to their end, by its metrics page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "duplet_prefill_prompt_seconds_count":
                return round(sample.value)
    raise RuntimeError("prefill has no duplet_prefill_prompt_seconds")


def report_phase(report: Report, phase: Phase) -> None:
    """The phase's lines; budgets are the promise to listeners."""
    name = phase.name
    report.add(f"{name}: requests", len(phase.outcome.records), "requests")
    report.add(f"{name}: admitted", len(phase.admitted), "requests")
    report.add(f"{name}: refused", len(phase.refused), "requests")
    late_ms = quantile([1e3 * record.lag_s for record in phase.outcome.records], 0.99)
    if late_ms is not None:  # a client's own work for all its calls of a burst is in its figures
        report.add(f"{name}: sent late, p99", late_ms, "ms")
    report.add(f"{name}: ended otherwise", len(phase.other), "requests", "<= 0")
    stalled = sum(record.stalls > 0 for record in phase.admitted)
    report.add(f"{name}: admitted streams that stalled", stalled, "streams", "<= 0")
    rates = [r.rows_per_second for r in phase.admitted if r.rows_per_second is not None]
    slow = sum(rate < FLOOR for rate in rates)
    report.add(f"{name}: admitted streams below {FLOOR:g} rows/s", slow, "streams", "<= 0")
    if phase.refused:
        took_ms = quantile([1e3 * record.took_s for record in phase.refused], 0.99)
        assert took_ms is not None
        report.add(f"{name}: refused after, p99", took_ms, "ms", f"<= {REFUSED_WITHIN_MS}")
    wasted = phase.prefilled - len(phase.admitted)
    report.add(f"{name}: prompts computed for nobody", wasted, "prompts", "<= 0")


async def run(
    options: argparse.Namespace, on_lines: Callable[[Report], None] = lambda _: None
) -> Report:
    """Measure the three phases; `on_lines` gets those of each as soon as they are known."""
    lengths = dict(zip(("prompt_least", "prompt_most"), options.prompt_rows, strict=True))
    lengths |= dict(zip(("output_least", "output_most"), options.output_rows, strict=True))
    synth = Synth(requests=options.burst, voices=30, cold=0.02, burstiness=0.0, seed=5, **lengths)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("DUPLET_")},
        "DUPLET_DECODE_SLOTS": str(options.slots),
        "DUPLET_DECODE_FLOOR_ROWS_PER_S": f"{FLOOR:g}",
        "DUPLET_PREFILL_METRICS_PORT": str(options.metrics_port),
        "DUPLET_LOG_LEVEL": "warning",
        **model_settings(options.model),
        **dict(setting.split("=", 1) for setting in options.set),
    }
    gpus = options.gpu.split(",") if options.gpu else ()
    where = f"GPUs {options.gpu}" if options.gpu else "CPU"
    report = Report("overload", f"{options.model} on {where}, {options.processes} clients")
    async with running(UNIT, environment, gpus, synth.prompt_most) as address:

        async def phase(name: str, arrivals: Sequence[Arrival], concurrency: int = 0) -> Phase:
            before = await asyncio.to_thread(prompts_taken, options.metrics_port)
            load = Load(address, options.processes, concurrency)
            outcome = await run_load(load, arrivals, lambda _: None)
            after = await asyncio.to_thread(prompts_taken, options.metrics_port)
            found = split(name, outcome, after - before)
            told = f"{len(found.admitted)} admitted, {len(found.refused)} refused"
            print(f"{name}: {told}", flush=True)
            return found

        def tell(found: Phase) -> None:
            told = report.another()
            report_phase(told, found)
            # Of both phases, once the second is known.
            checked.append(found.outcome)
            told.add("kv checks", sum(one.kv_checks for one in checked), "checks")
            mismatches = sum(one.kv_mismatches for one in checked)
            told.add("kv mismatches", mismatches, "checks", "<= 0")
            report.results += told.results
            on_lines(told)

        checked: list[Outcome] = []
        listeners = options.first
        while listeners <= options.most:
            # With prompts of its own, or prefill's cache would have all of a later phase.
            label = f"{listeners} listeners/"
            fill = make_trace(replace(synth, requests=2 * listeners, label=label))
            if (await phase(f"{listeners} listeners", fill, listeners)).refused:
                break
            listeners *= 2
        burst = [replace(arrival, at_s=0.0) for arrival in make_trace(synth)]
        fell = await phase(f"burst of {options.burst}", burst)
        tell(fell)
        mean_rows = (synth.output_least + synth.output_most) / 2
        rate = 3 * max(1, len(fell.admitted)) * FLOOR / mean_rows
        requests = round(rate * options.seconds)
        flood = replace(synth, rate=rate, requests=requests, burstiness=1.0, label="flood/")
        tell(await phase("3 x capacity", make_trace(flood)))
    return report


def make_parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpu", default="", help="prefill's and decode's GPU, such as 0,1")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="DUPLET_NAME=VALUE")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--first", type=int, default=1, help="listeners that are tried first")
    parser.add_argument("--most", type=int, default=256, help="listeners that are tried at most")
    parser.add_argument("--burst", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the flood")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--metrics-port", type=int, default=9464, help="of prefill")
    parser.add_argument("--prompt-rows", type=int, nargs=2, default=(1_000, 2_000))
    parser.add_argument("--output-rows", type=int, nargs=2, default=(126, 420))
    parser.add_argument("--out", type=Path, default=MEASUREMENTS)
    return parser


def main() -> None:
    options = make_parser().parse_args()

    def keep(told: Report) -> None:
        told.save(options.out)
        print(told.table(), flush=True)

    asyncio.run(run(options, keep))


if __name__ == "__main__":
    main()
