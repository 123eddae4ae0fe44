"""kvproxy's mover in a process of its own, for tests that stop and kill processes.

`mover_child.py SOURCE DEST SOURCE_FD DEST_FD`: SOURCE and DEST are descriptions as JSON. Moves
for ever, several copies in flight, and prints a JSON line a hundred copies. A line on stdin ends
it: both pools are unmapped, and the last line tells each GPU's free bytes before and after.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from duplet_core.effects import CopyDone, CopyResult, StartCopy
from duplet_core.ids import InstanceId, TransferId
from duplet_kvproxy.choice import Choice
from duplet_kvproxy.mover import Mover
from duplet_memory.cuda_driver import open_devices
from duplet_memory.cuda_pool import map_cuda_pool
from duplet_memory.layout import PoolDescription

ROWS = 1500
IN_FLIGHT = 4
NAMES = (InstanceId("source"), InstanceId("dest"))


class Moving:
    """Keeps `IN_FLIGHT` copies going. Owns the mover."""

    def __init__(self, descriptions: list[PoolDescription], fds: list[int]) -> None:
        self.mover = Mover(self.take, Choice(("pages",)), self.break_off)
        for name, description, fd in zip(NAMES, descriptions, fds, strict=True):
            self.mover.add_pool(name, map_cuda_pool(fd, description, open_devices()))
            # It would keep the memory of a dead owner, as kvproxy's would.
            os.close(fd)
        page_rows = descriptions[0].page_rows
        self._pages = tuple(range(-(-ROWS // page_rows)))
        self._number = 0
        self._ok = 0
        self.stopping = asyncio.Event()

    def start(self) -> None:
        """Queue one more copy."""
        self._number += 1
        transfer = TransferId(f"{self._number:032x}")
        pages = self._pages
        copy = StartCopy(self._number, transfer, NAMES[0], pages, NAMES[1], pages, 0, ROWS)
        self.mover.start_copy(copy)

    def take(self, done: CopyDone) -> None:
        if done.result is not CopyResult.OK:
            self.break_off(done.detail)
        self._ok += 1
        if self._ok % 100 == 0:
            print(json.dumps({"ok": self._ok}), flush=True)
        if not self.stopping.is_set():
            self.start()

    def break_off(self, detail: str) -> None:
        print(json.dumps({"failed": detail}), flush=True)
        raise SystemExit(1)


async def main() -> None:
    descriptions = [PoolDescription.from_json(text) for text in sys.argv[1:3]]
    moving = Moving(descriptions, [int(text) for text in sys.argv[3:5]])
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), moving.stopping.set)
    for _ in range(IN_FLIGHT):
        moving.start()
    await moving.stopping.wait()
    before = [device.free_bytes() for device in open_devices()]
    moving.mover.close()
    after = [device.free_bytes() for device in open_devices()]
    print(json.dumps({"before": before, "after": after}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
