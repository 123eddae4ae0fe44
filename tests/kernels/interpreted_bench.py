"""The bench of decode steps with a small model on the CPU: what it asks and calls is there, so that
none of a GPU's time goes into finding out. Run by test_kernels_interpreted.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity

from bench import decode_step
from bench.results import MEASUREMENTS, Report
from tests.kernels.eager_gpu import SMALL, eager_gpu

SIZES: dict[str, Any] = {
    "MODEL": replace(SMALL, longest_sequence=64),
    "CONTEXT_ROWS": 48,
    "PROMPT_ROWS": 30,
    "HIT_ROWS": 16,
    "LAST_ROWS": 16,
    "PEER_ROWS": 36,
    "STREAMS": {1: "<= 2", 2: "<= 2"},
    "MANY": 2,
    "STEPS": 2,
    "STREAM_PAGES": 4,
    "DEVICE": torch.device("cpu"),
    "DTYPE": "float32",
    "READ_ITEMS": 1000,
    "MATRIX_SIDE": 10,
    "ACTIVITIES": (ProfilerActivity.CPU,),
}


class Recorded:
    """A graph that holds nothing; what is captured has run."""

    def replay(self) -> None: ...


@contextmanager
def capture(_graph: Recorded) -> Iterator[None]:
    yield


def run_once(work: Callable[[], object], _turns: int) -> float:
    work()
    return 1.0


def test_every_part_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others: dict[str, Any] = {
        "time_ms": run_once,
        "start_to_ready_s": lambda _: 20.0,
        "write_checkpoint": lambda *_: None,
        "transformers_step_ms": lambda *_: 90.0,
    }
    with (
        torch.inference_mode(),
        eager_gpu(),
        patch.multiple(decode_step, **SIZES, **others),
        patch.multiple(torch.cuda, CUDAGraph=Recorded, graph=capture),
    ):
        report = Report("decode_step")
        decode_step.measure(report, decode_step.PARTS, 1e9)
        report.save(tmp_path)
    said = capsys.readouterr().out
    assert "no time left" not in said
    assert "[" in said and "prefix_hit_over_cold_ratio 1 ratio <= 0.35" in said
    cases = [result.case for result in report.results]
    assert len(cases) == len(set(cases)) == 20
    assert (tmp_path / "decode_step.md").read_text().count("\n| ") == len(cases) + 2


def test_parts_are_chosen_and_none_begins_late(capsys: pytest.CaptureFixture[str]) -> None:
    options = decode_step.read_options(["--parts", "loops", "steps", "--seconds", "0"])
    assert options.out == MEASUREMENTS
    with eager_gpu(), patch.multiple(decode_step, **SIZES, time_ms=run_once):
        decode_step.measure(Report("decode_step"), options.parts, -1.0)
    said = capsys.readouterr().out.splitlines()
    assert said[2:] == ["no time left for steps", "no time left for loops"]
