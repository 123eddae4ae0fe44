"""How many streams do two cards carry, as a unit and as two monoliths?

`python -m bench.capacity [--gpu 0,1] [--model random:s2-pro]`: for each mix of requests and each
system, the most streams at which nothing stalls, every stream has 42 rows/s or more, every
request ends well and TTFA p95 stays within its limit. Systems: the unit (1P1D, two cards), the
monolith that computes whole prompts between decode steps, and the monolith with chunks, whose
size is tuned over a grid (one card each). All get the same prompts, seeds and voices.

A mix without burstiness is a closed loop of N listeners. With it, requests arrive by themselves,
as many as keep N streams busy at exactly 42 rows/s (Little's law).
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.capacity_plot import plot_stalls
from bench.results import MEASUREMENTS, Report
from duplet_load.generator import Load, run_load
from duplet_load.summary import FLOOR, summarize
from duplet_load.synth import Synth, make_trace
from duplet_unit.gpus import model_settings, on_gpus
from duplet_unit.unit import (
    MONOLITH_STAGES,
    STAGES,
    free_local_address,
    monolith_services,
    owned_run_dir,
    unit_environment,
    unit_services,
)
from duplet_unit.up import in_background, make_supervisor


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of workload."""

    name: str
    synth: Synth


@dataclass(frozen=True, slots=True)
class System:
    """What is measured."""

    name: str
    cards: int
    chunk_rows: int = 0
    """Of a monolith; 0: whole prompts."""


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one number of streams."""

    streams: int
    carried: bool
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as carried, and how it is searched for."""

    ttfa_p95_s: float
    most_streams: int
    rounds: int
    """Requests for each stream in one measurement."""
    processes: int
    first: int = 1
    """Streams that are tried first."""


UNIT = System("1P1D", 2)
MONOLITH = System("monolith", 1)


def chunked(chunk_rows: int) -> System:
    return System(f"monolith, chunks of {chunk_rows}", 1, chunk_rows)


def mixes(lengths: Mapping[str, int]) -> list[Mix]:
    """Warm and smooth, half of the voices cold, and bursts."""
    warm = Synth(voices=30, cold=0.02, burstiness=0.0, seed=11, **lengths)
    return [
        Mix("warm, smooth", warm),
        Mix("half cold", replace(warm, cold=0.5)),
        Mix("bursts", replace(warm, cold=0.1, burstiness=4.0)),
    ]


@asynccontextmanager
async def running(
    system: System, environment: Mapping[str, str], gpus: Sequence[str], longest_prompt: int
) -> AsyncIterator[str]:
    """Start the system, stop it afterwards; its address."""
    is_unit = system == UNIT
    chunk_rows = system.chunk_rows or longest_prompt
    settings = {} if is_unit else {"DUPLET_MONOLITH_CHUNK_ROWS": str(chunk_rows)}
    with owned_run_dir(None) as run_dir:
        listen = free_local_address()
        make = unit_services if is_unit else monolith_services
        services = make(run_dir, listen, unit_environment({**environment, **settings}))
        if gpus:
            services = on_gpus(services, gpus if is_unit else gpus[:1])
        stages = STAGES if is_unit else MONOLITH_STAGES
        supervisor = make_supervisor(services, run_dir, lambda _: None, stages)
        async with in_background(supervisor):
            if not await supervisor.wait_ready():
                raise RuntimeError(f"{system.name} does not start: {supervisor.failure}")
            yield listen


async def measure(name: str, address: str, mix: Mix, streams: int, limits: Limits) -> Point:
    """Load the system with so many streams and judge what listeners got."""
    synth = replace(mix.synth, requests=max(2, streams * limits.rounds))
    bursts = synth.burstiness > 0
    if bursts:
        mean_rows = (synth.output_least + synth.output_most) / 2
        synth = replace(synth, rate=streams * FLOOR / mean_rows)
    load = Load(address, limits.processes, 0 if bursts else streams)
    outcome = await run_load(load, make_trace(synth), lambda _: None)
    summary = summarize(outcome)
    if summary["kv_mismatches"]:
        raise RuntimeError(f"{summary['kv_mismatches']} KV checks failed")
    failed = sum(not record.well for record in outcome.records)
    ttfa_s = summary["ttfa_s"]["p95"]
    carried = (
        failed == 0
        and summary["stalls"] == 0
        and summary["streams_below_floor"] == 0
        and (ttfa_s is None or ttfa_s <= limits.ttfa_p95_s)
    )
    print(
        f"{name}: {streams} streams: {'carried' if carried else 'not carried'}; {failed} failed, "
        f"{summary['stalled_streams']} stalled, {summary['streams_below_floor']} below the floor, "
        f"TTFA p95 {1e3 * (ttfa_s or 0):.0f} ms",
        flush=True,
    )
    return Point(streams, carried, summary)


async def search(name: str, address: str, mix: Mix, limits: Limits) -> list[Point]:
    """Measure at 1, 2, 4, … times the first number of streams until some are not carried, then
    between; in order."""
    points: dict[int, Point] = {}

    async def carries(streams: int) -> bool:
        points[streams] = await measure(name, address, mix, streams, limits)
        return points[streams].carried

    await measure(name, address, mix, 1, limits)  # warms voices and code; not judged
    low, high = 0, limits.first
    while high <= limits.most_streams and await carries(high):
        low, high = high, high * 2
    high = min(high, limits.most_streams + 1)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if await carries(middle):
            low = middle
        else:
            high = middle
    return [points[streams] for streams in sorted(points)]


def best(points: Sequence[Point]) -> Point | None:
    """The most streams below which everything was carried; None when not even one was."""
    found = None
    for point in points:
        if not point.carried:
            break
        found = point
    return found


async def find(
    system: System,
    every: Sequence[Mix],
    limits: Limits,
    options: argparse.Namespace,
    gpus: Sequence[str],
) -> dict[str, list[Point]]:
    """Points of one system on these GPUs, by mix."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("DUPLET_")},
        "DUPLET_DECODE_SLOTS": str(limits.most_streams),
        "DUPLET_MONOLITH_SLOTS": str(limits.most_streams),
        "DUPLET_LOG_LEVEL": "warning",
        **model_settings(options.model),
        **dict(setting.split("=", 1) for setting in options.set),
    }
    found = {}
    for mix in every:
        # A fresh one for each mix: its prefix cache is empty again.
        async with running(system, environment, gpus, mix.synth.prompt_most) as address:
            found[mix.name] = await search(f"{system.name}, {mix.name}", address, mix, limits)
    return found


async def find_all(
    systems: Sequence[System], every: Sequence[Mix], limits: Limits, options: argparse.Namespace
) -> dict[System, dict[str, list[Point]]]:
    """Points of all systems. Where there is a GPU for each, monoliths run side by side."""
    gpus = options.gpu.split(",") if options.gpu else []
    found: dict[System, dict[str, list[Point]]] = {}
    waiting = list(systems)
    while waiting:
        side_by_side = [waiting.pop(0)]
        own = [gpus]
        if side_by_side[0] != UNIT and len(gpus) > 1:
            side_by_side += waiting[: len(gpus) - 1]
            own = [[gpu] for gpu in gpus]
            waiting = waiting[len(gpus) - 1 :]
        turn = [find(s, every, limits, options, g) for s, g in zip(side_by_side, own, strict=False)]
        found |= dict(zip(side_by_side, await asyncio.gather(*turn), strict=True))
    return found


def pick_chunk(tried: Mapping[System, Mapping[str, list[Point]]], mix: str) -> System:
    """The chunk size that carries most; of equal ones, that with the earlier audio."""

    def worth(system: System) -> tuple[int, float]:
        point = best(tried[system][mix])
        return (0, 0.0) if point is None else (point.streams, -_ttfa(point))

    return max(tried, key=worth)


def _ttfa(point: Point) -> float:
    return float(point.summary["ttfa_s"]["p95"] or 0.0)


def report_mix(report: Report, mix: str, found: Mapping[System, Mapping[str, list[Point]]]) -> None:
    """The mix's lines: what each system carries, then the ratios per card."""
    per_card: dict[str, float] = {}
    gap_s: dict[str, float] = {}
    tuned = pick_chunk({s: f for s, f in found.items() if s not in (UNIT, MONOLITH)}, mix)
    for name, system in (("pd", UNIT), ("monolith", MONOLITH), ("chunked_monolith", tuned)):
        point = best(found[system][mix])
        streams = 0 if point is None else point.streams
        report.add(f"{mix}: {system.name}: streams carried", streams, "streams")
        per_card[name] = streams / system.cards
        report.add(f"{mix}: {system.name}: streams a card", per_card[name], "streams")
        if point is None:
            continue
        report.add(f"{mix}: {system.name}: TTFA p95", 1e3 * _ttfa(point), "ms")
        gap_s[name] = float(point.summary["gap_s"]["p99"] or 0.0)
        report.add(f"{mix}: {system.name}: row gap p99", 1e3 * gap_s[name], "ms")
    for other in ("monolith", "chunked_monolith"):
        if per_card[other]:
            ratio = per_card["pd"] / per_card[other]
            report.add(f"{mix}: capacity_per_card_pd_over_{other}", ratio, "ratio")
    if gap_s.get("chunked_monolith") and "pd" in gap_s:
        ratio = gap_s["pd"] / gap_s["chunked_monolith"]
        report.add(f"{mix}: row_gap_p99_pd_over_chunked_monolith", ratio, "ratio")


async def run(options: argparse.Namespace) -> Report:
    """Measure all systems; the report has the table."""
    limits = Limits(
        options.ttfa_ms / 1e3, options.most, options.rounds, options.processes, options.first
    )
    lengths = dict(zip(("prompt_least", "prompt_most"), options.prompt_rows, strict=True))
    lengths |= dict(zip(("output_least", "output_most"), options.output_rows, strict=True))
    every = [mix for mix in mixes(lengths) if options.mix in mix.name][: options.mixes]
    systems = [UNIT, MONOLITH, *(chunked(rows) for rows in options.chunks)]
    found = await find_all(systems, every, limits, options)
    where = f"GPUs {options.gpu}" if options.gpu else "CPU"
    workload = (
        f"{options.model} on {where}, prompts of {options.prompt_rows[0]} to "
        f"{options.prompt_rows[1]} rows, {options.output_rows[0]} to {options.output_rows[1]} rows "
        f"of output, TTFA p95 within {options.ttfa_ms:g} ms"
    )
    report = Report("capacity", workload)
    for mix in every:
        report_mix(report, mix.name, found)
    options.out.mkdir(parents=True, exist_ok=True)
    curves = {
        mix.name: {
            system.name: [(p.streams / system.cards, _stalled(p)) for p in found[system][mix.name]]
            for system in systems
        }
        for mix in every
    }
    plot_stalls(curves, options.out / "capacity.svg")
    return report


def _stalled(point: Point) -> float:
    """Share of streams that stalled or were too slow."""
    wrong = max(point.summary["stalled_streams"], point.summary["streams_below_floor"])
    return float(wrong / max(1, point.summary["requests"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--small", action="store_true", help="a run of a minute on a CPU")
    parser.add_argument("--gpu", default="", help="prefill's and decode's GPU, such as 0,1")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="DUPLET_NAME=VALUE")
    parser.add_argument("--most", type=int, default=128, help="streams that are tried at most")
    parser.add_argument("--first", type=int, default=1, help="streams that are tried first")
    parser.add_argument("--rounds", type=int, default=4, help="requests for each stream")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--ttfa-ms", type=float, default=500.0)
    parser.add_argument("--prompt-rows", type=int, nargs=2, default=(1_000, 2_000))
    parser.add_argument("--output-rows", type=int, nargs=2, default=(126, 420))
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512, 1_024])
    parser.add_argument("--mixes", type=int, default=3, help="how many of the mixes")
    parser.add_argument("--mix", default="", help="only mixes with this in their name")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    if options.small:
        options.most, options.rounds, options.processes = 1, 1, 1
        options.prompt_rows, options.output_rows = (40, 80), (10, 20)
        options.chunks, options.mixes, options.ttfa_ms = [32], 1, 60_000.0
    report = asyncio.run(run(options))
    report.save(options.out)
    print(report.table())


if __name__ == "__main__":
    main()
