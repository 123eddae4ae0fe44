"""kvproxy with a mover whose copies overlap and end in any order, as those of several copy
engines would: `python -m tests.faults.unordered_kvproxy`.

The product's mover on a CPU runs one copy after the other, so that a copy of a transfer that
was given up is over before the next transfer's begins, whatever decode did with the pages.
Here every second copy takes eight times as long as its neighbours, which are those of
`slow_kvproxy`: what it writes comes late.

SIGUSR1: of the next three transfers that have a copy begin or end, that copy is told to have
ended UNKNOWN; one that begins writes all the same, later. SIGUSR2: of the next one.
"""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from duplet_core.effects import CopyResult, StartCopy
from duplet_core.ids import TransferId
from duplet_kvproxy.mover import Mover
from tests.faults import slow_kvproxy

OVERLAPPING = 16
SLOWER = 8
UNKNOWNS = 3
SAID = "a fault test says so"


class UnorderedMover(Mover):
    """Runs each copy in a thread of its own."""

    # Owned by the mover; its threads end with the process at the latest.
    _threads: ThreadPoolExecutor
    _running: set[Future[None]]

    def __init__(self, *arguments: Any) -> None:
        self._threads = ThreadPoolExecutor(OVERLAPPING)
        self._running = set()
        super().__init__(*arguments)

    def _start(self, copy: StartCopy) -> None:
        self._running = {work for work in self._running if not work.done()}
        self._running.add(self._threads.submit(self._start_here, copy))

    def _start_here(self, copy: StartCopy) -> None:
        if unknowns.takes(copy):
            self._tell(copy, CopyResult.UNKNOWN, SAID)
            self._copy(copy)
        else:
            super()._start(copy)

    def _try_start(self, copy: StartCopy) -> tuple[CopyResult | None, str]:
        result, detail = self._copy(copy)
        if result is CopyResult.OK and unknowns.takes(copy):
            return CopyResult.UNKNOWN, SAID
        return result, detail

    def _copy(self, copy: StartCopy) -> tuple[CopyResult | None, str]:
        slow_kvproxy.pace.times = SLOWER if copy.copy % 2 else 1
        return super()._try_start(copy)

    def _land_all(self) -> None:
        wait(self._running)
        super()._land_all()


class Unknowns:
    """Whose copies end UNKNOWN: one copy each of so many transfers."""

    def __init__(self) -> None:
        # Not a Lock: the signal may come while this very thread holds it.
        self._lock = threading.RLock()
        self._left = 0
        self._told: set[TransferId] = set()

    def ask(self, transfers: int) -> None:
        with self._lock:
            self._left += transfers

    def takes(self, copy: StartCopy) -> bool:
        with self._lock:
            if not self._left or copy.transfer in self._told:
                return False
            self._left -= 1
            self._told.add(copy.transfer)
            return True


unknowns = Unknowns()


def main() -> int:
    signal.signal(signal.SIGUSR1, lambda *_: unknowns.ask(UNKNOWNS))
    signal.signal(signal.SIGUSR2, lambda *_: unknowns.ask(1))
    return slow_kvproxy.main(UnorderedMover)


if __name__ == "__main__":
    sys.exit(main())
