"""Files that a command writes: there when they are whole, and untouched when something failed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from duplet_core.errors import InvalidInput, Reason, Unavailable

MOUNTS = Path("/proc/self/mountinfo")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside `path`, with its suffix, that takes its place when the context ends well.

    Otherwise the draft is removed, and what stood at `path` before still does. Only what is no
    regular file, a device for example, is written to directly: nothing can be lost in it. A file
    that is mounted by itself, as into a container, cannot change its place with another: its
    draft is in the folder for temporary files, and is written into it when it is whole. The
    context is for writing: an OSError of it is the file's.

    Raises:
        InvalidInput: INVALID_REQUEST; there can be no such file.
        Unavailable: CANCELLED; it cannot be written any further. Where a mounted file is no
            longer whole, the detail says so.
    """
    with _writing(path):
        draft, target, is_mounted = _begin(path)
        try:
            yield draft
            if is_mounted:
                _write_over(target, draft)
            elif draft != target:
                draft.replace(target)
        finally:
            if draft != target:
                draft.unlink(missing_ok=True)


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A draft of a folder, inside it, whose files move up into it when the context ends well.

    `folder` and its parents are made. Otherwise the draft is removed, and a folder that was made
    for it. Errors are those of `replacing`.
    """
    with _writing(folder):
        was_there = folder.is_dir()
        draft = folder / _draft_name("")
        try:
            draft.mkdir(parents=True)
        except OSError as error:
            raise _no_such_file(folder, error) from error
        try:
            yield draft
            for file in sorted(draft.iterdir()):
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(draft)
            if not was_there and not any(folder.iterdir()):
                folder.rmdir()


def _begin(path: Path) -> tuple[Path, Path, bool]:
    """The draft, which exists and is empty, what it shall become, and whether that is mounted."""
    try:
        found = _stat(path)
        if found is not None and not stat.S_ISREG(found.st_mode):
            # A pipe waits for its reader, who takes the first end for the only one.
            if not stat.S_ISFIFO(found.st_mode):
                path.open("ab").close()
            return path, path, False
        target = path.resolve()  # a link stays one
        is_mounted = found is not None and _is_mounted(target)
        if is_mounted:
            target.open("ab").close()
        draft = (Path(tempfile.gettempdir()) if is_mounted else target.parent) / _draft_name(
            target.suffix
        )
        mode = 0o666 if found is None else stat.S_IMODE(found.st_mode)
        # Not to be opened by others before it has the mode of what it replaces.
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    except OSError as error:
        raise _no_such_file(path, error) from error
    return draft, target, is_mounted


def _is_mounted(file: Path) -> bool:
    """Whether something is mounted on this very path, which has no links in it."""
    for line in MOUNTS.read_bytes().splitlines():
        escaped = line.split()[4]  # spaces and the like are octal
        if os.fsencode(file) == re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), escaped):
            return True
    return False


def _write_over(target: Path, draft: Path) -> None:
    try:
        shutil.copyfile(draft, target)
    except OSError as error:
        raise Unavailable(
            Reason.CANCELLED,
            f"out: {target}: {error.strerror}; it is mounted by itself, so it was written in "
            "place, and is not whole",
        ) from error


def _stat(path: Path) -> os.stat_result | None:
    """Of what a link leads to, be it a pipe that has no name; None where nothing is."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _draft_name(suffix: str) -> str:
    return f".duplet-{secrets.token_hex(4)}{suffix}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # Of stdout: files have no readers.
    except OSError as error:
        raise Unavailable(Reason.CANCELLED, f"out: {path}: {error.strerror}") from error


def _no_such_file(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(Reason.INVALID_REQUEST, f"out: {path}: {error.strerror}")
