"""Load in levels: when it rises, whose requests are whose, and when enough is known."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable

import pytest

from bench import levels
from bench.levels import (
    HOPELESS,
    REFUSED,
    SETTLING,
    Broken,
    Levels,
    Limits,
    Watcher,
    closed_trace,
    judge,
    open_trace,
    run_bounded,
    run_levels,
)
from bench.points import Point
from duplet_core.playback import AUDIO_ROWS
from duplet_load.generator import Load, Outcome
from duplet_load.record import Gaps, Record
from duplet_load.synth import Synth

LEVELS = Levels((4, 6, 9, 12), ramp_s=2.0, window_s=3.0)
LIMITS = Limits(0.5, 2.0, 3.0, 1)
SYNTH = Synth(burstiness=0.0, voices=3, output_least=20, output_most=40, label="x/")


def record(
    at_s: float,
    *,
    outcome: str = "LENGTH",
    took_s: float = 1.0,
    rate: float = 60.0,
    stalls: int = 0,
    ttfa_s: float = 0.2,
) -> Record:
    found = Record(0, 100, at_s, outcome=outcome, rows_per_second=rate, stalls=stalls)
    found.took_s, found.ttfa_s = took_s, ttfa_s
    return found


def test_streams_come_in_before_their_level_is_judged() -> None:
    starts = LEVELS.starts_s()
    assert len(starts) == 12
    assert starts == tuple(sorted(starts))
    for level, streams in enumerate(LEVELS.streams):
        judged_s = LEVELS.begins_s(level) + SETTLING * LEVELS.window_s
        assert sum(start <= judged_s for start in starts) == streams
        assert sum(start < LEVELS.begins_s(level + 1) for start in starts) == streams


def test_a_request_belongs_to_the_level_it_is_sent_at() -> None:
    sent_s = [0.5, 2.1, 3.01, 4.9, 5.5, 6.01, 13.9, 14.1]
    assert [LEVELS.level_of(at_s) for at_s in sent_s] == [None, None, 0, 0, None, 1, 3, None]
    marks = LEVELS.marks_s()
    assert marks == tuple(sorted(marks))
    for level in range(4):
        middle_s = (marks[2 * level] + marks[2 * level + 1]) / 2
        assert LEVELS.level_of(middle_s) == level


def test_a_closed_loop_has_requests_enough_and_none_twice() -> None:
    trace = closed_trace(LEVELS, SYNTH)
    assert len(trace) > 12 * LEVELS.ends_s
    names = Counter(a.parts[1][0] for a in trace)
    assert set(names.values()) == {1}
    assert all(name.startswith("sentence-x/") for name in names)


def test_an_open_loop_rises_and_repeats_its_bursts() -> None:
    levels = Levels((100, 200), ramp_s=30.0, window_s=30.0)
    synth = Synth(burstiness=2.0, voices=3, output_least=20, output_most=40)
    trace = open_trace(levels, synth)
    assert [a.at_s for a in trace] == sorted(a.at_s for a in trace)
    counts = [sum(30.0 * n <= a.at_s < 30.0 * (n + 1) for a in trace) for n in range(3)]
    assert sum(counts) == len(trace)
    assert counts[0] == counts[1], "the ramp and the first level have the same pattern"
    assert counts[1] == pytest.approx(100 * 42 / 30 * 30, rel=0.2)
    assert counts[2] == pytest.approx(2 * counts[1], rel=0.2)
    assert len({a.parts[1][0] for a in trace}) == len(trace)


@pytest.mark.parametrize(
    ("wrong", "carried"),
    [
        (record(4.0), True),
        (record(4.0, outcome=REFUSED[0]), False),
        (record(4.0, stalls=1), False),
        (record(4.0, rate=41.9), False),
        (record(4.0, ttfa_s=0.6), False),
    ],
    ids=["none", "refused", "stalled", "slow", "late"],
)
def test_one_wrong_request_condemns_a_level(wrong: Record, carried: bool) -> None:
    gaps = Gaps()
    gaps.add(0.02)
    point = judge(6, [record(4.0), wrong], gaps, LIMITS)
    assert point.carried is carried
    assert (point.streams, point.requests) == (6, 2)
    assert point.gap_p99_s == pytest.approx(0.02, rel=0.03)
    assert point.ttfa_p95_s == wrong.ttfa_s


def test_a_level_without_requests_is_not_carried() -> None:
    assert not judge(6, [], Gaps(), LIMITS).carried


def watch(*records: Record) -> tuple[Watcher, list[Point]]:
    told: list[Point] = []
    watcher = Watcher(LEVELS, LIMITS, told.append, asyncio.Event())
    for one in records:
        watcher(one)
    return watcher, told


def test_a_level_is_told_when_requests_sent_two_levels_later_end() -> None:
    watcher, told = watch(record(3.5), record(6.5), record(7.9, took_s=1.0))
    assert told == []
    watcher(record(8.1))
    assert [point.streams for point in told] == [4]
    assert told[0].carried
    assert not watcher.stop.is_set()


def test_a_wrong_request_ends_the_run_once_its_window_is_over() -> None:
    watcher, _ = watch(record(3.5, stalls=1, took_s=1.0))
    assert not watcher.stop.is_set(), "others of this level are still to be sent"
    watcher(record(4.5, took_s=0.6))
    assert watcher.stop.is_set()
    assert watcher.stopped_s == pytest.approx(5.1)
    assert watcher.is_whole(0)
    assert not watcher.is_whole(1)


def test_late_audio_ends_the_run_when_its_level_is_told() -> None:
    watcher, told = watch(record(3.5, ttfa_s=0.9), record(6.5), record(8.1, took_s=2.0))
    assert [point.carried for point in told] == [False]
    assert watcher.stop.is_set()
    assert watcher.is_whole(1)
    assert not watcher.is_whole(2)


def test_many_refusals_end_the_run_at_once() -> None:
    watcher, _ = watch(*[record(3.5, outcome=REFUSED[0], took_s=0.0)] * (HOPELESS - 1))
    assert not watcher.stop.is_set()
    watcher(record(3.5, outcome=REFUSED[0], took_s=0.0))
    assert watcher.stop.is_set()
    assert watcher.is_whole(0), "it is condemned already"


def test_a_fault_ends_the_run_whenever_it_comes() -> None:
    watcher, told = watch(record(0.5, outcome="KV_MISMATCH"))
    assert watcher.stop.is_set()
    assert watcher.faults == {"KV_MISMATCH"}
    assert told == []


def test_all_levels_are_whole_when_nothing_stopped_them() -> None:
    watcher, _ = watch(record(3.5))
    assert watcher.stopped_s == math.inf
    assert all(watcher.is_whole(level) for level in range(4))


def test_a_stream_that_stopped_before_it_was_audio_has_no_rate_to_judge() -> None:
    short = record(3.5, outcome="STOP", rate=30.0)
    for rows, carried in ((AUDIO_ROWS - 1, True), (AUDIO_ROWS, False)):
        short.rows = rows
        point = judge(4, [record(3.5), short], Gaps(), LIMITS)
        assert (point.carried, point.slow_streams) == (carried, int(not carried))
        watcher, _ = watch(short)
        assert watcher.wrong[0] == int(not carried)


async def test_a_load_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_load(load: Load, *_: object) -> Outcome:
        assert load.timeout_s == 0.0, "of each request"
        return await asyncio.Future()

    monkeypatch.setattr(levels, "run_load", run_load)
    monkeypatch.setattr(levels, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(levels, "CLOSING_S", 0.0)
    with pytest.raises(TimeoutError):
        await run_bounded(Load("nowhere"), [], sends_s=0.0)


@pytest.mark.parametrize(("outcomes", "broken"), [("DO", True), ("DL", False), ("", False)])
async def test_a_load_of_which_nobody_is_served_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, outcomes: str, broken: bool
) -> None:
    names = {"D": "DEADLINE", "O": "OVERLOADED", "L": "LENGTH"}

    async def run_load(*_: object) -> Outcome:
        return Outcome(records=[record(0.5, outcome=names[letter]) for letter in outcomes])

    monkeypatch.setattr(levels, "run_load", run_load)
    if not broken:
        assert len((await run_bounded(Load("nowhere"), [], sends_s=1.0)).records) == len(outcomes)
        return
    with pytest.raises(Broken, match=r"none of 2 requests .* DEADLINE, OVERLOADED"):
        await run_bounded(Load("nowhere"), [], sends_s=1.0)


@pytest.mark.parametrize(("late", "hangs"), [(HOPELESS - 1, False), (HOPELESS, True)])
async def test_a_level_at_which_the_system_hangs_is_no_point(
    monkeypatch: pytest.MonkeyPatch, late: int, hangs: bool
) -> None:
    records = [record(2.9), *(record(3.5, outcome="DEADLINE", took_s=40.0) for _ in range(late))]

    async def run_load(
        load: Load, arrivals: object, on_record: Callable[[Record], None], stop: asyncio.Event
    ) -> Outcome:
        for one in records:
            on_record(one)
        assert stop.is_set()
        return Outcome(records=records, gaps_between=[Gaps() for _ in range(len(load.marks_s) + 1)])

    monkeypatch.setattr(levels, "run_load", run_load)
    told: list[Point] = []
    load = run_levels("nowhere", SYNTH, LEVELS.streams, LIMITS, told.append)
    if hangs:
        with pytest.raises(Broken, match="DEADLINE"):
            await load
        assert told == []
    else:
        await load
        assert [point.carried for point in told] == [False]
