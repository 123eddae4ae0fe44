"""Is anything slower than it was? `python -m bench.regression`, which is `make bench`.

Small forms of the benchmarks on the CPU. Each figure is a ratio within this run: of two ways to
do a thing, or of CPU time to *beats*, the CPU time of a fixed loop of pure Python that runs right
before and after. They are compared with the newest figures of this machine in
docs/measurements/bench.jsonl, else with the newest of any; what seems slower is measured again,
and the better figure counts. Exit code 1: something is slower than its tolerance allows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import (
    admission,
    generator,
    instrumentation,
    overload,
    stream,
    voice_runtime,
    voice_streams,
)
from bench.kv_move_cpu import move_over_contiguous
from bench.results import MEASUREMENTS, Report, Result, describe_machine, read_results
from duplet_client import AsyncClient
from duplet_load.synth import make_trace
from duplet_sim.explore import Job, search
from duplet_sim.simulate import simulate

NAME = "bench"
BEAT_LOOPS = 60_000
BEAT_TRIES = 5
ROWS = 1000
"""Costs are told for so many rows, or whatever else is counted."""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Watch:
    """One figure."""

    case: str
    tolerance: float
    """By so much of the earlier figure it may be worse, or better, and still be the same. More
    than the spread of runs on a machine whose cores others wanted too."""
    higher_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Figures that are measured together."""

    name: str
    measure: Callable[[], Awaitable[Figures]]
    watches: Sequence[Watch]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a figure came to."""

    watch: Watch
    value: float
    before: float | None

    @property
    def worse_by(self) -> float:
        """Share of the earlier figure; negative: better. 0 without one."""
        if self.before is None:
            return 0.0
        lower, higher = self.before, self.value
        if self.watch.higher_is_better:
            lower, higher = higher, lower
        return higher / lower - 1 if lower else (float("inf") if higher else 0.0)

    @property
    def word(self) -> str:
        """`new`, `ok`, `slower` or `faster`."""
        if self.before is None:
            return "new"
        if self.worse_by > self.watch.tolerance:
            return "slower"
        better_by = 1 / (1 + self.worse_by) - 1 if self.worse_by > -1 else float("inf")
        return "faster" if better_by > self.watch.tolerance else "ok"

    def or_better(self, value: float) -> Verdict:
        """With the better one of both values."""
        best = max if self.watch.higher_is_better else min
        return replace(self, value=best(self.value, value))


# --- beats ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Stone:
    weight: int


def beat_s() -> float:
    """CPU seconds of the fixed loop, the quickest of BEAT_TRIES."""
    return min(_beat_once_s() for _ in range(BEAT_TRIES))


def _beat_once_s() -> float:
    """Attributes, a dict, integers, calls."""
    stones = [_Stone(number) for number in range(64)]
    counts: dict[int, int] = {}
    began_s = time.process_time()
    for number in range(BEAT_LOOPS):
        stone = stones[number & 63]
        stone.weight += number
        counts[stone.weight & 255] = counts.get(stone.weight & 255, 0) + _weigh(stone)
    return time.process_time() - began_s


def _weigh(stone: _Stone) -> int:
    return stone.weight >> 3


async def in_beats(cost_s: Callable[[], Awaitable[float]]) -> float:
    """CPU seconds of ROWS as beats."""
    before_s = beat_s()
    found_s = await cost_s()
    return ROWS * found_s / ((before_s + beat_s()) / 2)


# --- what is measured -----------------------------------------------------------------


async def measure_admission() -> Figures:
    report = Report("admission")
    await admission.measure_forms(report, admission.Size(rounds=3, requests=32, probes=0))
    case = "admission_packed_over_{} in lb, 1 at once, p50"
    values = {result.case: result.value for result in report.results}
    return {c: values[c] for c in (case.format(f"{form}_ratio") for form in ("json", "msgspec"))}


async def measure_lb() -> Figures:
    one = stream.Case("uvloop", 64, 1, 20_000)
    eight = stream.Case("uvloop", 64, 8, 60_000)
    return {
        LB_ONE: await in_beats(lambda: instrumentation.lb_row_cost_s(one)),
        LB_EIGHT: await in_beats(lambda: instrumentation.lb_row_cost_s(eight)),
    }


async def measure_instrumentation() -> Figures:
    metered = replace(instrumentation.FULLEST, rows=60_000)
    found = await instrumentation.lb_ratios(3, metered, replace(metered, metered=False))
    return {INSTRUMENTATION: sorted(found)[len(found) // 2]}


async def measure_generator() -> Figures:
    async def row_cost_s() -> float:
        reading = await generator.run_case(generator.Case(64, 60, 360, 1))
        return reading.generator_cpu_s / reading.rows

    return {GENERATOR: await in_beats(row_cost_s)}


async def measure_unit() -> Figures:
    arrivals = make_trace(replace(instrumentation.LOAD, requests=48))
    async with instrumentation.running_unit(metered=True) as unit:
        await unit.row_cost_s(arrivals[:4])  # the first requests of a process are slower
        return {UNIT: await in_beats(lambda: unit.row_cost_s(arrivals))}


async def measure_speech() -> Figures:
    async with (
        instrumentation.running_unit(metered=True, model="wren") as unit,
        AsyncClient(unit.address) as client,
    ):
        spec = (await client.unit()).spec
        assert spec is not None

        async def row_cost_s() -> float:
            before_s = unit.cpu_s()
            heard = await voice_streams.listen_together(client, spec, 8, 2)
            rows = sum(one.audio_s for one in heard) * spec.rows_per_second
            return (unit.cpu_s() - before_s) / rows

        await voice_streams.listen_together(client, spec, 1, 3)
        return {SPEECH: await in_beats(row_cost_s)}


async def measure_overload() -> Figures:
    words = "--burst 60 --seconds 1.5 --most 4 --processes 1 --prompt-rows 60 120"
    given = [*words.split(), "--output-rows", "40", "80"]
    report = await overload.run(overload.make_parser().parse_args(given))
    values = {result.case: result.value for result in report.results}
    phases = ("burst of 60", "3 x capacity")
    admitted = sum(values[f"{name}: admitted"] for name in phases)
    for_nobody = sum(values[f"{name}: prompts computed for nobody"] for name in phases)
    computed = admitted + for_nobody
    return {WASTE: admitted / computed if computed else 1.0}


async def measure_kv_move() -> Figures:
    return {KV_MOVE: move_over_contiguous(150)}


async def measure_voice() -> Figures:
    async def row_cost_s() -> float:
        return voice_runtime.time_vocoder(600) / 600

    async def piece_cost_s() -> float:
        return voice_runtime.time_text(60)[1]

    return {VOCODER: await in_beats(row_cost_s), TEXT: await in_beats(piece_cost_s)}


async def measure_safety() -> Figures:
    """Rates of the simulator and of the explorer, whose core is the product's."""

    async def schedule_cost_s() -> float:
        found = simulate(next(seeds), 150)
        return found.cpu_s / found.seeds

    async def state_cost_s() -> float:
        found = search(Job("one", "", 12_000))
        return found.seconds / found.states

    seeds = iter((0, 150, 300))
    schedules = [await in_beats(schedule_cost_s) for _ in range(3)]
    thresholds = gc.get_threshold()
    states = await in_beats(state_cost_s)
    gc.set_threshold(*thresholds)
    return {SCHEDULE: sorted(schedules)[1], STATE: states}


LB_ONE = f"lb, 1 row a message: beats for {ROWS} rows"
LB_EIGHT = f"lb, 8 rows a message: beats for {ROWS} rows"
INSTRUMENTATION = "lb alone: throughput with instrumentation over without"
GENERATOR = f"load generator: beats for {ROWS} rows"
UNIT = f"unit, tiny: beats for {ROWS} rows"
SPEECH = f"unit, wren, 8 listeners: beats for {ROWS} rows"
WASTE = "overload: admitted of the prompts that were computed"
KV_MOVE = "kv move on the CPU over a contiguous copy"
VOCODER = f"vocoder: beats for {ROWS} rows"
TEXT = f"front end: beats for {ROWS} pieces of text"
SCHEDULE = f"simulator: beats for {ROWS} schedules"
STATE = f"explorer: beats for {ROWS} states"

GROUPS = (
    Group(
        "admission",
        measure_admission,
        [
            Watch("admission_packed_over_json_ratio in lb, 1 at once, p50", 0.25),
            Watch("admission_packed_over_msgspec_ratio in lb, 1 at once, p50", 0.25),
        ],
    ),
    Group("lb", measure_lb, [Watch(LB_ONE, 0.25), Watch(LB_EIGHT, 0.5)]),
    Group("instrumentation", measure_instrumentation, [Watch(INSTRUMENTATION, 0.15, True)]),
    Group("generator", measure_generator, [Watch(GENERATOR, 0.4)]),
    Group("unit", measure_unit, [Watch(UNIT, 0.4)]),
    Group("speech", measure_speech, [Watch(SPEECH, 0.3)]),
    Group("overload", measure_overload, [Watch(WASTE, 0.05, True)]),
    Group("kv move", measure_kv_move, [Watch(KV_MOVE, 0.5)]),
    Group("voice", measure_voice, [Watch(VOCODER, 0.25), Watch(TEXT, 0.25)]),
    Group("safety", measure_safety, [Watch(SCHEDULE, 0.25), Watch(STATE, 0.25)]),
)


# --- comparison -----------------------------------------------------------------------


def earlier_figures(results: Sequence[Result], machine: str) -> tuple[str, Figures]:
    """The newest figure of each case, of this machine if it has any, else of the machine that
    was measured last; and which machine that is. Nothing where nobody measured."""
    if not results:
        return "", {}
    known = {result.machine for result in results}
    chosen = machine if machine in known else results[-1].machine
    return chosen, {r.case: r.value for r in results if r.machine == chosen}


def judge(
    group: Group, figures: Mapping[str, float], earlier: Mapping[str, float]
) -> list[Verdict]:
    """A verdict for each watch of the group.

    Raises:
        KeyError: the group did not measure what it promises.
    """
    return [Verdict(w, figures[w.case], earlier.get(w.case)) for w in group.watches]


def measure_group(group: Group, earlier: Mapping[str, float], *, doubts: bool) -> list[Verdict]:
    """Measure it; with `doubts` once more where something seems slower."""
    verdicts = judge(group, asyncio.run(_measure(group)), earlier)
    if doubts and any(verdict.word == "slower" for verdict in verdicts):
        again = asyncio.run(_measure(group))
        verdicts = [verdict.or_better(again[verdict.watch.case]) for verdict in verdicts]
    return verdicts


async def _measure(group: Group) -> Figures:
    return await group.measure()


def render(verdicts: Sequence[Verdict]) -> str:
    """One table."""
    width = max(len(verdict.watch.case) for verdict in verdicts)
    lines = [f"{'':{width}}  {'now':>9} {'before':>9} {'worse by':>9} {'allowed':>8}"]
    for verdict in verdicts:
        before, worse_by = "-", "-"
        if verdict.before is not None:
            before, worse_by = f"{verdict.before:.4g}", f"{verdict.worse_by:+.1%}"
        lines.append(
            f"{verdict.watch.case:{width}}  {verdict.value:9.4g} {before:>9} {worse_by:>9} "
            f"{verdict.watch.tolerance:8.0%}  {verdict.word}"
        )
    return "\n".join(lines)


def run(groups: Sequence[Group], folder: Path, *, update: bool) -> int:
    """Measure, compare, print; with `update` the figures become the next run's earlier ones."""
    path = folder / f"{NAME}.jsonl"
    report = Report(NAME, module="regression")
    machine, earlier = earlier_figures(
        read_results(path) if path.exists() else [], describe_machine()
    )
    verdicts: list[Verdict] = []
    for group in groups:
        began_s = time.monotonic()
        verdicts += measure_group(group, earlier, doubts=not update)
        print(f"{group.name}: {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"before: {machine or 'nothing is known'}")
    print(render(verdicts))
    if update:
        for verdict in verdicts:
            report.add(verdict.watch.case, verdict.value, "ratio")
        report.save(folder)
        return 0
    slower = [verdict.watch.case for verdict in verdicts if verdict.word == "slower"]
    for case in slower:
        print(f"slower: {case}")
    return 1 if slower else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [group.name for group in GROUPS]
    parser.add_argument("--group", choices=names, action="append", help="default: all")
    parser.add_argument("--update", action="store_true", help="write the figures down")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="folder of the figures")
    options = parser.parse_args()
    groups = [g for g in GROUPS if g.name in (options.group or names)]
    return run(groups, options.out, update=options.update)


if __name__ == "__main__":
    sys.exit(main())
