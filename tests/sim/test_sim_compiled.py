"""The compiled simulator does what its sources do."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from duplet_sim.simulate import trace_hash

ROOT = Path(__file__).parents[2]
COMPILE = runpy.run_path(str(ROOT / "libs/sim/compile.py"))
SEEDS = 300


def run(program: str, path: Path) -> str:
    """What a Python prints that finds its packages in `path` first."""
    command = [sys.executable, "-c", program]
    env = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.timeout(900)  # the first time, and after a change of the sources, it compiles
@pytest.mark.skipif(bool(COMPILE["missing"]()), reason=f"not compiled: {COMPILE['missing']()}")
def test_a_seed_is_the_same_story_compiled() -> None:
    out = ROOT / ".build/sim"
    COMPILE["main"](out)
    names = [name.replace("/", ".") for name in COMPILE["COMPILED"]]
    listed = f"import importlib; names = {names}; files = map(importlib.import_module, names)"
    files = run(f"{listed}; print(*(m.__file__ for m in files))", out).split()
    assert [Path(file).suffix for file in files] == [".so"] * len(names)
    hashes = f"from duplet_sim.simulate import trace_hash; print(*map(trace_hash, range({SEEDS})))"
    assert run(hashes, out).split() == [trace_hash(seed) for seed in range(SEEDS)]


def test_without_a_compiler_it_says_so_and_leaves_nothing_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    (tmp_path / "sim").mkdir()
    COMPILE["main"](tmp_path / "sim")
    assert capsys.readouterr().err == "uncompiled, no C compiler (no-such-compiler): half as fast\n"
    assert not (tmp_path / "sim").exists()


def test_what_is_built_from_other_sources_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    monkeypatch.setitem(COMPILE["main"].__globals__, "build", built.append)
    (tmp_path / ".built").write_text(COMPILE["fingerprint"]())
    COMPILE["main"](tmp_path)
    assert built == []
    (tmp_path / ".built").write_text("of other sources")
    COMPILE["main"](tmp_path)
    assert built == [tmp_path]
