"""Named results of KV movement follow from cases, and a missing case leaves its name out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bench import kv_move, kv_move_owner
from bench.kv_move import (
    BEST_KERNEL,
    BUDGETS,
    PARTS,
    QUOTIENTS,
    SAME_AS,
    Measured,
    choose_parts,
    name_results,
)
from bench.kv_move_grpc import CASES, LINK_GB_S, LOADED, PREFIX, ROW_BYTES, link_free_ns
from bench.kv_move_launch import measure
from bench.kv_move_run import FORMS
from bench.results import ROOT


def test_every_budget_has_a_result() -> None:
    assert set(BUDGETS) <= {*SAME_AS, *QUOTIENTS, *BEST_KERNEL}


def test_results_follow_from_cases() -> None:
    measured: Measured = {
        "page-major-2048.pages.busy.ratio": (1.07, "ratio"),
        "page-major-2048.churned.busy": (0.9, "ms"),
        "page-major-2048.fresh.busy": (0.8, "ms"),
        "layer-major-2048.push.idle.ratio": (1.2, "ratio"),
        "layer-major-2048.pull.idle.ratio": (1.1, "ratio"),
    }
    assert name_results(measured) == {
        "kv_page_major_busy_ratio": (1.07, "ratio"),
        "kv_scattered_layer_major_ratio": (1.1, "ratio"),
        "kv_churned_over_fresh_ratio": (pytest.approx(1.125), "ratio"),
    }


def test_a_load_runs_before_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Steps(kv_move_owner.Load):
        steps = 0

        def __init__(self, kind: str) -> None:
            self.times_ms = []

        def step(self) -> None:
            self.steps += 1
            self.times_ms.append(self.steps)

    monkeypatch.setattr(kv_move_owner, "Load", Steps)
    owner = kv_move_owner.Owner.__new__(kv_move_owner.Owner)
    assert owner.obey({"do": "load", "kind": "sum"}) is None
    assert isinstance(owner.load, Steps)
    assert owner.load.steps > kv_move_owner.IN_FLIGHT, "one at least is over"
    assert owner.load.times_ms == [], "the first ones do not count"


def test_an_ideal_link_carries_moves_in_order_and_idles_between() -> None:
    move_ns = 256 * ROW_BYTES / LINK_GB_S
    free = link_free_ns([[0, 256], [10, 256], [10_000_000, 128]])
    assert free[0] == pytest.approx(move_ns)
    assert free[10] == pytest.approx(2 * move_ns), "it waits for the one before"
    assert free[10_000_000] == pytest.approx(10_000_000 + move_ns / 2)


def test_parts_are_named_by_their_beginnings() -> None:
    assert choose_parts("idle,grpc") == ["idle-page-major", "idle-layer-major", *PARTS[5:6], "grpc"]
    assert choose_parts("mps-launches,mps")[:2] == ["mps-launches", "mps-page-major"]
    assert choose_parts(",".join(PARTS)) == list(PARTS)
    with pytest.raises(ValueError, match=r"nosuch: none of busy-page-major, "):
        choose_parts("grpc,nosuch")


def test_every_part_is_a_case_of_a_bench() -> None:
    ways = {part for part in PARTS if part in CASES}
    assert ways | {"cpu"} == set(CASES)
    assert {part.partition("-")[2] for part in PARTS if part not in ways} == set(FORMS)


TELLING = """
import json, signal, sys
print("a log line")
print(json.dumps({"case": "a", "value": 1.5, "unit": "ms"}), flush=True)
open(sys.argv[1], "w").close()
signal.pause()
"""


def test_a_part_that_takes_too_long_leaves_what_it_has_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow_part.py").write_text(TELLING)
    told = tmp_path / "told"
    os.mkfifo(told)

    class Watchdog:
        """Its time is over when the part has told its first case."""

        def __init__(self, limit_s: float, end: Any, arguments: Any) -> None:
            self._thread = threading.Thread(target=self._run, args=(end, arguments))
            self.start, self.cancel = self._thread.start, self._thread.join

        def _run(self, end: Any, arguments: Any) -> None:
            told.read_bytes()
            end(*arguments)

    monkeypatch.setattr(kv_move, "Timer", Watchdog)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = kv_move.run_part("slow_part", str(told), more={"PYTHONPATH": path})
    assert found == {"a": (1.5, "ms")}
    said = capsys.readouterr()
    assert "a: 1.5 ms" in said.out
    assert "ended with -9" in said.err


def test_ways_over_grpc_are_told_phase_by_phase_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.kv_move_grpc", "cpu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    wanted = [f"{PREFIX}.cpu.{phase.name}.{q}" for phase in LOADED for q in ("p50", "p99")]
    assert [line["case"] for line in lines] == wanted
    assert all(line["value"] > 0 for line in lines)


@pytest.mark.parametrize("page_rows", [1, 16])
def test_a_request_comes_to_its_launch_on_a_driver_that_does_nothing(page_rows: int) -> None:
    found = measure(page_rows, False, rounds=3)
    assert set(found) == {"first", "whole", "without-head", "packing"}
    assert all(value > 0 for value in found.values())
