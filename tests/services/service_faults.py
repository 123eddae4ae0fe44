"""What happens to a real kvproxy while KV moves, over any pair of pools: scenarios for CPU pools
(`test_kvproxy_service_faults`) and for GPU pools (`tests/gpu/test_gpu_service`)."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from duplet_core.ids import TransferId
from duplet_core.messages import Landed, SourceReleased
from tests.e2e.live_unit import until
from tests.services.kvproxy_peers import (
    LIMIT_S,
    KvproxyEnd,
    KvproxyProcess,
    OwnedPool,
    both_ends,
    move_all,
    running_kvproxy,
    told_path,
)

WINDOW = 8
"""Transfers under way at once, each between pages of its own."""
WARM = 40
"""Transfers that land before anything happens, and after."""
SLACK_BYTES = 64 << 20
"""What a driver may keep for itself; a pool or a process's context is many times that."""


class Place(Protocol):
    """Two pools and their owners."""

    owned: list[OwnedPool]
    """The source's and the destination's."""
    transports: str
    metrics: int
    """A free port."""
    rows: int
    """Of one transfer."""

    def poison(self) -> None:
        """Set every byte of the destination to what no source row has."""

    def wrong_rows(self, source_pages: Sequence[int], dest_pages: Sequence[int], rows: int) -> int:
        """Rows of `dest_pages` that are not the source's, and rows elsewhere that are no poison."""

    def kill_owner(self, index: int) -> None:
        """End an owner's process by force, and drop this process's descriptors of its pool."""

    def free_bytes(self) -> list[int]:
        """Memory that nobody has, where each pool lies."""


class Flow:
    """Transfers in a closed loop between the same page lists. Owns its task from `start`."""

    def __init__(self, place: Place, ends: tuple[KvproxyEnd, KvproxyEnd]) -> None:
        self._ends = ends
        self.rows = place.rows
        page_rows = place.owned[0].description.page_rows
        each = -(-self.rows // page_rows)
        chance = random.Random(3)
        self.lists: list[tuple[list[int], list[int]]] = []
        orders = [chance.sample(range(o.description.pages), WINDOW * each) for o in place.owned]
        for slot in range(WINDOW):
            part = slice(slot * each, (slot + 1) * each)
            self.lists.append((orders[0][part], orders[1][part]))
        self._number = 0
        self._slots: dict[TransferId, int] = {}
        self._landed = 0
        self._progress = asyncio.Condition()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        prefill, decode = self._ends
        self._tasks = [
            asyncio.create_task(self._run(decode, Landed)),
            asyncio.create_task(self._run(prefill, SourceReleased)),
        ]
        for slot in range(WINDOW):
            self._begin(slot)

    async def more(self, count: int) -> None:
        """Wait until so many more have landed."""
        async with asyncio.timeout(LIMIT_S), self._progress:
            wanted = self._landed + count
            await self._progress.wait_for(lambda: self._landed >= wanted)

    async def stop(self) -> None:
        """Begin no more; wait for what is under way."""
        self._stopping = True
        async with asyncio.timeout(LIMIT_S), self._progress:
            await self._progress.wait_for(lambda: not self._slots)
        await self.cut()

    async def cut(self) -> None:
        """End it as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    def _begin(self, slot: int) -> None:
        self._number += 1
        transfer = move_all(self._ends, self._number, *self.lists[slot], self.rows)
        self._slots[transfer] = slot

    async def _run(self, end: KvproxyEnd, kind: type[Landed] | type[SourceReleased]) -> None:
        """Read one end's messages; a slot is used again when both ends' have come. Over when a
        transfer failed: nobody counts on more of them then."""
        while True:
            message = await end.heard.get()
            if not isinstance(message, kind):
                continue
            if isinstance(message, SourceReleased) and not message.landed:
                return
            await self._count(message.transfer)

    async def _count(self, transfer: TransferId) -> None:
        # The first of the two leaves a mark, the second ends the transfer.
        slot = self._slots[transfer]
        if slot >= 0:
            self._slots[transfer] = ~slot
            return
        del self._slots[transfer]
        async with self._progress:
            self._landed += 1
            self._progress.notify_all()
        if not self._stopping:
            self._begin(~slot)


async def check_one(place: Place, flow: Flow, ends: tuple[KvproxyEnd, KvproxyEnd]) -> None:
    """A transfer by itself brings its rows and nothing else."""
    place.poison()
    source_pages, dest_pages = flow.lists[0]
    transfer = move_all(ends, 1_000_000, source_pages, dest_pages, place.rows)
    while (await ends[1].hear(Landed)).transfer != transfer:
        pass
    assert place.wrong_rows(source_pages, dest_pages, place.rows) == 0
    assert place.wrong_rows(dest_pages, source_pages, place.rows) > 0, "the check itself can fail"


async def wait_free(place: Place, wanted: list[int]) -> None:
    """Wait until memory has come back."""

    async def has_come() -> bool:
        free = place.free_bytes()
        return all(f >= w - SLACK_BYTES for f, w in zip(free, wanted, strict=True))

    await until(has_come, f"{wanted} bytes are free")


def run_state(kvproxy: KvproxyProcess) -> str:
    """One letter, as /proc says it: T is stopped."""
    return Path(f"/proc/{kvproxy.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@asynccontextmanager
async def served(
    place: Place, run_dir: Path
) -> AsyncIterator[tuple[KvproxyProcess, tuple[KvproxyEnd, KvproxyEnd]]]:
    """kvproxy, and prefill's and decode's ends of it."""
    async with (
        running_kvproxy(run_dir, place.transports, place.metrics) as kvproxy,
        both_ends(run_dir, *place.owned) as ends,
    ):
        yield kvproxy, ends


async def kill_during_moves(place: Place, run_dir: Path) -> None:
    """kvproxy dies: both ends hear it from the kernel, its memory comes back, nothing is written
    any more, and a second one serves the same pools."""
    free = place.free_bytes()
    async with served(place, run_dir) as (first, ends):
        flow = Flow(place, ends)
        flow.start()
        await flow.more(WARM)
        instances = {(await end.next_hello()).instance for end in ends}
        first.process.kill()
        async with asyncio.timeout(LIMIT_S):
            assert {await end.died.get() for end in ends} == instances
        await first.process.wait()
        await flow.cut()
        # From here on a single byte of the first one's would be one too many.
        place.poison()
        await wait_free(place, free)
        async with running_kvproxy(run_dir, place.transports, place.metrics):
            for end in ends:
                assert (await end.next_hello()).instance not in instances
                end.heard = asyncio.Queue()
            assert place.wrong_rows([], [], 0) == 0
            await check_one(place, flow, ends)


async def stop_and_continue_during_moves(place: Place, run_dir: Path) -> None:
    """kvproxy stands still for a while: nobody takes it for dead, and it goes on where it was.
    Told to leave, it leaves, and its memory comes back."""
    free = place.free_bytes()
    async with served(place, run_dir) as (kvproxy, ends):
        flow = Flow(place, ends)
        flow.start()
        await flow.more(WARM)
        # It starts before: a stop that outlasts a keepalive would end the streams.
        second = running_kvproxy(run_dir, place.transports, place.metrics)
        async with second as waiting:

            async def waits() -> bool:
                return "waiting for lock" in waiting.log

            async def stands() -> bool:
                return run_state(kvproxy) == "T"

            await until(waits, "a second one waits for the lock")
            kvproxy.process.send_signal(signal.SIGSTOP)
            await until(stands, "kvproxy is stopped")
            assert all(end.died.empty() for end in ends), "stopped is not dead"
            assert waiting.process.returncode is None
            kvproxy.process.send_signal(signal.SIGCONT)
        await flow.more(WARM)
        await flow.stop()
        await check_one(place, flow, ends)
        kvproxy.process.terminate()
        assert await asyncio.wait_for(kvproxy.process.wait(), LIMIT_S) == 0
        await wait_free(place, free)


async def kill_owner_during_moves(place: Place, run_dir: Path, index: int) -> None:
    """An engine dies: kvproxy closes its mapping once nothing touches it, and lives on."""
    size = place.owned[index].description.total_bytes
    async with served(place, run_dir) as (kvproxy, ends):
        flow = Flow(place, ends)
        flow.start()
        await flow.more(WARM)
        free = place.free_bytes()
        place.kill_owner(index)
        await flow.cut()

        async def is_unmapped() -> bool:
            return await kvproxy.metric("pools") == 1

        await until(is_unmapped, "the dead owner's pool is unmapped")
        free[index] += size if any(free) else 0
        await wait_free(place, free)
        assert kvproxy.process.returncode is None
        assert (await kvproxy.health("writer"))[0]
        assert '"event": "mapping closed"' in kvproxy.log


async def count_bytes(place: Place, run_dir: Path, transport: str) -> None:
    """Every byte that was moved is counted, under the transport that moved it."""
    async with served(place, run_dir) as (kvproxy, ends):
        assert (await told_path(ends[1])).startswith(f"{transport}: ")
        flow = Flow(place, ends)
        flow.start()
        await flow.more(WARM)
        await flow.stop()
        await check_one(place, flow, ends)
        copies = await kvproxy.metric("copies_total", transport=transport)
        assert copies > WARM
        described = place.owned[0].description
        moved = place.rows * described.slabs * described.row_bytes
        assert await kvproxy.metric("copied_bytes_total") == copies * moved
