"""Files of commands are whole or as they were before."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from duplet_core.errors import InvalidInput, Reason, Unavailable
from duplet_unit import output_files
from duplet_unit.commands import app
from duplet_unit.output_files import filling, replacing
from duplet_unit.unit import free_local_address


class Failed(Exception):
    pass


def contents(folder: Path) -> dict[str, str]:
    """Of every file in it."""
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("was_there", [False, True])
def test_a_file_is_there_when_it_is_whole(tmp_path: Path, was_there: bool) -> None:
    path = tmp_path / "x.svg"
    before = {"x.svg": "old"} if was_there else {}
    if was_there:
        path.write_text("old")
    with replacing(path) as draft:
        assert draft.suffix == ".svg"
        draft.write_text("half")
        assert contents(tmp_path).items() >= before.items()
        draft.write_text("new")
    assert contents(tmp_path) == {"x.svg": "new"}


def fail_in(writing: AbstractContextManager[Path], write: Callable[[Path], object]) -> None:
    def work() -> None:
        with writing as draft:
            write(draft)
            raise Failed

    with pytest.raises(Failed):
        work()


def test_a_failure_leaves_the_file_of_before(tmp_path: Path) -> None:
    fail_in(replacing(tmp_path / "x"), lambda draft: draft.write_text("half"))
    assert contents(tmp_path) == {}
    (tmp_path / "x").write_text("old")
    fail_in(replacing(tmp_path / "x"), lambda draft: draft.write_text("half"))
    assert contents(tmp_path) == {"x": "old"}


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    with replacing(link) as draft:
        draft.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_new_file_has_the_mode_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with replacing(tmp_path / "x"):
        pass
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_device_is_written_to() -> None:
    with replacing(Path("/dev/null")) as draft:
        draft.write_text("nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/no/such/x", "out: /no/such/x: No such file"),
        ("/dev", "out: /dev: Is a directory"),
        ("/proc/x", "out: /proc/x: "),
    ],
)
def test_a_file_that_cannot_be_is_named_before_anything_is_done(path: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told), replacing(Path(path)):
        raise AssertionError


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the kernel's table has as mounted; drafts have a folder of their own."""
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "x.wav").write_text("old")
    table = tmp_path / "mountinfo"
    point = os.fsencode(folder / "x.wav").replace(b" ", rb"\040")
    table.write_bytes(
        b"1 2 0:3 / / rw - ext4 /dev/a rw\n4 1 0:3 /y " + point + b" rw - ext4 b rw\n"
    )
    monkeypatch.setattr(output_files, "MOUNTS", table)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder / "x.wav"


@pytest.mark.parametrize("among_drafts", [False, True])
def test_a_mounted_file_is_written_in_place_when_the_draft_is_whole(
    mounted: Path, among_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if among_drafts:
        monkeypatch.setattr(tempfile, "tempdir", str(mounted.parent))
    number = mounted.stat().st_ino
    with replacing(mounted) as draft:
        draft.write_text("new")
        assert draft.suffix == ".wav"
        assert mounted.read_text() == "old"
        assert (draft.parent == mounted.parent) is among_drafts
    assert contents(mounted.parent) == {"x.wav": "new"}
    assert mounted.stat().st_ino == number
    fail_in(replacing(mounted), lambda draft: draft.write_text("half"))
    assert mounted.read_text() == "new"
    left = {path.name for path in mounted.parents[1].iterdir()}
    assert left == {"a b", "mountinfo"}


def test_a_mounted_file_that_is_no_longer_whole_is_named(
    mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        with replacing(mounted) as draft:
            draft.write_text("new")
            mounted.unlink()
            mounted.symlink_to("/dev/full")

    with pytest.raises(Unavailable, match=r"x.wav: No space left .* is not whole"):
        write()


def test_a_file_that_is_really_mounted_is_written_to(tmp_path: Path) -> None:
    for name in ("there", "here"):
        (tmp_path / name).write_text("old")
    write = (
        "from pathlib import Path; from duplet_unit.output_files import replacing\n"
        "with replacing(Path('here')) as draft: draft.write_text('new')"
    )
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = "mount --bind there here"
    if subprocess.run([*apart, mount], cwd=tmp_path, check=False).returncode:
        pytest.skip("nothing may be mounted here")
    command = [*apart, f'{mount} && exec "$@"', "sh", sys.executable, "-c", write]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert contents(tmp_path) == {"there": "new", "here": "old"}


def test_a_pipes_reader_gets_what_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        with replacing(pipe) as draft:
            draft.write_text("new")
        assert reader.communicate()[0] == "new"
    assert pipe.is_fifo()


def test_what_stdout_leads_to_is_written_to(tmp_path: Path) -> None:
    """A pipe that no folder has, or a file."""
    write = (
        "from pathlib import Path; from duplet_unit.output_files import replacing\n"
        "with replacing(Path('/dev/stdout')) as draft: draft.write_text('new')"
    )
    command = [sys.executable, "-c", write]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"new"
    with (tmp_path / "x").open("wb") as file:
        subprocess.run(command, check=True, stdout=file)
    assert contents(tmp_path) == {"x": "new"}


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "x")
    with pytest.raises(InvalidInput, match="x: Too many levels"), replacing(tmp_path / "x"):
        raise AssertionError


def test_a_full_disk_is_named() -> None:
    def write() -> None:
        with replacing(Path("/dev/full")) as draft:
            draft.write_text("x")

    with pytest.raises(Unavailable, match="out: /dev/full: No space left") as caught:
        write()
    assert caught.value.reason is Reason.CANCELLED


def test_a_folder_gets_all_files_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with filling(folder) as draft:
        (draft / "x").write_text("1")
        (draft / "y").write_text("2")
        assert [path for path in folder.iterdir() if path != draft] == []
    assert contents(folder) == {"x": "1", "y": "2"}
    fail_in(filling(folder), lambda draft: (draft / "x").write_text("half"))
    assert contents(folder) == {"x": "1", "y": "2"}


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    fail_in(filling(tmp_path / "new"), lambda draft: (draft / "x").write_text("half"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInput, match="out: /proc/x: "), filling(Path("/proc/x")):
        raise AssertionError


COMMANDS = {
    "generate": ("Hello.", "--out"),
    "say": ("Hello.", "-o"),
    "waterfall": ("-o",),
    "bench": ("--concurrency", "1", "--requests", "1", "--out"),
}
"""Those that ask a unit and write what came."""


def without_a_unit(command: str, out: Path) -> Result:
    arguments = [command, *COMMANDS[command], str(out), "--address", free_local_address()]
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("command", ["generate", "say", "waterfall"])
def test_a_command_that_fails_leaves_the_file_of_before(tmp_path: Path, command: str) -> None:
    out = tmp_path / "out.json"
    out.write_text("old")
    done = without_a_unit(command, out)
    assert done.exit_code == 1, done.output
    assert "no unit answers there" in done.stderr
    assert contents(tmp_path) == {"out.json": "old"}


@pytest.mark.parametrize("command", ["generate", "waterfall", "bench"])
def test_a_file_that_cannot_be_is_named_first(command: str) -> None:
    done = without_a_unit(command, Path("/proc/x.json"))
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("duplet: INVALID_REQUEST: out: /proc/x.json: ")


def test_a_trace_that_cannot_be_written_is_one_line() -> None:
    done = CliRunner().invoke(app, ["trace", "synth", "/no/such/trace.jsonl"])
    assert done.exit_code == 2
    assert done.stderr.startswith("duplet: INVALID_REQUEST: out: /no/such/trace.jsonl: ")
