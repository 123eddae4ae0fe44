"""Load that rises in levels: one system at one number of streams after the other, in one run.

Streams begin spread over a ramp. Then each level lasts a window, over whose first third the
streams that it has more come in. Requests that are sent in the rest of the window are the
level's and are judged by what their listeners got, whenever they end. The run ends at the first
level at which something goes wrong.

Without burstiness the streams are listeners who ask again as soon as they were answered. With
it, requests arrive by themselves, as many as keep so many streams busy at exactly the floor
(Little's law), and in the same pattern at every level.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.points import Point
from duplet_core.playback import AUDIO_ROWS
from duplet_load.generator import WORKER, Load, Outcome, run_load
from duplet_load.record import Gaps, Record
from duplet_load.summary import FLOOR, quantile, summarize
from duplet_load.synth import Synth, make_trace
from duplet_load.trace import Arrival

SETTLING = 1 / 3
"""Of a window."""
FASTEST_ROWS_PER_S = 400.0
"""No stream is faster; a closed loop needs so many requests at most."""
HOPELESS = 20
"""Requests refused at one level: no more are sent. So many that had no end in their time: the
system hangs."""
REFUSED = ("OVERLOADED", "DEADLINE")
"""What is a lack of room and no fault."""
TIMEOUT_S = 40.0
"""Of a request; four times what the longest takes at the floor."""
CLOSING_S = 20.0
"""For client processes to start and to end; far beyond what they take."""


class Broken(RuntimeError):
    """Requests failed that were not refused, or nobody was served: this is no measurement."""


async def run_bounded(
    load: Load,
    arrivals: Sequence[Arrival],
    on_record: Callable[[Record], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    *,
    sends_s: float,
) -> Outcome:
    """`run_load`, given up where it hangs. `sends_s`: nothing is sent later; inf: no bound.

    Raises:
        TimeoutError: it was not over when every request had had its time.
        Broken: requests were sent and none was served; fewer would wait as long for who hangs.
    """
    async with asyncio.timeout(None if sends_s == math.inf else sends_s + TIMEOUT_S + CLOSING_S):
        outcome = await run_load(replace(load, timeout_s=TIMEOUT_S), arrivals, on_record, stop)
    if outcome.records and not any(record.well for record in outcome.records):
        ends = ", ".join(sorted({record.outcome for record in outcome.records}))
        raise Broken(f"none of {len(outcome.records)} requests was served; they ended so: {ends}")
    return outcome


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as carried, and how long is looked."""

    ttfa_p95_s: float
    ramp_s: float
    window_s: float
    processes: int
    """Of clients."""


@dataclass(frozen=True, slots=True)
class Levels:
    """When how many streams are offered; seconds from the beginning of the load."""

    streams: tuple[int, ...]
    """Ascending."""
    ramp_s: float
    window_s: float

    def begins_s(self, level: int) -> float:
        """When the level's window begins, which is where the one before ends."""
        return self.ramp_s + level * self.window_s

    @property
    def ends_s(self) -> float:
        return self.begins_s(len(self.streams))

    def level_of(self, at_s: float) -> int | None:
        """To which level a request belongs that is sent then; None: to none."""
        level, into = divmod((at_s - self.ramp_s) / self.window_s, 1.0)
        is_one = 0 <= level < len(self.streams) and into >= SETTLING
        return int(level) if is_one else None

    def marks_s(self) -> tuple[float, ...]:
        """Borders of what belongs to the levels; the stretch behind mark 2 n is level n's."""
        settling_s = SETTLING * self.window_s
        begins = [self.begins_s(level) for level in range(len(self.streams))]
        inner = [mark for at_s in begins for mark in (at_s + settling_s, at_s + self.window_s)]
        return tuple(inner)

    def starts_s(self) -> tuple[float, ...]:
        """When each listener of a closed loop begins."""
        starts = [self.ramp_s * n / self.streams[0] for n in range(self.streams[0])]
        for level, (before, now) in enumerate(
            zip(self.streams, self.streams[1:], strict=False), start=1
        ):
            more = now - before
            every_s = SETTLING * self.window_s / more
            starts += [self.begins_s(level) + n * every_s for n in range(more)]
        return tuple(starts)


def closed_trace(levels: Levels, synth: Synth) -> list[Arrival]:
    """More requests than the levels' listeners can ask, one after the other."""
    mean_rows = (synth.output_least + synth.output_most) / 2
    stream_s = sum(levels.streams) * levels.window_s + levels.streams[0] * levels.ramp_s
    requests = math.ceil(stream_s * FASTEST_ROWS_PER_S / mean_rows) + levels.streams[-1]
    return make_trace(replace(synth, requests=requests))


def open_trace(levels: Levels, synth: Synth) -> list[Arrival]:
    """Bursts at each level's rate; the first level's from time 0 on."""
    mean_rows = (synth.output_least + synth.output_most) / 2
    stretches = [(0.0, levels.ramp_s, levels.streams[0])]
    stretches += [(levels.begins_s(n), levels.window_s, s) for n, s in enumerate(levels.streams)]
    # One number for all, since a voice's popularity and a pattern of bursts follow from it.
    longest_s = max(levels.ramp_s, levels.window_s)
    requests = 4 * math.ceil(longest_s * levels.streams[-1] * FLOOR / mean_rows) + 64
    found: list[Arrival] = []
    for number, (begin_s, lasts_s, streams) in enumerate(stretches):
        rate = streams * FLOOR / mean_rows
        label = f"{synth.label}{number}/"
        drawn = make_trace(replace(synth, requests=requests, rate=rate, label=label))
        found += [replace(a, at_s=begin_s + a.at_s) for a in drawn if a.at_s < lasts_s]
    return found


def rate_of(record: Record) -> float | None:
    """Rows/s of a stream that is judged by them: not of one that stopped before it was audio,
    whose rows are too few for a rate."""
    unheard = record.outcome == "STOP" and record.rows < AUDIO_ROWS
    return record.rows_per_second if record.well and not unheard else None


def judge(streams: int, records: Sequence[Record], gaps: Gaps, limits: Limits) -> Point:
    """What one level's requests came to."""
    summary = summarize(Outcome(records=list(records), gaps=gaps))
    refused = sum(not record.well for record in records)
    ttfa_s = summary["ttfa_s"]
    rates = [rate for rate in map(rate_of, records) if rate is not None]
    slow = sum(rate < FLOOR for rate in rates)
    carried = (
        bool(records)
        and refused == 0
        and summary["stalls"] == 0
        and slow == 0
        and (ttfa_s["p95"] is None or ttfa_s["p95"] <= limits.ttfa_p95_s)
    )
    return Point(
        *(streams, carried, len(records), refused),
        *(summary["stalled_streams"], slow),
        *(ttfa_s["p50"], ttfa_s["p95"], ttfa_s["p99"], summary["gap_s"]["p99"]),
        *(quantile(rates, 0.01), quantile(rates, 0.5), summary["generator_lag_s"]["p99"]),
    )


@dataclass(slots=True)
class Watcher:
    """Sorts requests by level as they end, and says when enough is known. `run_levels`' own."""

    levels: Levels
    limits: Limits
    on_point: Callable[[Point], None]
    stop: asyncio.Event
    records: list[list[Record]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    """Of each level's requests: those refused; those that failed, stalled or were slow."""
    faults: set[str] = field(default_factory=set)
    """How requests ended that were not refused and did not end well."""
    closed: int = 0
    """So many levels have surely ended and were told."""
    stopped_s: float = math.inf
    """After the load's beginning: nothing was sent later."""

    def __post_init__(self) -> None:
        self.records = [[] for _ in self.levels.streams]
        self.refused = [0 for _ in self.levels.streams]
        self.wrong = [0 for _ in self.levels.streams]

    def __call__(self, record: Record) -> None:
        now_s = record.at_s + record.lag_s + record.took_s
        if not record.well and record.outcome not in REFUSED:
            self.faults.add(record.outcome)
            self.end(now_s)
            return
        level = self.levels.level_of(record.at_s)
        if level is not None:
            self.records[level].append(record)
            self.refused[level] += not record.well
            rate = rate_of(record)
            slow = rate is not None and rate < FLOOR
            self.wrong[level] += not record.well or record.stalls > 0 or slow
        # A request of the level after the next has ended, so this one's have.
        while (
            self.closed + 2 < len(self.levels.streams)
            and record.at_s >= self.levels.begins_s(self.closed + 2)
            and not self.stop.is_set()
        ):
            point = self.point(self.closed, Gaps())
            self.closed += 1
            self.on_point(point)
            if not point.carried:
                self.end(now_s)
        if any(
            (self.wrong[n] and now_s >= self.levels.begins_s(n + 1)) or self.refused[n] >= HOPELESS
            for n in range(len(self.records))
        ):
            self.end(now_s)

    def end(self, now_s: float) -> None:
        """Nothing more is to be sent."""
        if not self.stop.is_set():
            self.stopped_s = now_s
            self.stop.set()

    def is_whole(self, level: int) -> bool:
        """Whether all of the level's requests were sent, or enough of them to condemn it."""
        return self.stopped_s >= self.levels.begins_s(level + 1) or self.wrong[level] > 0

    def point(self, level: int, gaps: Gaps) -> Point:
        return judge(self.levels.streams[level], self.records[level], gaps, self.limits)


async def run_levels(
    address: str,
    synth: Synth,
    streams: Sequence[int],
    limits: Limits,
    on_point: Callable[[Point], None],
    *,
    most_s: float = math.inf,
    worker: str = WORKER,
) -> Outcome:
    """Load the system with so many streams after each other, until something goes wrong.

    Each level that ended is told as soon as that is sure, without its gaps; when all is over
    every level is told once more. `most_s`: nothing is sent later than so long after the call.

    Raises:
        Broken: a KV check failed, requests failed that were not refused, all were refused, or
        the system hangs.
        TimeoutError: the load did not end.
        RuntimeError: the trace was too short, a fault of this module.
    """
    levels = Levels(tuple(streams), limits.ramp_s, limits.window_s)
    bursts = synth.burstiness > 0
    trace = open_trace(levels, synth) if bursts else closed_trace(levels, synth)
    stop = asyncio.Event()
    watcher = Watcher(levels, limits, on_point, stop)
    load = Load(
        address,
        limits.processes,
        seconds=levels.ends_s,
        starts_s=() if bursts else levels.starts_s(),
        marks_s=levels.marks_s(),
        worker=worker,
    )
    cutting = asyncio.create_task(_cut(watcher, most_s))
    try:
        sends_s = min(levels.ends_s, most_s)
        outcome = await run_bounded(load, trace, watcher, stop, sends_s=sends_s)
    finally:
        cutting.cancel()
    if sum(record.outcome == "DEADLINE" for record in outcome.records) >= HOPELESS:
        watcher.faults.add("DEADLINE")
    if watcher.faults or outcome.kv_mismatches:
        ends = ", ".join(sorted(watcher.faults))
        raise Broken(f"{outcome.kv_mismatches} KV checks failed; requests ended so: {ends}")
    for level in range(len(levels.streams)):
        if watcher.records[level] and watcher.is_whole(level):
            on_point(watcher.point(level, outcome.gaps_between[2 * level + 1]))
    if not bursts and len(outcome.records) == len(trace):
        raise RuntimeError(f"{len(trace)} requests were too few for {streams} streams")
    return outcome


async def _cut(watcher: Watcher, after_s: float) -> None:
    if after_s < math.inf:
        await asyncio.sleep(after_s)
        ended_s = [r.at_s + r.took_s for records in watcher.records for r in records]
        watcher.end(max(ended_s, default=0.0))
