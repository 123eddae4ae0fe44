"""Ctrl-C: quiet while a command loads, and never a child's to answer."""

from __future__ import annotations

import ast
import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import duplet_load
import duplet_unit
from duplet_unit.cli import TERMINATED
from duplet_unit.terminal import INTERRUPTED, run

AT_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from duplet_unit.cli import main
main()
"""
AFTER_IMPORT = """
import signal, sys
from duplet_unit.cli import main
sys.argv = ["duplet", "--version"]
try:
    main()
except SystemExit:
    pass
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
WITH_A_DRAFT = """
import asyncio, os, sys
from pathlib import Path
from duplet_unit import cli, commands
from duplet_unit.output_files import replacing
from duplet_unit.terminal import run

async def write(out, number):
    with replacing(out) as draft:
        draft.write_text("half")
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        await asyncio.Event().wait()

@commands.app.command()
def interrupted(out: Path, number: int) -> None:
    run(write(out, number))

sys.argv[0] = "duplet"
cli.main()
"""
STARTERS = ("create_subprocess_exec", "Popen", "run")
OF_SUBPROCESSES = ("subprocess", "asyncio")
PLAYER = "player"
"""Of sound: Ctrl-C may end it at once."""


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_ctrl_c_while_a_command_loads_ends_it_without_a_traceback() -> None:
    done = python(AT_IMPORT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_the_commands_once_it_is_loaded() -> None:
    done = python(AFTER_IMPORT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)]
)
def test_a_signal_leaves_no_draft(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "out").write_text("old")
    done = python(WITH_A_DRAFT, "interrupted", str(tmp_path / "out"), str(int(number)))
    assert (done.returncode, done.stderr) == (code, "")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_command_that_a_signal_cancelled_ends_as_by_ctrl_c() -> None:
    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(typer.Exit) as caught:
        run(cancelled())
    assert caught.value.exit_code == INTERRUPTED


def starts_in(path: Path) -> list[tuple[str, bool]]:
    """Functions that start a process, and whether each gives it a group of its own."""
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in STARTERS
                and isinstance(call.func.value, ast.Name)
                and call.func.value.id in OF_SUBPROCESSES
                and not (call.func.attr == "run" and call.func.value.id == "asyncio")
            ):
                own = any(keyword.arg == "process_group" for keyword in call.keywords)
                found.append((function.name, own))
    return found


def test_a_terminals_ctrl_c_reaches_no_child() -> None:
    """It goes to a whole process group, and a child in ours would end before we told it to."""
    found = [
        (path.name, *start)
        for package in (duplet_unit, duplet_load)
        for path in sorted(Path(str(package.__file__)).parent.glob("*.py"))
        for start in starts_in(path)
    ]
    assert len(found) >= 5
    assert [f"{name}: {function}" for name, function, own in found if not own] == [
        f"say_output.py: {PLAYER}"
    ]
