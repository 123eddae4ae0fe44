"""The items of the pair's bench, small, on the CPU: what the unit is asked for is measured; who
else is compared is started and loaded once, and its searches are made up. Then all of it again,
and the pictures of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench import capacity, pair, pair_figures, pair_items
from bench.capacity import Search
from bench.levels import Broken
from bench.pair import make_bench, make_parser, run, run_on_unit
from bench.pair_figures import add_lines, plot_all
from bench.pair_items import Bench
from bench.points import Point
from bench.results import read_results
from bench.systems import MONOLITH, UNIT, UNPACKED, Mix, System, chunked, running
from duplet_load.record import Record
from duplet_load.trace import Arrival, write_trace

SMALL = (
    *("--first", "1", "--most", "1", "--ramp-s", "0.2", "--window-s", "1.5", "--mixes", "1"),
    *("--processes", "1", "--ttfa-ms", "60000", "--prompt-rows", "40", "80"),
    *("--output-rows", "10", "20", "--chunks", "32", "--replay-rows", "5", "10"),
    *("--set", "DUPLET_DECODE_SLOTS=8"),  # room for the burst
)
ON_UNIT = ("unit", "waterfall", "replay")
PICTURES = ("capacity", "ttfa", "slowest", "waterfall", "burst", "replay")

Call = Callable[..., int | None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a module's `main` with arguments."""

    def run_main(main: Callable[[], int | None], *arguments: str) -> int | None:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        return main()

    return run_main


def bench_of(*arguments: str) -> Bench:
    return make_bench(make_parser().parse_args(arguments))


@asynccontextmanager
async def not_started(system: System, *_: object) -> AsyncIterator[str]:
    yield system.name


async def not_warmed_up(search: Search, system: System, mix: Mix, address: str) -> None:
    assert address == system.name


async def all_carried(search: Search, system: System, mix: Mix, address: str) -> None:
    """In a search's place: every level that it asks for is carried."""
    for streams in search.levels(system, mix):
        made = Point(streams, True, 9, 0, 0, 0, ttfa_p95_s=0.1, gap_p99_s=0.02, rate_p1=50.0)
        search.store.add(system.name, mix.name, made)


@pytest.mark.timeout(300)
def test_every_item_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace([Arrival(0.1 * n, ((f"r{n}", 50),), 6) for n in range(5)], trace)
    out = tmp_path / "out"
    given = (*SMALL, "--replay", str(trace), "--out", str(out))
    bench = bench_of(*given)
    assert asyncio.run(run_on_unit(bench, ON_UNIT)) == 0

    monkeypatch.setattr(capacity, "running", not_started)
    monkeypatch.setattr(Search, "warm_up", not_warmed_up)
    monkeypatch.setattr(Search, "find", all_carried)
    # On the unit there is nothing left to measure, so what says that it starts would fail.
    monkeypatch.delattr(pair, "running")
    assert asyncio.run(run(bench)) == 0
    results = read_results(out / "pair.jsonl")
    assert len({result.date for result in results}) == 1, "one run is told once"
    values = {result.case: result.value for result in results}
    for system in (UNIT, UNPACKED, MONOLITH, chunked(32)):
        assert any(case.startswith(f"half cold: {system.name}: streams a card") for case in values)
    replay = "replay of 240 s of trace, 1 x as fast"
    assert values[f"{replay}: requests"] == 5
    assert values[f"{replay}: kv checks"] > 0
    assert values[f"{replay}: kv mismatches"] == 0
    assert values["waterfall: 1 streams: requests"] > 0
    assert values["1P1D, all items: kv mismatches"] == 0

    monkeypatch.delattr(capacity, "running")
    assert call(pair.main, *given) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 items failed", "and none was started"

    figures = tmp_path / "figures"
    call(pair_figures.main, str(out), "--out", str(figures))
    for name in PICTURES:
        assert (figures / f"pair_{name}.svg").stat().st_size > 5_000
    assert replay in (figures / "pair.md").read_text()


@pytest.mark.parametrize(
    ("starts", "failing", "measured", "failed"),
    [
        ([True], "", ["half cold", "waterfall", "warm, smooth", "bursts", "replay"], 0),
        ([True, True], "waterfall", ["half cold", "warm, smooth", "bursts", "replay"], 1),
        ([False, True], "", ["half cold", "waterfall", "warm, smooth", "bursts", "replay"], 1),
        ([False, False], "", [], 2),
    ],
)
async def test_what_fails_costs_the_other_items_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    starts: list[bool],
    failing: str,
    measured: list[str],
    failed: int,
) -> None:
    """A unit that does not start is tried twice; an item that fails is not, and gives the others
    a fresh unit."""
    began: list[bool] = []
    done: list[str] = []

    @asynccontextmanager
    async def start(system: System, *_: object) -> AsyncIterator[str]:
        began.append(starts[len(began)])
        if not began[-1]:
            raise TimeoutError
        yield system.name

    def measure(name: str) -> None:
        if name == failing:
            raise Broken(name)
        done.append(name)

    async def search(bench: Bench, mix: Mix, address: str) -> None:
        measure(mix.name)

    async def draw(bench: Bench, address: str) -> None:
        measure("waterfall")

    async def replay(bench: Bench, address: str) -> None:
        measure("replay")

    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(pair, "running", start)
    monkeypatch.setattr(pair, "report_checks", nothing)
    monkeypatch.setattr(Search, "warm_up", not_warmed_up)
    monkeypatch.setattr(pair_items, "measure_unit", search)
    monkeypatch.setattr(pair_items, "measure_waterfall", draw)
    monkeypatch.setattr(pair_items, "measure_replay", replay)
    bench = bench_of("--out", str(tmp_path), "--budget-s", "10000")
    assert await run_on_unit(bench, ON_UNIT) == failed
    assert began == starts
    assert done == measured


@pytest.mark.timeout(300)
def test_a_system_of_one_card_whose_prompts_come_as_json(tmp_path: Path) -> None:
    """Both at once: a monolith, and lb and clients of the bench's own."""
    bench = bench_of(*SMALL, "--out", str(tmp_path))
    system = replace(UNPACKED, cards=1, chunk_rows=32)

    async def load() -> None:
        place = (bench.environment, bench.gpus, bench.longest_prompt)
        async with running(system, *place) as address:
            await bench.search.warm_up(system, bench.base, address)
            with pytest.raises(Broken, match="INTERNAL"):
                await bench.search.warm_up(MONOLITH, bench.base, address)

    asyncio.run(load())


def test_lines_that_are_known_are_not_added_again(tmp_path: Path) -> None:
    new, known = tmp_path / "new.jsonl", tmp_path / "known.jsonl"
    lines = [json.dumps({"case": name}) for name in "abc"]
    known.write_text(lines[0] + "\n")
    new.write_text("\n".join(lines) + "\n")
    assert add_lines(new, known) == 2
    assert add_lines(new, known) == 0
    assert known.read_text().splitlines() == lines


def test_a_burst_that_nobody_survived_has_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Record(0, 50, 0.0, outcome="OVERLOADED")
    (tmp_path / "burst.jsonl").write_text(json.dumps(refused.to_fields()) + "\n")
    (tmp_path / "replay.jsonl").write_text(json.dumps(refused.to_fields()) + "\n")
    plot_all(tmp_path, tmp_path / "figures")
    assert "no pair_burst.svg" in capsys.readouterr().out
    assert (tmp_path / "figures" / "pair_replay.svg").exists()


def test_an_item_that_is_not_known_is_wrong_usage(
    call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(pair.main, "--items", "unit,nonsense")
    assert "nonsense" in capsys.readouterr().err
