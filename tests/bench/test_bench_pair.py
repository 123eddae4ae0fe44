"""All items of the pair's bench, small, on the CPU; then again, and the pictures of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pair_figures import add_lines, plot_all
from bench.results import ROOT, read_results
from bench.systems import MONOLITH, UNIT, UNPACKED, chunked
from duplet_load.record import Record
from duplet_load.trace import Arrival, write_trace

SMALL = (
    *("--first", "1", "--most", "1", "--ramp-s", "0.5", "--window-s", "4", "--mixes", "1"),
    *("--processes", "1", "--ttfa-ms", "60000", "--prompt-rows", "40", "80"),
    *("--output-rows", "10", "20", "--chunks", "32", "--replay-rows", "5", "10"),
    *("--set", "DUPLET_DECODE_SLOTS=8"),  # room for the burst
)
PICTURES = ("capacity", "ttfa", "slowest", "waterfall", "burst", "replay")


def call(module: str, *arguments: str) -> str:
    """What it printed."""
    command = (sys.executable, "-m", f"bench.{module}", *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(300)  # four systems start
def test_every_item_is_measured_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace([Arrival(0.2 * n, ((f"r{n}", 50),), 6) for n in range(5)], trace)
    out = tmp_path / "out"
    given = (*SMALL, "--replay", str(trace), "--out", str(out))
    said = call("pair", *given)
    assert said.splitlines()[-1] == "0 items failed"
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

    again = call("pair", *given)
    assert "ready after" not in again, "all is known, so nothing is started"

    figures = tmp_path / "figures"
    call("pair_figures", str(out), "--out", str(figures))
    for name in PICTURES:
        assert (figures / f"pair_{name}.svg").stat().st_size > 5_000
    assert replay in (figures / "pair.md").read_text()


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


def test_an_item_that_is_not_known_is_wrong_usage() -> None:
    command = (sys.executable, "-m", "bench.pair", "--items", "unit,nonsense")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
