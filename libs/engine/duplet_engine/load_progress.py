"""What the engine tells of its start: a bar on a terminal, else log lines, for a load that takes
long; what a GPU's memory is used for; how a CPU holds the weights; and what steps take."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from duplet_core.engine import StepTime
from duplet_engine.checkpoint import Progress as Told
from duplet_runtime.logs import configure_logs, get_logger

LOG_PERCENT = 20
"""A log line each time so much more has been read."""


@contextmanager
def told_progress(role: str, model: str) -> Iterator[Told]:
    """Tell stderr how far the load of `model` is, while the context lasts."""
    if not sys.stderr.isatty():
        yield LoggedLoad(role, model)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console) as bar:
        task = bar.add_task(f"loading {model}", total=None)

        def move(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield move


class LoggedLoad:
    """Progress as log lines. Says nothing of models that are made and not read."""

    def __init__(self, role: str, model: str) -> None:
        _configure(role)
        self._log = get_logger("duplet.engine").bind(model=model)
        self._next_percent = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        percent = 100 * done_bytes // max(1, total_bytes)
        if percent < self._next_percent:
            return
        self._next_percent = percent - percent % LOG_PERCENT + LOG_PERCENT
        self._log.info(
            "loading model", percent=percent, done_bytes=done_bytes, total_bytes=total_bytes
        )


def tell_memory(role: str, model: str, statement: str) -> None:
    """Log what the pool has of a GPU's memory, once the engine knows."""
    _configure(role)
    get_logger("duplet.engine").info("memory", model=model, statement=statement)


def tell_products(role: str, model: str, statement: str) -> None:
    """Log in what precision a CPU reads the weights."""
    _configure(role)
    get_logger("duplet.engine").info("products", model=model, statement=statement)


def tell_steps(role: str, model: str, times: Sequence[StepTime]) -> None:
    """Log what decode's steps took at start."""
    _configure(role)
    statement = ", ".join(
        f"{t.streams} streams of {t.pages // t.streams} pages {t.taken_ns / 1e6:.2f} ms"
        for t in times
    )
    get_logger("duplet.engine").info("steps timed", model=model, statement=statement)


def _configure(role: str) -> None:
    configure_logs(f"{role}-engine", f"pid-{os.getpid()}", "auto", "info")
