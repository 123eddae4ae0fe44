"""Ctrl-C at a command that runs a unit of its own: it ends in order, with the unit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STARTS_S = 200
"""Of a unit, on a machine that may do other things."""
DUPLET = (sys.executable, "-c", "from duplet_unit.cli import main; main()")
TINY = {f"DUPLET_{name}_MODEL": "tiny" for name in ("PREFILL", "DECODE", "MONOLITH")}


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the command makes its run directories; short, for Unix sockets."""
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


def processes_of(session: int) -> Iterator[str]:
    """Command lines of a session's processes that run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            if status[3] == str(session) and status[0] != "Z":
                yield (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue


@pytest.mark.timeout(STARTS_S)
@pytest.mark.parametrize("until", ["kvproxy: ready", "texts in 4 voices"])
def test_a_demo_is_interrupted(tmp_path: Path, temporary: Path, until: str) -> None:
    command = [*DUPLET, "demo", "--out", str(tmp_path / "out")]
    environment = {**os.environ, **TINY, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if until in line:
                break
        os.killpg(demo.pid, signal.SIGINT)
        said, complaints = demo.communicate()
    assert demo.returncode == 130, said + complaints
    assert complaints == ""
    assert said.splitlines()[-1] == "unit stopped: clean"
    assert list(processes_of(demo.pid)) == []
    assert list(temporary.iterdir()) == []
