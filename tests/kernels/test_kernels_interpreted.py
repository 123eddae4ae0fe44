"""Runs the kernels' tests in Triton's interpreter, in a process of their own: the interpreter is
chosen when Triton is imported, for the whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "name",
    [
        "interpreted_move_rows.py",
        "interpreted_kv_hash.py",
        "interpreted_attend.py",
        "interpreted_linear.py",
        "interpreted_step.py",
        "interpreted_lm.py",
        "interpreted_engine.py",
        "interpreted_bench.py",
    ],
)
def test_kernel_against_plain_torch(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / name)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
