"""What `bench.pair` measures: the items, and the lines that each of them gives."""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.capacity import Job as SearchJob
from bench.capacity import Search, Then, find_on, pick_chunk, report_ratios, report_system
from bench.levels import run_bounded
from bench.points import Store, best
from bench.results import Report
from bench.systems import MONOLITH, UNIT, UNPACKED, Mix, System, chunked
from duplet_client import AsyncClient
from duplet_load.generator import Load, Outcome
from duplet_load.record import Record
from duplet_load.summary import summarize
from duplet_load.synth import make_trace
from duplet_load.trace import Arrival, Shape, cut_trace, read_trace
from duplet_unit.output_files import replacing

NAME = "pair"
POINTS, STEADY, BURST, REPLAY = "points.jsonl", "steady.jsonl", "burst.jsonl", "replay.jsonl"
STEADY_SHARE = 0.6
"""Of the streams that the unit carries: under the waterfall."""
BURST_SHARE = 0.4
"""Of them: so many come at once on top."""
BURST_S = 0.5
"""Requests that are sent so long from the burst on are in its waterfall."""


Job = Callable[[str], Awaitable[None]]
"""Measures on the unit at an address."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all items share. Borrowed by each."""

    options: argparse.Namespace
    search: Search
    mixes: Sequence[Mix]
    environment: dict[str, str]
    gpus: Sequence[str]
    origin: Report
    """Empty; the others are made of it."""

    @property
    def chunks(self) -> list[System]:
        return [chunked(rows) for rows in self.options.chunks]

    @property
    def base(self) -> Mix:
        """The mix of all items that take one."""
        return self.mixes[0]

    @property
    def longest_prompt(self) -> int:
        return int(self.options.prompt_rows[1])

    def has_time(self, name: str) -> bool:
        """Whether anything can still be measured; says so where not."""
        if self.search.left_s() > self.search.least_s:
            return True
        print(f"{name}: no time is left", flush=True)
        return False

    def report(self) -> Report:
        return self.origin.another()

    def keep(self, report: Report) -> None:
        """Write the lines down and show them."""
        if report.results:
            report.save(self.options.out)
            print(report.table(), flush=True)

    def keep_system(self, system: System, mix: Mix) -> None:
        """The lines of a search that ended, and what they make of the others'."""
        report = self.report()
        report_system(report, self.search.store, system, mix)
        if system.cards == 1:
            report_ratios(report, self.search.store, self.tuned, mix)
        self.keep(report)

    @property
    def tuned(self) -> System:
        """The best chunk size of those that were measured."""
        return pick_chunk(self.search.store, self.chunks, self.base)

    async def find_on(
        self, jobs: Iterable[SearchJob], before: Sequence[System] = (), then: Then = list
    ) -> int:
        """Search systems that are not running yet. How often one failed."""
        place = (self.gpus, self.environment, self.longest_prompt)
        order = (self.keep_system, before, then)
        return await find_on(self.search, jobs, *place, *order)

    def is_kept(self, name: str) -> bool:
        return Path(self.options.out, name).exists()

    def keep_records(self, name: str, records: Iterable[Record]) -> None:
        lines = [json.dumps(r.to_fields()) for r in sorted(records, key=lambda r: r.number)]
        # A file that is there is whole: nobody measures it again.
        with replacing(self.options.out / name) as draft:
            draft.write_text("\n".join(lines) + "\n", "utf-8")


# --- items ------------------------------------------------------------------------------


async def measure_unit(bench: Bench, mix: Mix, address: str) -> None:
    """How many streams the unit carries in this mix."""
    try:
        await bench.search.find(UNIT, mix, address)
    finally:
        bench.keep_system(UNIT, mix)


async def measure_waterfall(bench: Bench, address: str) -> None:
    """Requests' timelines with listeners at 60 % of what is carried, and when 40 % more come
    at once."""
    limits = bench.search.limits
    points = bench.search.store.points(UNIT.name, bench.base.name)
    if not points or not bench.has_time("waterfall"):
        print("waterfall: it needs to know what the unit carries, and time", flush=True)
        return
    most = best(points)
    streams = 1 if most is None else most.streams
    steady, more = max(1, round(STEADY_SHARE * streams)), max(2, round(BURST_SHARE * streams))
    burst_s = limits.ramp_s + limits.window_s
    starts_s = [limits.ramp_s * n / steady for n in range(steady)] + [burst_s] * more
    sends_s = burst_s + BURST_S
    load = Load(
        *(address, limits.processes),
        seconds=sends_s,
        timelines=True,
        starts_s=tuple(starts_s),
    )
    synth = replace(bench.base.synth, requests=40 * len(starts_s), label="waterfall/")
    outcome = await run_bounded(load, make_trace(synth), sends_s=sends_s)
    settled = [r for r in outcome.records if limits.ramp_s <= r.at_s < burst_s]
    fallen = [r for r in outcome.records if r.at_s >= burst_s]
    report = bench.report()
    names = (f"{steady} streams", f"{more} more at once")
    for name, records in zip(names, (settled, fallen), strict=True):
        report_load(report, f"waterfall: {name}", Outcome(records=records))
    bench.keep(report)
    bench.keep_records(STEADY, settled)
    bench.keep_records(BURST, fallen)
    check_kv(outcome)


async def measure_replay(bench: Bench, address: str) -> None:
    """A slice of a trace, each request at its time."""
    options = bench.options
    trace = options.replay
    shape = Shape(*options.prompt_rows, *options.replay_rows)
    whole = read_trace(trace, shape)
    arrivals = cut_trace(whole, options.replay_from_s, options.replay_s, options.replay_speed)
    if not arrivals:
        raise RuntimeError(f"{trace}: no request in the slice")
    needed_s = arrivals[-1].at_s
    if bench.search.left_s() < needed_s:
        print(f"replay: no time is left for {needed_s:.0f} s", flush=True)
        return
    load = Load(address, bench.search.limits.processes)
    outcome = await run_bounded(load, [_named(a) for a in arrivals], sends_s=needed_s)
    report = bench.report()
    name = f"replay of {options.replay_s:g} s of {trace.stem}, {options.replay_speed:g} x as fast"
    report_load(report, name, outcome)
    report.add(f"{name}: kv checks", outcome.kv_checks, "checks")
    report.add(f"{name}: kv mismatches", outcome.kv_mismatches, "checks", "<= 0")
    bench.keep(report)
    bench.keep_records(REPLAY, outcome.records)
    check_kv(outcome)


def _named(arrival: Arrival) -> Arrival:
    """With names of its own, which no other item has put into the cache."""
    parts = tuple((f"replay/{name}", rows) for name, rows in arrival.parts)
    return replace(arrival, parts=parts)


async def measure_unpacked(bench: Bench) -> int:
    """The unit with prompts as JSON, at the last levels that the unit was measured at. How many
    systems failed."""
    known = [p.streams for p in bench.search.store.points(UNIT.name, bench.base.name)][-3:]
    if not known:
        print(f"{UNPACKED.name}: it needs to know what the unit carries", flush=True)
        return 0
    step = max(1, known[-1] - known[-2]) if len(known) > 1 else 1
    search = replace(bench.search, costs=None, first=known[0], step=step)
    failed = await replace(bench, search=search).find_on([(UNPACKED, [bench.base])])
    report = bench.report()
    report_forms(report, bench.search.store, bench.base)
    bench.keep(report)
    return failed


async def measure_monoliths(bench: Bench) -> int:
    """Whole prompts in all mixes and every chunk size in the first; then the best chunk size in
    the others. How many systems failed."""

    def go_on() -> list[SearchJob]:
        print(f"tuned: {bench.tuned.name}", flush=True)
        # The longest first: it goes on where the tuned one may run, while the other GPU is busy.
        return [(bench.tuned, [mix]) for mix in reversed(bench.mixes[1:])]

    jobs = [(MONOLITH, bench.mixes), *((system, [bench.base]) for system in bench.chunks)]
    failed = await bench.find_on(jobs, before=bench.chunks, then=go_on)
    # All once more in one table: a search that failed has points too, and a ratio that was told
    # before all chunk sizes were known may be another's.
    report = bench.report()
    for mix in bench.mixes:
        for system in (UNIT, MONOLITH, *bench.chunks):
            report_system(report, bench.search.store, system, mix)
        report_ratios(report, bench.search.store, bench.tuned, mix)
    bench.keep(report)
    return failed


def unit_jobs(bench: Bench, items: Sequence[str]) -> list[tuple[str, Job]]:
    """What is still to be measured on a unit, by name; in the order in which a run that is cut
    leaves most."""
    jobs: list[tuple[str, Job]] = []

    def add_search(mix: Mix) -> None:
        if "unit" in items and not bench.search.is_over(UNIT, mix):
            jobs.append((f"unit, {mix.name}", partial(measure_unit, bench, mix)))

    def add(item: str, name: str, measure: Callable[[Bench, str], Awaitable[None]]) -> None:
        if item in items and bench.is_kept(name):
            print(f"{item}: is kept in {bench.options.out / name}", flush=True)
        elif item in items:
            jobs.append((item, partial(measure, bench)))

    add_search(bench.base)
    add("waterfall", BURST, measure_waterfall)
    for mix in bench.mixes[1:]:
        add_search(mix)
    add("replay", REPLAY, measure_replay)
    return jobs


# --- results ----------------------------------------------------------------------------


def report_load(report: Report, name: str, outcome: Outcome) -> None:
    """What the listeners of one load got."""
    summary = summarize(outcome)
    failed = sum(not record.well for record in outcome.records)
    report.add(f"{name}: requests", summary["requests"], "requests")
    report.add(f"{name}: failed", failed, "requests")
    report.add(f"{name}: stalled", summary["stalled_streams"], "streams")
    report.add(f"{name}: below 42 rows/s", summary["streams_below_floor"], "streams")
    for share in ("p50", "p95", "p99"):
        if summary["ttfa_s"][share] is not None:
            report.add(f"{name}: TTFA {share}", 1e3 * summary["ttfa_s"][share], "ms")


def report_forms(report: Report, store: Store, mix: Mix) -> None:
    """The slowest streams with packed over unpacked prompts, at the most streams that both had."""
    both = [
        {point.streams: point for point in store.points(system.name, mix.name)}
        for system in (UNIT, UNPACKED)
    ]
    shared = sorted(both[0].keys() & both[1].keys())
    if not shared:
        return
    packed, unpacked = (points[shared[-1]] for points in both)
    if packed.rate_p1 and unpacked.rate_p1:
        name = f"{mix.name}: slowest 1 % of {shared[-1]} streams, packed over unpacked prompts"
        report.add(name, packed.rate_p1 / unpacked.rate_p1, "ratio")


def check_kv(outcome: Outcome) -> None:
    if outcome.kv_mismatches:
        raise RuntimeError(f"{outcome.kv_mismatches} KV checks failed")


async def report_checks(bench: Bench, address: str) -> None:
    """All KV checks of a unit's life."""
    async with AsyncClient(address) as client:
        unit = await client.unit()
    report = bench.report()
    report.add("1P1D, all items: kv checks", unit.kv_checks, "checks")
    report.add("1P1D, all items: kv mismatches", unit.kv_mismatches, "checks", "<= 0")
    bench.keep(report)
