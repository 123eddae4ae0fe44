"""All figures of a unit beside two monoliths on the same cards, from one command.

`python -m bench.pair --gpu 0,1 --model random:s2-pro --budget-s 560 --replay TRACE`. Items:
`unit` (how many streams it carries, by mix), `waterfall` (where requests' time goes at 60 % of
that and in a burst), `replay` (a slice of a trace), `unpacked` (the unit with prompts as JSON),
`monoliths` (how many streams they carry). They come in this order, but for the waterfall, which
comes as soon as the unit's first mix is known. The first three are one life of one unit.

A search of one mix sends nothing later than `--search-s` after it began, a request has its time
and a load that hangs is given up, so that one item does not cost the others theirs.

Everything is in `--out` as soon as it is known, and what is there is not measured again: a run
that is cut, by its budget or from outside, goes on with the same command. `bench.pair_figures`
makes tables and pictures of it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.capacity import FAILURES, Search, read_costs, tell_failure
from bench.levels import Limits
from bench.pair_items import (
    NAME,
    POINTS,
    Bench,
    measure_monoliths,
    measure_unpacked,
    report_checks,
    unit_jobs,
)
from bench.points import Store
from bench.processes import clean_environment
from bench.results import MEASUREMENTS, ROOT, Report
from bench.systems import UNIT, mixes, running
from duplet_runtime.settings import SERVICE_NAMES
from duplet_unit.gpus import model_settings

ITEMS = ("unit", "waterfall", "replay", "unpacked", "monoliths")
DRAIN_S = 5
MOST_VAIN_STARTS = 2
"""Of a unit: one more would not start either."""


async def run_on_unit(bench: Bench, items: Sequence[str]) -> int:
    """These items on one unit; on a fresh one after one that failed. How many failed."""
    waiting = unit_jobs(bench, items)
    failed = vain_starts = 0
    while waiting and vain_starts < MOST_VAIN_STARTS and bench.has_time(waiting[0][0]):
        name = "start of the unit"
        try:
            longest = bench.longest_prompt
            async with running(UNIT, bench.environment, bench.gpus, longest) as address:
                await bench.search.warm_up(UNIT, bench.base, address)
                while waiting:
                    name, measure = waiting.pop(0)
                    await measure(address)
                    await report_checks(bench, address)
        except* FAILURES as errors:
            vain_starts += name == "start of the unit"
            failed += 1
            tell_failure(name, errors)
    if vain_starts:
        print(f"not measured: {', '.join(name for name, _ in waiting) or 'nothing'}", flush=True)
    return failed


async def run(bench: Bench) -> int:
    """All items that were asked for. How many failed."""
    items = bench.options.items
    failed = await run_on_unit(bench, items)
    if "unpacked" in items:
        failed += await measure_unpacked(bench)
    if "monoliths" in items:
        failed += await measure_monoliths(bench)
    return failed


def make_bench(options: argparse.Namespace) -> Bench:
    """From the command line; its time counts from here."""
    gpus = options.gpu.split(",") if options.gpu else []
    workload = (
        f"{options.model} on {f'GPUs {options.gpu}' if gpus else 'CPU'}, prompts of "
        f"{options.prompt_rows[0]} to {options.prompt_rows[1]} rows of which three quarters are "
        f"a voice's, {options.output_rows[0]} to {options.output_rows[1]} rows of output, TTFA "
        f"p95 within {options.ttfa_ms:g} ms, {options.window_s:g} s a level"
    )
    ends_s = time.monotonic() + options.budget_s
    store = Store(options.out / POINTS, workload)
    limits = Limits(options.ttfa_ms / 1e3, options.ramp_s, options.window_s, options.processes)
    costs = read_costs(MEASUREMENTS / "decode_step.jsonl") if gpus and not options.first else None
    steps = (costs, options.first or 1, options.step)
    slots = {f"DUPLET_{name}_SLOTS": str(options.most) for name in ("DECODE", "MONOLITH")}
    # Whoever is stopped here has been read to the end, or hangs.
    drains = {f"DUPLET_{name.upper()}_DRAIN_S": str(DRAIN_S) for name in SERVICE_NAMES}
    environment = {
        **clean_environment(slots),
        **drains,
        # The search finds where the floor breaks; a unit that refuses before would hide it.
        "DUPLET_DECODE_FLOOR_ROWS_PER_S": "0",
        "DUPLET_LOG_LEVEL": "warning",
        **model_settings(options.model),
        **dict(setting.split("=", 1) for setting in options.set),
    }
    search = Search(store, limits, options.most, *steps, ends_s, options.search_s)
    every = mixes(options.prompt_rows, options.output_rows)[: options.mixes]
    return Bench(options, search, every, environment, gpus, Report(NAME, workload))


def make_parser() -> argparse.ArgumentParser:
    """Of the command line."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--items", type=lambda text: text.split(","), default=list(ITEMS), help="default: all")
    add("--budget-s", type=float, default=3_600.0, help="nothing is sent later")
    add("--search-s", type=float, default=math.inf, help="nor later in one search")
    add("--gpu", default="", help="prefill's and decode's GPU, such as 0,1")
    add("--model", default="tiny")
    add("--set", action="append", default=[], metavar="DUPLET_NAME=VALUE")
    add("--most", type=int, default=320, help="slots, and streams that are tried at most")
    add("--first", type=int, default=0, help="streams that are tried first; 0 on GPUs: foretold")
    add("--step", type=int, default=1, help="between levels, with --first")
    add("--ramp-s", type=float, default=6.0, help="over which the first streams begin")
    add("--window-s", type=float, default=9.0, help="a level lasts")
    add("--processes", type=int, default=max(1, min(8, cores // 4)), help="of clients")
    add("--ttfa-ms", type=float, default=500.0)
    add("--prompt-rows", type=int, nargs=2, default=(1_000, 2_000))
    add("--output-rows", type=int, nargs=2, default=(126, 420))
    add("--chunks", type=int, nargs="+", default=[384, 512, 1_024])
    add("--mixes", type=int, default=3, help="how many of them")
    add("--replay", type=Path, help="trace; needed for the item replay")
    add("--replay-from-s", type=float, default=0.0)
    add("--replay-s", type=float, default=240.0)
    add("--replay-speed", type=float, default=1.0)
    add("--replay-rows", type=int, nargs=2, default=(21, 630), help="of output")
    add("--out", type=Path, default=ROOT / "run" / NAME)
    return parser


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    if unknown := [item for item in options.items if item not in ITEMS]:
        parser.error(f"--items {','.join(unknown)}: known are {','.join(ITEMS)}")
    if "replay" in options.items and (options.replay is None or not options.replay.exists()):
        parser.error(f"--replay {options.replay}: the item replay needs a trace")
    if wrong := [setting for setting in options.set if "=" not in setting]:
        parser.error(f"--set {wrong[0]}: NAME=VALUE is wanted")
    try:
        bench = make_bench(options)
    except ValueError as error:  # what --out has is none of ours
        parser.error(str(error))
    failed = asyncio.run(run(bench))
    print(f"{failed} items failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
