"""The log of a run: a first line with its plan, then a line a pair; a run goes on from it."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from duplet_canary.plan import Pair, Plan
from duplet_core.errors import InvalidInput, Reason, Unavailable

VERSION = 1
_BEGINS = b'{"duplet_canary":'


class Journal:
    """Writes pairs to a file as they come. Owned with its file by `open_journal`."""

    def __init__(self, file: FileIO | None) -> None:
        self._file = file

    def add(self, pair: Pair) -> None:
        """One line, with the system before the next pair: a killed run loses what it was at.

        Raises:
            Unavailable: CANCELLED; the log cannot be written any further.
        """
        self.write(pair.to_fields())

    def write(self, fields: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise Unavailable(Reason.CANCELLED, f"log: {error.strerror}") from error


@contextmanager
def open_journal(path: Path | None, plan: Plan) -> Iterator[tuple[Journal, list[Pair]]]:
    """The journal of a run and the pairs that it holds already; no path: one that forgets.

    A last line that a killed run left unfinished is cut off.

    Raises:
        InvalidInput: INVALID_REQUEST; the file is another plan's or another run's, damaged, or
            cannot be written.
    """
    if path is None:
        yield Journal(None), []
        return
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidInput(Reason.INVALID_REQUEST, f"log: {path}: {error.strerror}") from error
    # Unbuffered: what the disk did not take must not wait for the file's end.
    with os.fdopen(opened, "r+b", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _wrong(f"{path} is no regular file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _wrong(f"another run writes {path}") from error
        pairs = _read(path, file, plan)
        journal = Journal(file)
        if pairs is None:
            journal.write({"duplet_canary": VERSION, "plan": plan.to_fields()})
        yield journal, pairs or []


def _read(path: Path, file: FileIO, plan: Plan) -> list[Pair] | None:
    """The pairs, with the file at its end; None where it was empty."""
    data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.splitlines()
    # Nothing is cut off a file that is somebody else's.
    if lines:
        _check_plan(path, lines[0], plan)
    elif not data.startswith(_BEGINS) and not _BEGINS.startswith(data):
        raise _wrong(f"{path} is no log of the canary")
    file.seek(len(whole))
    file.truncate()
    if not lines:
        return None
    pairs: list[Pair] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            pairs.append(Pair.from_fields(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise _wrong(f"{path}, line {number} is no pair: {error}") from error
    return pairs


def _check_plan(path: Path, line: bytes, plan: Plan) -> None:
    try:
        found = json.loads(line)
        version, logged = found["duplet_canary"], Plan.from_fields(found["plan"])
    except (ValueError, TypeError, KeyError) as error:
        raise _wrong(f"{path} is no log of the canary: {error}") from error
    if version != VERSION:
        raise _wrong(f"{path} has version {version}, not {VERSION}")
    differences = logged.differences(plan)
    if differences:
        raise _wrong(f"{path} is of another run; it has {'; '.join(differences)}")


def _wrong(detail: str) -> InvalidInput:
    return InvalidInput(Reason.INVALID_REQUEST, f"log: {detail}")
