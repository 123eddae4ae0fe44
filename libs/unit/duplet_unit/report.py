"""Shows a supervisor's events: lines of JSON for scripts, a progress line for people."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from duplet_runtime.fate import describe_exit
from duplet_runtime.settings import BAD_SETTINGS_EXIT
from duplet_unit.events import Event

CRASH_LOOP = 3
"""Fast deaths in a row from which on a service is said to crash in a loop."""

LOG_TAIL_LINES = 20

HOPELESS = describe_exit(BAD_SETTINGS_EXIT)
"""How a service ends that cannot start with its settings."""


def leave_pipe() -> None:
    """Point stdout to nowhere, so that what is still buffered raises no second error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class SteadyConsole(Console):
    """A console whose reader may leave without ending the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        leave_pipe()


class JsonReport:
    """One line of JSON an event."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._reader_left = False
        """Nobody hears us any more; the unit runs on, for its streams have other listeners."""

    def __call__(self, event: Event) -> None:
        if self._reader_left:
            return
        try:
            print(event.to_json(), file=self._out, flush=True)
        except BrokenPipeError:
            self._reader_left = True
            leave_pipe()

    def close(self) -> None:
        """Nothing is held."""


class ConsoleReport:
    """A progress line until the unit is ready, then a summary; afterwards only what changes."""

    def __init__(self, console: Console, names: Iterable[str], run_dir: Path) -> None:
        self._console = console
        self._run_dir = run_dir
        self._ready = dict.fromkeys(names, False)
        self._pids: dict[str, int] = {}
        self._was_ready = False
        # On a terminal only: elsewhere a line for each service says the same.
        self._status: Status | None = None
        if console.is_terminal:
            self._status = console.status(self._progress())
            self._status.start()

    def __call__(self, event: Event) -> None:
        name = event.service or ""
        if event.kind == "started":
            self._pids[name] = event.pid or 0
        elif event.kind == "ready":
            self._ready[name] = True
            self._say_ready(name)
        elif event.kind == "unit_ready":
            self._say_unit_ready(event)
        elif event.kind == "exited":
            self._ready[name] = False
            self._say(f"{name} ended: {event.how}", "yellow")
        elif event.kind == "restarting":
            self._say_restarting(event)
        elif event.kind == "stopping":
            self.close()  # It starts no more.
            self._say(f"{name}: stopping")
        elif event.kind == "stopped":
            self._say(f"{name}: stopped, {event.how}")
        elif event.kind == "gave_up":
            self._say_gave_up(event)
        elif event.kind == "unit_stopped":
            self.close()
            self._say(f"unit stopped: {event.detail}")

    def close(self) -> None:
        """Take the progress line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _say_ready(self, name: str) -> None:
        if self._status is not None:
            self._status.update(self._progress())
        else:
            self._say(f"{name}: ready")

    def _say_unit_ready(self, event: Event) -> None:
        self.close()
        if self._was_ready:
            self._say("unit is ready again", "green")
            return
        self._was_ready = True
        table = Table(show_edge=False, pad_edge=False)
        for heading in ("service", "pid", "address"):
            table.add_column(heading)
        for name, address in (event.addresses or {}).items():
            table.add_row(name, str(self._pids.get(name, "")), Text(address))
        self._console.print(table)
        self._say(f"logs in {self._run_dir / 'logs'}; Ctrl-C drains, a second one kills")
        self._say("unit is ready", "green")

    def _say_restarting(self, event: Event) -> None:
        deaths = event.restarts or 0
        loop = f", crash loop: {deaths} fast deaths in a row" if deaths >= CRASH_LOOP else ""
        self._say(f"{event.service}: starts again in {event.delay_s:g} s{loop}", "yellow")

    def _say_gave_up(self, event: Event) -> None:
        self.close()
        if event.how == HOPELESS:
            self._say("gave up", "red")  # Why is the command's last line.
            return
        self._say(f"gave up: {event.detail}", "red")
        path = self._run_dir / "logs" / f"{event.service}.log"
        self._say(f"end of {path}:")
        for line in path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]:
            self._say(f"  {line}")

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _progress(self) -> str:
        marks = (f"[green]{n} ✓[/]" if ready else f"{n} …" for n, ready in self._ready.items())
        return "starting: " + "  ".join(marks)


async def follow_logs(paths: Iterable[Path], out: TextIO, poll_s: float = 0.2) -> None:
    """Copy what is appended to the files, each line after its file's name, until cancelled.

    Lines longer than 64 KiB are cut into pieces. What was written before the cancel is copied.
    """
    offsets = dict.fromkeys(paths, 0)
    try:
        while True:
            _copy_new_lines(offsets, out)
            await asyncio.sleep(poll_s)
    finally:
        _copy_new_lines(offsets, out)


def _copy_new_lines(offsets: dict[Path, int], out: TextIO) -> None:
    for path in offsets:
        if not path.exists():
            continue
        with path.open("rb") as log:
            log.seek(offsets[path])
            while line := log.readline(65536):
                if not line.endswith(b"\n") and len(line) < 65536:
                    break  # The rest is still being written.
                offsets[path] += len(line)
                text = line.decode(errors="replace").rstrip("\n")
                print(f"{path.stem:>8} | {text}", file=out, flush=True)
