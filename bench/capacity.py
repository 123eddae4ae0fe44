"""How many streams do two cards carry, as a unit and as two monoliths?

For each mix of requests and each system (`bench.systems`): the most streams at which nothing
stalls, every stream has 42 rows/s or more, every request ends well and TTFA p95 stays within its
limit. `bench.pair` runs it; `bench.levels` says how one system is loaded.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.levels import TIMEOUT_S, Broken, Limits, run_bounded, run_levels
from bench.points import Point, Store, best, next_levels
from bench.results import Report
from bench.systems import MONOLITH, UNIT, Mix, System, running
from duplet_client import GenerateError
from duplet_core.errors import DupletError
from duplet_load.generator import Load
from duplet_load.summary import FLOOR, quantile
from duplet_load.synth import Synth, make_trace

MOST_LEVELS = 12
"""In one run."""
STEP_SHARE = 0.1
"""Of the streams that are foretold: from level to level."""
FIRST_SHARE = {2: 0.6, 1: 0.5}
FIRST_SHARE_BURSTS = {2: 0.5, 1: 0.3}
"""Of the streams that are foretold: where a search begins, by cards, since a monolith's prompts
wait for each other and for steps. A level more costs a window, a first one that is not carried
costs the search all its levels again."""
FOUND_WITHIN = 0.2
"""Of what is not carried: two steps, for those of a search from below are smaller."""
BURST_WINDOWS = 4 / 3
"""So much longer are levels of bursts, of which each has few."""
WARMING = 12
"""Listeners before anything is measured, who ask twice."""
FAILURES = (RuntimeError, DupletError, GenerateError, OSError)
"""Of one system; what can be measured without it goes on."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What work takes on a card, ms; to foretell where a search begins, never a result."""

    step: float
    stream: float
    """Of a step: for each stream."""
    cold: float
    """A prompt of a new voice."""
    cached: float
    """A prompt whose voice is known."""


def read_costs(measured: Path) -> Costs:
    """Of the model and card of docs/measurements/decode_step.jsonl, by its newest figures."""
    lines = [json.loads(line) for line in measured.read_text("utf-8").splitlines()]
    values = {line["case"]: line["value"] for line in lines}
    one_ms, many_ms = values["decode_step_1x2k_ms"], values["decode_step_128x2k_ms"]
    stream_ms = (many_ms - one_ms) / 127
    cold_ms = values["prefill_1500_ms"]
    cached_ms = cold_ms * values["prefix_hit_over_cold_ratio"]
    return Costs(one_ms - stream_ms, stream_ms, cold_ms, cached_ms)


def foretell(system: System, synth: Synth, costs: Costs) -> int:
    """At how many streams a row takes as long as the floor allows; at least 1.

    The unit's prefill may not work more than four fifths of the time; a monolith's steps wait
    for the prompts of all its streams.
    """
    row_ms = 1e3 / FLOOR
    prompt_ms = synth.cold * costs.cold + (1 - synth.cold) * costs.cached
    mean_rows = (synth.output_least + synth.output_most) / 2
    if system.cards == 1:
        return max(1, int((row_ms - costs.step) / (costs.stream + prompt_ms / mean_rows)))
    by_steps = (row_ms - costs.step) / costs.stream
    by_prompts = 0.8 * mean_rows * row_ms / prompt_ms
    return max(1, int(min(by_steps, by_prompts)))


@dataclass(frozen=True, slots=True)
class Search:
    """How capacity is searched for. Borrows the store."""

    store: Store
    limits: Limits
    most_streams: int
    costs: Costs | None
    """None: levels begin at `first` and rise by `step`."""
    first: int
    step: int
    ends_s: float
    """On the monotonic clock: nothing is sent later."""
    longest_s: float = math.inf
    """Of one system in one mix: it sends nothing later than so long after it began."""

    def levels(self, system: System, mix: Mix) -> list[int]:
        """What is to be measured next; empty when the search is over."""
        first, step = self.first, self.step
        if self.costs is not None:
            most = min(foretell(system, mix.synth, self.costs), self.most_streams)
            bursts = mix.synth.burstiness > 0
            share = (FIRST_SHARE_BURSTS if bursts else FIRST_SHARE)[system.cards]
            first, step = max(1, round(share * most)), max(1, round(STEP_SHARE * most))
        points = self.store.points(system.name, mix.name)
        return next_levels(points, first, step, self.most_streams)[:MOST_LEVELS]

    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    @property
    def least_s(self) -> float:
        """A run shorter than this tells nothing."""
        return self.limits.ramp_s + 2 * self.limits.window_s

    async def find(self, system: System, mix: Mix, address: str) -> None:
        """Measure until what is carried is known, or time is up."""
        name = f"{system.name}, {mix.name}"

        def keep(point: Point) -> None:
            known = self.store.points(system.name, mix.name)
            self.store.add(system.name, mix.name, point)
            if point.describe() not in [p.describe() for p in known]:
                print(f"{name}: {point.describe()}", flush=True)

        ends_s = min(self.ends_s, time.monotonic() + self.longest_s)
        while levels := self.levels(system, mix):
            left_s = ends_s - time.monotonic()
            if left_s < self.least_s:
                print(f"{name}: no time is left for {levels[0]} streams", flush=True)
                return
            known = self.store.points(system.name, mix.name)
            longer = BURST_WINDOWS if mix.synth.burstiness else 1.0
            limits = replace(self.limits, window_s=longer * self.limits.window_s)
            # What is new to this run is new to the system, whose cache outlives the run.
            synth = replace(mix.synth, label=f"{mix.name}/{levels[0]}/")
            outcome = await run_levels(
                *(address, synth, levels, limits, keep),
                most_s=left_s,
                worker=system.worker,
            )
            late_ms = 1e3 * (quantile(outcome.lateness_s, 0.99) or 0.0)
            told = f"{outcome.kv_checks} KV checks, 0 mismatches; clients late by {late_ms:.0f} ms"
            print(f"{name}: {told} (p99)", flush=True)
            if self.store.points(system.name, mix.name) == known:
                print(f"{name}: no level came to its end", flush=True)
                return

    async def warm_up(self, system: System, mix: Mix, address: str) -> None:
        """Requests that nobody judges: what a system builds at first use, it builds for them.

        Raises:
            Broken: one of them failed.
        """
        listeners = min(WARMING, self.most_streams)
        synth = replace(mix.synth, requests=2 * listeners, label="warm-up/")
        load = Load(address, 1, listeners, worker=system.worker)
        # A listener's second request begins when the first had its time.
        outcome = await run_bounded(load, make_trace(synth), sends_s=TIMEOUT_S)
        if ends := {record.outcome for record in outcome.records if not record.well}:
            raise Broken(f"the first requests ended so: {', '.join(sorted(ends))}")

    def is_over(self, system: System, mix: Mix) -> bool:
        return not self.levels(system, mix)


# --- monoliths, side by side -------------------------------------------------------------


Job = tuple[System, Sequence[Mix]]
"""A system, and the mixes in which it is searched."""
Then = Callable[[], Iterable[Job]]


class Queue:
    """Jobs that are taken in order; when `before` have ended, those that follow from them."""

    def __init__(
        self, search: Search, jobs: Iterable[Job], before: Sequence[System], then: Then
    ) -> None:
        self._search = search
        self._then = then
        self.waiting = [job for job in map(self._open, jobs) if job[1]]
        named = {system.name for system in before}
        self._missing = {s.name for s, _ in self.waiting} & named
        self._is_known = asyncio.Event()
        self._see()

    async def take(self) -> Job | None:
        """The next one; waits where it follows from what still runs. None: there is no more."""
        if not self.waiting:
            await self._is_known.wait()
        return self.waiting.pop(0) if self.waiting else None

    def take_for(self, system: System) -> Sequence[Mix]:
        """The mixes of the next job for a system that runs already; none: there is no such job."""
        for job in self.waiting:
            if job[0] == system:
                self.waiting.remove(job)
                return job[1]
        return ()

    def end(self, system: System) -> None:
        """Its search has ended, one way or another."""
        self._missing.discard(system.name)
        self._see()

    def _see(self) -> None:
        if not self._missing and not self._is_known.is_set():
            self.waiting += [job for job in map(self._open, self._then()) if job[1]]
            self._is_known.set()

    def _open(self, job: Job) -> Job:
        system, of = job
        return system, [mix for mix in of if not self._search.is_over(system, mix)]


async def find_on(
    search: Search,
    jobs: Iterable[Job],
    gpus: Sequence[str],
    environment: Mapping[str, str],
    longest_prompt: int,
    on_found: Callable[[System, Mix], None],
    before: Sequence[System] = (),
    then: Then = list,
) -> int:
    """Search these systems in these mixes, each on the next GPU that is free; without GPUs, or
    where systems take more than one, one after the other. When those of `before` have ended,
    `then` says what follows from them.

    A system whose searches are over is not started, and one that runs goes on with what follows
    for it; one that fails leaves its GPU to the next and gets its other mixes later. `on_found`
    hears of each search that ended. How often systems failed.
    """
    failed = 0
    queue = Queue(search, jobs, before, then)
    each = all(system.cards == 1 for system, _ in queue.waiting)
    shares = [[gpu] for gpu in gpus] if each and gpus else [gpus]

    async def search_on(own: Sequence[str], system: System, left: list[Mix]) -> None:
        async with running(system, environment, own, longest_prompt) as address:
            await search.warm_up(system, left[0], address)
            while left:
                mix = left.pop(0)
                await search.find(system, mix, address)
                on_found(system, mix)
                if not left:
                    queue.end(system)
                    left += queue.take_for(system)

    async def work(own: Sequence[str]) -> None:
        nonlocal failed
        while job := await queue.take():
            if search.left_s() < search.least_s:
                queue.waiting.append(job)
                return
            system, of = job
            left = list(of)
            try:
                await search_on(own, system, left)
            except* FAILURES as errors:
                tell_failure(system.name, errors)
                failed += 1
                # One that does not even start would not do so later.
                if 0 < len(left) < len(of):
                    queue.waiting.append((system, left))
            queue.end(system)

    async with asyncio.TaskGroup() as group:
        for own in shares:
            group.create_task(work(own))
    for system, of in queue.waiting:
        print(f"{system.name}: no time was left for {', '.join(m.name for m in of)}", flush=True)
    return failed


def tell_failure(name: str, errors: BaseExceptionGroup[BaseException]) -> None:
    """Say what went wrong."""
    for error in errors.exceptions:
        print(f"{name} FAILED: {error!r}", flush=True)


def pick_chunk(store: Store, systems: Sequence[System], mix: Mix) -> System:
    """The chunk size that carries most; of equal ones, that with the earlier audio."""

    def worth(system: System) -> tuple[int, float]:
        point = best(store.points(system.name, mix.name))
        return (0, 0.0) if point is None else (point.streams, -(point.ttfa_p95_s or 0.0))

    return max(systems, key=worth)


# --- results -----------------------------------------------------------------------------


def _has_ended(points: Sequence[Point]) -> bool:
    """Whether a search met what is not carried, and close to what is: one that began too high and
    was cut on its way from below knows a bound only."""
    point = best(points)
    failed = next((point.streams for point in points if not point.carried), None)
    if failed is None or point is None:
        return failed is not None
    return failed - point.streams <= max(1, FOUND_WITHIN * failed)


def report_system(report: Report, store: Store, system: System, mix: Mix) -> None:
    """The lines of one system in one mix."""
    points = store.points(system.name, mix.name)
    if not points:
        return
    name = f"{mix.name}: {system.name}"
    point = best(points)
    streams = 0 if point is None else point.streams
    at_least = "" if _has_ended(points) else " at least"
    report.add(f"{name}: streams carried{at_least}", streams, "streams")
    report.add(f"{name}: streams a card{at_least}", streams / system.cards, "streams")
    if point is None:
        return
    report.add(f"{name}: TTFA p95", 1e3 * (point.ttfa_p95_s or 0.0), "ms")
    report.add(f"{name}: row gap p99", 1e3 * (point.gap_p99_s or 0.0), "ms")
    report.add(f"{name}: slowest 1 % of streams", point.rate_p1 or 0.0, "rows/s")


def report_ratios(report: Report, store: Store, tuned: System, mix: Mix) -> None:
    """Unit over monoliths, for each that was measured. Where one of two searches was cut, their
    ratio is a bound."""
    unit_points = store.points(UNIT.name, mix.name)
    unit = best(unit_points)
    for name, system in (("monolith", MONOLITH), ("chunked_monolith", tuned)):
        points = store.points(system.name, mix.name)
        other = best(points)
        if unit is None or other is None:
            continue
        bound = {
            (True, True): "",
            (False, True): " at least",
            (True, False): " at most",
            (False, False): " or so",
        }[_has_ended(unit_points), _has_ended(points)]
        ratio = (unit.streams / UNIT.cards) / (other.streams / system.cards)
        report.add(f"{mix.name}: capacity_per_card_pd_over_{name}{bound}", ratio, "ratio")
        if unit.gap_p99_s and other.gap_p99_s:
            ratio = unit.gap_p99_s / other.gap_p99_s
            report.add(f"{mix.name}: row_gap_p99_pd_over_{name}", ratio, "ratio")
