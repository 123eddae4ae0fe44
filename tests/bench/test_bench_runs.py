"""Each benchmark runs to its end, small, and tells every case that it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.admission_forms import COLUMNS, encode_forms, make_prompt
from bench.admission_forms import admit as admit_form
from bench.kv_move_cpu import move_over_contiguous
from bench.results import ROOT, read_results


def run_small(name: str, folder: Path, *options: str) -> dict[str, float]:
    """Values by case of a small run."""
    command = (sys.executable, "-m", f"bench.{name}", "--small", "--out", str(folder), *options)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    results = read_results(folder / f"{name}.jsonl")
    assert done.stdout.splitlines()[-1].startswith(f"| {results[-1].case} ")
    return {result.case: result.value for result in results}


def test_all_forms_say_the_same_prompt() -> None:
    prompt = make_prompt(50)
    for form, data in encode_forms(prompt).items():
        assert admit_form(form, data) == prompt.tobytes(), form
    assert prompt.shape == (50, COLUMNS)


def test_admission(tmp_path: Path) -> None:
    values = run_small("admission", tmp_path)
    for quantile in ("p50", "p99"):
        for at_once in (1, 16):
            case = f"in lb, {at_once} at once, {quantile}"
            for form in ("packed", "json", "repeated"):
                assert values[f"{form} {case}"] > 0
            assert values[f"admission_packed_over_json_ratio {case}"] > 0
            assert values[f"admission_packed_over_repeated_ratio {case}"] > 0
            for state in ("idle", "busy"):
                where = f"{at_once} at once, {state}"
                assert values[f"unit: lb, {where}, {quantile}"] > 0
                for role in ("prefill", "decode"):
                    assert values[f"unit: {role}, {where}, {quantile}, at most"] > 0
                assert values[f"unit: probes, {where}"] >= 4


def test_stream(tmp_path: Path) -> None:
    values = run_small("stream", tmp_path)
    saturated = "asyncio, 8 streams, 8 rows a message"
    assert values[f"{saturated}: rows"] > values[f"{saturated}: messages"] > 0
    paced = "uvloop, 8 streams, 50 steps/s, 1 row a message"
    assert values[f"{paced}: step to client, p99"] > 0
    assert values[f"{paced}: lb_rss_mb"] < 150


def test_generator(tmp_path: Path) -> None:
    values = run_small("generator", tmp_path)
    case = "8 streams at 60 rows/s, 2 processes"
    assert 0 <= values[f"{case}: generator_streams_at_60_rows"] <= 8
    assert values[f"{case}: generator_lag_p99_ms"] >= 0
    assert values[f"{case}: cores of the generator"] > 0
    assert values[f"{case}: cores of lb"] > 0


def test_instrumentation(tmp_path: Path) -> None:
    values = run_small("instrumentation", tmp_path, "--part", "lb")
    assert values["lb alone, 64 streams, 8 rows a message: throughput ratio"] > 0


def test_moving_kv_on_the_cpu() -> None:
    assert move_over_contiguous(2) > 0
