"""The search for the most streams, who runs on which GPU, the choice among chunks, the ratios."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench import capacity
from bench.capacity import (
    Costs,
    Search,
    find_on,
    foretell,
    pick_chunk,
    report_ratios,
    report_system,
)
from bench.levels import Limits
from bench.points import Point, Store, best, next_levels
from bench.results import Report
from bench.systems import MONOLITH, UNIT, UNPACKED, Mix, System, chunked, mixes
from duplet_load.generator import Outcome
from duplet_load.synth import Synth

MIX = Mix("any", Synth())
COSTS = Costs(5.0, 0.08, 24.0, 9.0)


def point(streams: int, carried: bool, ttfa_s: float = 0.1, gap_s: float = 0.02) -> Point:
    return Point(
        *(streams, carried, 10, 0, 0, 0 if carried else 1),
        ttfa_p95_s=ttfa_s,
        gap_p99_s=gap_s,
        rate_p1=50.0,
    )


def make_search(tmp_path: Path, *, most: int = 32, left_s: float = 1e6) -> Search:
    limits = Limits(0.5, 1.0, 1.0, 1)
    store = Store(tmp_path / "points.jsonl", "test")
    return Search(store, limits, most, None, 4, 2, time.monotonic() + left_s)


@pytest.mark.parametrize(("first", "step"), [(1, 1), (8, 2), (20, 4), (40, 3)])
@pytest.mark.parametrize("limit", [0, 1, 5, 13, 32])
def test_the_search_ends_within_a_step_of_what_is_carried(
    limit: int, first: int, step: int
) -> None:
    known: dict[int, Point] = {}
    runs = 0
    while levels := next_levels([known[n] for n in sorted(known)], first, step, 32):
        runs += 1
        assert runs < 10
        assert levels == sorted(set(levels))
        assert 1 <= levels[0] <= levels[-1] <= 32
        for streams in levels:
            known[streams] = point(streams, streams <= limit)
            if streams > limit:
                break
    found = best([known[n] for n in sorted(known)])
    most = 0 if found is None else found.streams
    assert most <= limit
    assert limit - most < step or limit - most < max(1, first // 2)
    if limit < 32:
        assert any(not p.carried for p in known.values()) or limit - most < step


def test_what_is_carried_above_a_failure_does_not_count() -> None:
    most = best([point(1, True), point(2, False), point(4, True)])
    assert most is not None
    assert most.streams == 1
    assert best([point(1, False)]) is None


def test_points_outlive_a_run_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "points.jsonl"
    store = Store(path, "one")
    store.add("s", "m", point(8, True, gap_s=0.0))
    store.add("s", "m", point(4, True))
    store.add("s", "m", point(8, True, gap_s=0.03))
    Store(path, "another").add("s", "m", point(5, False))
    again = Store(path, "one")
    assert [(p.streams, p.gap_p99_s) for p in again.points("s", "m")] == [(4, 0.02), (8, 0.03)]
    assert again.points("s", "other") == []


def test_half_a_line_of_a_run_that_was_cut_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    store = Store(path, "one")
    store.add("s", "m", point(4, True))
    store.add("s", "m", point(8, True))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        again = Store(path, "one")
        assert again.points("s", "m") == [point(4, True)] * whole[:cut].count(b"\n")
    again.add("s", "m", point(8, False))
    assert Store(path, "one").points("s", "m") == [point(4, True), point(8, False)]


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"workload": "one", "point": {"n": 1}}'])
def test_a_line_of_another_version_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "points.jsonl"
    Store(path, "one").add("s", "m", point(4, True))
    with path.open("a") as file:
        file.write(line + "\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"points\.jsonl, line 2: no point of this version"):
        Store(path, "one")
    assert path.read_bytes() == before


def test_a_cut_search_goes_on_above_what_is_known(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    assert search.levels(UNIT, MIX)[:3] == [4, 6, 8]
    search.store.add(UNIT.name, MIX.name, point(4, True))
    search.store.add(UNIT.name, MIX.name, point(6, True))
    assert search.levels(UNIT, MIX)[:2] == [8, 10]
    assert search.levels(MONOLITH, MIX)[0] == 4
    search.store.add(UNIT.name, MIX.name, point(8, False))
    assert search.is_over(UNIT, MIX)


async def test_without_time_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_levels(*_: object, **__: object) -> None:
        raise AssertionError("it was sent")

    monkeypatch.setattr(capacity, "run_levels", run_levels)
    await make_search(tmp_path, left_s=2.5).find(UNIT, MIX, "nowhere")


def test_the_first_level_follows_from_what_steps_and_prompts_cost(tmp_path: Path) -> None:
    cold, warm, bursts = mixes((1_000, 2_000), (126, 420))
    assert foretell(UNIT, warm.synth, COSTS) == foretell(UNIT, cold.synth, COSTS) == 235
    slow = Costs(5.0, 0.08, 60.0, 50.0)
    assert foretell(UNIT, cold.synth, slow) == math.floor(0.8 * 273 * (1e3 / 42) / 55)
    assert foretell(MONOLITH, cold.synth, COSTS) < foretell(MONOLITH, warm.synth, COSTS) < 235
    limits = Limits(0.5, 1.0, 1.0, 1)
    store = Store(tmp_path / "points.jsonl", "test")
    search = Search(store, limits, 256, COSTS, 0, 0, math.inf)
    assert search.levels(UNIT, cold)[:2] == [141, 141 + 24]
    assert search.levels(UNIT, bursts)[0] == 118
    assert max(search.levels(UNIT, bursts)) <= 256


async def test_each_monolith_has_a_gpu_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: set[str] = set()
    told: dict[str, tuple[Sequence[str], set[str]]] = {}
    found: list[tuple[str, str]] = []

    @asynccontextmanager
    async def running(
        system: System, environment: Mapping[str, str], gpus: Sequence[str], longest: int
    ) -> AsyncIterator[str]:
        if system == chunked(64):
            raise RuntimeError("does not start")
        live.update(gpus)
        told[system.name] = (gpus, set(live))
        yield system.name
        live.difference_update(gpus)

    async def find(search: Search, system: System, mix: Mix, address: str) -> None:
        assert address == system.name
        if system == chunked(32) and mix.name == "first":
            raise RuntimeError("breaks")

    monkeypatch.setattr(capacity, "running", running)

    async def warm_up(search: Search, system: System, mix: Mix, address: str) -> None:
        assert address == system.name

    monkeypatch.setattr(Search, "warm_up", warm_up)
    monkeypatch.setattr(Search, "find", find)
    search = make_search(tmp_path)
    both = [Mix("first", Synth()), Mix("second", Synth())]
    known = Mix("known", Synth())
    search.store.add(MONOLITH.name, known.name, point(4, True))
    search.store.add(MONOLITH.name, known.name, point(6, False))
    jobs = [(MONOLITH, [known]), *((chunked(rows), both) for rows in (32, 64, 128))]

    def note(system: System, mix: Mix) -> None:
        found.append((system.name, mix.name))

    failed = await find_on(search, jobs, ["0", "1"], {}, 100, note)
    assert failed == 2, "one breaks, one does not start"
    assert MONOLITH.name not in told, "nothing is left to search"
    assert all(len(gpus) == 1 for gpus, _ in told.values())
    assert sorted(found) == [
        (chunked(128).name, "first"),
        (chunked(128).name, "second"),
        (chunked(32).name, "second"),
    ]
    told.clear()
    assert await find_on(search, [(UNPACKED, both)], ["0", "1"], {}, 100, note) == 0
    assert told[UNPACKED.name][0] == ["0", "1"]
    assert await find_on(search, [(chunked(256), both)], [], {}, 100, note) == 0
    assert told[chunked(256).name][0] == []


async def test_what_follows_from_some_searches_begins_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 32 fail, those of 64 are known, and the best goes on while whole prompts run."""
    events: list[str] = []
    went_on = asyncio.Event()

    @asynccontextmanager
    async def running(
        system: System, environment: Mapping[str, str], gpus: Sequence[str], longest: int
    ) -> AsyncIterator[str]:
        events.append(f"{system.name} starts")
        yield gpus[0]

    async def warm_up(*_: object) -> None: ...

    async def find(search: Search, system: System, mix: Mix, address: str) -> None:
        events.append(f"{system.name}, {mix.name}, GPU {address}")
        if system == MONOLITH:
            await went_on.wait()
        elif system == chunked(32):
            raise RuntimeError("breaks")
        elif mix.name == "second":
            went_on.set()

    monkeypatch.setattr(capacity, "running", running)
    monkeypatch.setattr(Search, "warm_up", warm_up)
    monkeypatch.setattr(Search, "find", find)
    first, second = Mix("first", Synth()), Mix("second", Synth())
    chunks = [chunked(32), chunked(64)]
    jobs = [(MONOLITH, [first]), *((system, [first]) for system in chunks)]
    asked: list[int] = []

    def then() -> list[tuple[System, list[Mix]]]:
        asked.append(len(events))
        return [(chunked(64), [second])]

    def note(*_: object) -> None: ...

    search = make_search(tmp_path)
    async with asyncio.timeout(30):
        assert await find_on(search, jobs, ["0", "1"], {}, 100, note, chunks, then) == 1
    small, large = (system.name for system in chunks)
    assert asked == [len(events) - 1], "once, when both sizes had ended"
    assert [event for event in events if event.startswith((small, large))] == [
        f"{small} starts",
        f"{small}, first, GPU 1",
        f"{large} starts",
        f"{large}, first, GPU 1",
        f"{large}, second, GPU 1",
    ]
    before = list(events)
    late = make_search(tmp_path, left_s=0.0)
    assert await find_on(late, jobs, ["0", "1"], {}, 100, note, chunks, then) == 0
    assert events == before, "nothing began without time"


async def test_a_search_has_its_time_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    async def run_levels(*_: object, most_s: float, **__: object) -> Outcome:
        given.append(most_s)
        return Outcome()

    monkeypatch.setattr(capacity, "run_levels", run_levels)
    search = make_search(tmp_path, left_s=100.0)
    await replace(search, longest_s=50.0).find(UNIT, MIX, "nowhere")
    await replace(search, longest_s=2.5).find(UNIT, MIX, "nowhere")
    await replace(search, longest_s=500.0).find(UNIT, MIX, "nowhere")
    assert [round(most_s, -1) for most_s in given] == [50.0, 100.0]


def test_the_tuned_chunk_carries_most_and_then_speaks_first(tmp_path: Path) -> None:
    store = make_search(tmp_path).store
    for rows, found in (
        (64, point(8, True, 0.3)),
        (128, point(9, True, 0.4)),
        (256, point(9, True, 0.2)),
        (512, point(1, False)),
    ):
        store.add(chunked(rows).name, MIX.name, found)
    systems = [chunked(rows) for rows in (64, 128, 256, 512, 1024)]
    assert pick_chunk(store, systems, MIX) == chunked(256)


def test_ratios_are_per_card(tmp_path: Path) -> None:
    store = make_search(tmp_path).store
    store.add(UNIT.name, MIX.name, point(30, True, gap_s=0.02))
    store.add(UNIT.name, MIX.name, point(32, False))
    store.add(chunked(32).name, MIX.name, point(10, True, gap_s=0.04))
    report = Report("pair", "test")
    report_system(report, store, UNIT, MIX)
    report_system(report, store, chunked(32), MIX)
    report_ratios(report, store, chunked(32), MIX)
    values = {result.case.removeprefix("any: "): result.value for result in report.results}
    assert values["1P1D: streams carried"] == 30
    assert values["1P1D: streams a card"] == 15
    assert values[f"{chunked(32).name}: streams carried at least"] == 10
    assert values["capacity_per_card_pd_over_chunked_monolith at most"] == 1.5
    assert values["row_gap_p99_pd_over_chunked_monolith"] == 0.5
    assert not any("over_monolith" in case for case in values), "it was not measured"
    store.add(chunked(32).name, MIX.name, point(12, False))
    report_ratios(report, store, chunked(32), MIX)
    cases = [result.case.removeprefix("any: ") for result in report.results]
    assert "capacity_per_card_pd_over_chunked_monolith" in cases


def test_a_search_that_was_cut_far_below_what_is_not_carried_knows_a_bound(tmp_path: Path) -> None:
    store = Store(tmp_path / "points.jsonl", "test")
    for streams, carried in ((58, True), (69, True), (116, False), (139, True)):
        store.add(UNIT.name, MIX.name, point(streams, carried))
    store.add(MONOLITH.name, MIX.name, point(1, True))
    store.add(MONOLITH.name, MIX.name, point(2, False))
    report = Report("pair", "test")
    report_system(report, store, UNIT, MIX)
    report_system(report, store, MONOLITH, MIX)
    report_ratios(report, store, chunked(32), MIX)
    values = {result.case.removeprefix("any: "): result.value for result in report.results}
    assert values["1P1D: streams carried at least"] == 69
    assert values["monolith: streams carried"] == 1
    assert values["capacity_per_card_pd_over_monolith at least"] == 34.5
