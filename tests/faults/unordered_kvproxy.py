"""kvproxy with a mover whose copies overlap and end in any order, as those of several copy
engines would: `python -m tests.faults.unordered_kvproxy`.

The product's mover on a CPU runs one copy after the other, so that a copy of a transfer that
was given up is over before the next transfer's begins, whatever decode did with the pages.
Here every second copy takes eight times as long as its neighbours: what it writes comes late.

SIGUSR1: the next three transfers' first copies are told to have ended UNKNOWN, and write all
the same, later.
"""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from unittest.mock import patch

from duplet_core.effects import CopyResult, StartCopy
from duplet_kvproxy import __main__ as kvproxy
from duplet_kvproxy.mover import Mover

OVERLAPPING = 16
SLOWER = 8
UNKNOWNS = 3


class UnorderedMover(Mover):
    """Runs each copy in a thread of its own."""

    # Owned by the mover; its threads end with the process at the latest.
    _threads: ThreadPoolExecutor
    _running: set[Future[None]]

    def __init__(self, *arguments: Any) -> None:
        self._threads = ThreadPoolExecutor(OVERLAPPING)
        self._running = set()
        super().__init__(*arguments)
        self._own = threading.local()

    def _start(self, copy: StartCopy) -> None:
        self._running = {work for work in self._running if not work.done()}
        self._running.add(self._threads.submit(self._start_here, copy))

    def _start_here(self, copy: StartCopy) -> None:
        if copy.start_row == 0 and unknowns.acquire(blocking=False):
            self._tell(copy, CopyResult.UNKNOWN, "a fault test says so")
            self._try_start(copy)
        else:
            super()._start(copy)

    def _try_start(self, copy: StartCopy) -> tuple[CopyResult | None, str]:
        self._own.slower = SLOWER if copy.copy % 2 else 1
        return super()._try_start(copy)

    @property
    def _delay_s(self) -> float:
        return self._told_delay_s * float(self._own.slower)

    @_delay_s.setter
    def _delay_s(self, value: float) -> None:
        self._told_delay_s = value

    def _land_all(self) -> None:
        wait(self._running)
        super()._land_all()


unknowns = threading.Semaphore(0)
"""Copies that are still to end UNKNOWN."""


def main() -> int:
    signal.signal(signal.SIGUSR1, lambda *_: unknowns.release(UNKNOWNS))
    with patch.object(kvproxy, "Mover", UnorderedMover):
        return kvproxy.main()


if __name__ == "__main__":
    sys.exit(main())
