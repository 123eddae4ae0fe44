"""Load against a real unit on the CPU: closed loop, open loop, slices of the public formats."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from duplet_core.ids import Role
from duplet_core.timeline import SEGMENTS
from duplet_load.generator import Load, run_load
from duplet_load.record import Record
from duplet_load.synth import Synth, make_trace
from duplet_load.trace import Arrival
from duplet_unit.commands import app
from duplet_unit.terminal import INTERRUPTED
from tests.e2e.live_unit import LiveUnit, live_unit, until
from tests.load.test_load_traces import AZURE, mooncake

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT = ("--prompt-rows", "40", "90", "--output-rows", "5", "15")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit() -> AsyncIterator[LiveUnit]:
    patient = {"DUPLET_LB_QUEUE_WAIT_MS": "5000", "DUPLET_LB_QUEUE_LIMIT": "64"}
    async with live_unit(patient) as started:
        yield started


async def duplet(unit: LiveUnit, *argv: str, code: int = 0) -> Any:
    """Run the command; its JSON, or what it said on stderr when it is to fail."""
    arguments = [*argv, "--address", unit.listen, "--json"]
    done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def assert_all_well(summary: dict[str, Any], requests: int) -> None:
    assert summary["requests"] == requests
    assert set(summary["outcomes"]) <= {"STOP", "LENGTH"}
    assert summary["kv_checks"] >= requests - summary["outcomes"].get("STOP", 0)
    assert summary["kv_mismatches"] == 0
    assert summary["generator_lag_s"]["max"] is not None
    assert summary["generator_lateness_s"]["p50"] is not None


async def test_a_closed_loop_keeps_so_many_listeners(unit: LiveUnit, tmp_path: Path) -> None:
    asked = ("--concurrency", "3", "--requests", "12", "--voices", "2", *SHORT)
    summary = await duplet(unit, "bench", *asked, "--out", str(tmp_path), "--plots")
    assert_all_well(summary, 12)
    assert summary["cached_share"] > 0, "two voices, twelve requests"
    records = [json.loads(s) for s in (tmp_path / "requests.jsonl").read_text().splitlines()]
    began = [(r["at_s"], 1) for r in records]
    ended = [(r["at_s"] + r["took_s"], -1) for r in records]
    live = most = 0
    for _, change in sorted(began + ended):
        live += change
        most = max(most, live)
    assert most <= 3
    assert (tmp_path / "run.svg").exists()
    table = CliRunner().invoke(app, ["waterfall", str(tmp_path / "requests.jsonl")])
    assert table.exit_code == 0, table.stderr
    assert all(segment in table.stdout for segment in SEGMENTS)


async def test_an_open_loop_sends_at_its_times(unit: LiveUnit, tmp_path: Path) -> None:
    asked = ("--rate", "40", "--requests", "10", "--burstiness", "0", *SHORT)
    summary = await duplet(unit, "bench", *asked, "--out", str(tmp_path))
    assert_all_well(summary, 10)
    records = [json.loads(s) for s in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [r["at_s"] for r in records] == pytest.approx([n / 40 for n in range(10)])
    assert all(r["lag_s"] > -0.01 for r in records), "timers count in milliseconds"


@pytest.mark.parametrize(
    "text",
    [AZURE, mooncake((0, 600, 2, [0, 1]), (0, 700, 3, [0, 2]), (400, 90, 1, [3]))],
    ids=["azure", "mooncake"],
)
async def test_public_traces_are_replayed(unit: LiveUnit, tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    summary = await duplet(unit, "replay", str(path), "--speed", "20", *SHORT)
    assert_all_well(summary, 3)


async def test_a_made_up_trace_is_replayed(unit: LiveUnit, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    made = CliRunner().invoke(
        app, ["trace", "synth", str(path), "--requests", "8", "--rate", "50", *SHORT]
    )
    assert made.exit_code == 0, made.stderr
    assert_all_well(await duplet(unit, "replay", str(path), "--processes", "1"), 8)


def short_trace(requests: int) -> list[Arrival]:
    synth = Synth(requests, voices=2, prompt_least=40, prompt_most=90)
    return make_trace(replace(synth, output_least=5, output_most=15, seed=8))


async def test_listeners_begin_when_they_are_told(unit: LiveUnit) -> None:
    starts_s = (0.0, 0.6, 1.2)
    stop = asyncio.Event()

    def end(record: Record) -> None:
        if record.at_s > starts_s[-1]:
            stop.set()

    load = Load(unit.listen, processes=2, starts_s=starts_s, marks_s=(0.0, 3_000.0))
    outcome = await run_load(load, short_trace(4_000), end, stop)
    assert len(outcome.records) < 4_000
    assert all(record.well for record in outcome.records)
    assert min(record.at_s for record in outcome.records) >= 0
    spans = [(record.at_s, record.at_s + record.took_s) for record in outcome.records]
    for at_s, _ in spans:
        live = sum(begin <= at_s < end for begin, end in spans)
        assert live <= sum(start <= at_s for start in starts_s)
    counts = [gaps.classes.total() for gaps in outcome.gaps_between]
    assert counts == [0, outcome.gaps.classes.total(), 0], "none before time 0 or in an hour"
    assert counts[1] > 0


@pytest.mark.parametrize("starts_s", [(0.0, 0.1, 3_000.0), ()], ids=["closed", "open"])
async def test_after_the_stop_nothing_more_is_sent(
    unit: LiveUnit, starts_s: tuple[float, ...]
) -> None:
    stop = asyncio.Event()

    def end(_: Record) -> None:
        stop.set()

    load = Load(unit.listen, processes=2, starts_s=starts_s)
    arrivals = [replace(a, at_s=0.5 * n) for n, a in enumerate(short_trace(4_000))]
    outcome = await asyncio.wait_for(run_load(load, arrivals, end, stop), 60)
    assert 1 <= len(outcome.records) < 200, "the others would have taken minutes"
    assert all(record.well for record in outcome.records)


async def bench_until(unit: LiveUnit, rows: int, out: Path) -> asyncio.subprocess.Process:
    """`duplet bench` as a process of its own, with far more requests than there is time for and
    `rows` output rows each; it was told by Ctrl-C, while rows came, and has heard of it."""
    sent = await unit.gauge(Role.LB, "row_gap_seconds_count")
    asked = ("--concurrency", "2", "--requests", "4000", "--prompt-rows", "40", "90")
    argv = ["bench", *asked, "--output-rows", str(rows), str(rows), "--json", "--out", str(out)]
    program = "from duplet_unit.cli import main; main()"
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *argv, "--address", unit.listen),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    async def has_rows() -> bool:
        return await unit.gauge(Role.LB, "row_gap_seconds_count") > sent

    await until(has_rows, "rows of the bench")
    bench.send_signal(signal.SIGINT)
    assert bench.stderr is not None
    assert b"nothing more is sent" in await bench.stderr.readline()
    return bench


async def test_ctrl_c_ends_a_bench_with_what_it_measured(unit: LiveUnit, tmp_path: Path) -> None:
    bench = await bench_until(unit, 20, tmp_path)
    said, complaints = await bench.communicate()
    assert bench.returncode == INTERRUPTED, complaints
    summary = json.loads(said)
    assert 1 <= summary["requests"] < 4_000
    assert_all_well(summary, summary["requests"])
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


async def test_the_second_ctrl_c_ends_a_bench_at_once(unit: LiveUnit, tmp_path: Path) -> None:
    bench = await bench_until(unit, 2_000, tmp_path)
    bench.send_signal(signal.SIGINT)
    said, complaints = await bench.communicate()
    assert (bench.returncode, said, complaints) == (INTERRUPTED, b"", b"")
    assert list(tmp_path.iterdir()) == []
    await unit.wait_idle()


async def test_wrong_usage_says_so(unit: LiveUnit, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("hello")
    assert "not a trace" in await duplet(unit, "replay", str(path), code=2)
    assert "--rate" in await duplet(unit, "bench", code=2)
    asked = ("bench", "--rate", "1", "--output-rows", "9", "3")
    assert "9 3" in await duplet(unit, *asked, code=2)
