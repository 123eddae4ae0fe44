"""The real kvproxy between two owners of GPU pools: killed, stopped, told to leave and bereaved
while KV moves; memory comes back, and every byte is counted.

A kvproxy tries what it is allowed before it serves, which takes longer than most of what follows:
each test allows only what it needs.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path

import pytest

from bench.kv_move_unit import OwnerProcess
from duplet_memory.cuda_driver import open_devices
from duplet_unit.unit import owned_run_dir
from tests.services import service_faults
from tests.services.kvproxy_peers import OwnedPool, log_path

PAGES = 1024
PAGE_ROWS = 16
SCENARIO_S = 40
LOG_LINES = 15
MORTAL = {"source": 0, "dest": 1}
"""Owners that are killed."""

pytestmark = pytest.mark.timeout(58)


def start_owners() -> list[OwnerProcess]:
    """The source's and the destination's, on their way up."""
    devices = open_devices()
    layout = {"arrangement": "page-major", "page_rows": PAGE_ROWS, "pages": PAGES}
    ends = (devices[0], devices[-1])
    return [OwnerProcess(device.uuid, "cumem-fd", **layout) for device in ends]


async def within(run_dir: Path, scenario: Awaitable[None]) -> None:
    """Run a scenario; where it takes too long, the error's cause shows what it waited for, and
    the error how kvproxy's log ends."""
    try:
        async with asyncio.timeout(SCENARIO_S):
            await scenario
    except TimeoutError as error:
        log = log_path(run_dir)
        lines = log.read_text().splitlines()[-LOG_LINES:] if log.exists() else ["no log"]
        ended = "\n".join(lines)
        raise AssertionError(f"not within {SCENARIO_S} s; kvproxy said last:\n{ended}") from error


class GpuPlace:
    """Two owners, each on a GPU of its own. Owns them."""

    transports = "pages"
    rows = 64 * PAGE_ROWS

    def __init__(self, owners: list[OwnerProcess]) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.metrics: int = sock.getsockname()[1]
        devices = open_devices()
        self._devices = (devices[0], devices[-1])
        self._owners = owners
        for owner in self._owners:
            owner.wait_ready()
        self._owners[0].ask(do="fill")
        self.owned = [
            OwnedPool(owner.description, owner.pool_fd, {"engine": owner.pidfd})
            for owner in self._owners
        ]
        # Once, so that what torch keeps for a check is not missed later.
        self.poison()
        each = range(self.rows // PAGE_ROWS)
        assert self.wrong_rows(each, each, self.rows) == self.rows

    def poison(self) -> None:
        self._owners[1].ask(do="fill", poison=True)

    def wrong_rows(self, source_pages: Sequence[int], dest_pages: Sequence[int], rows: int) -> int:
        # An owner's check wants a page; with no rows to find there, it wants poison in it too.
        pages = {"pages": list(dest_pages) or [0], "source_pages": list(source_pages) or [0]}
        return int(self._owners[1].ask(do="check", **pages, first=0, count=rows))

    def kill_owner(self, index: int) -> None:
        owner = self._owners[index]
        owner.process.kill()
        owner.process.wait()
        # Ours would keep the memory of a dead owner too.
        os.close(owner.pool_fd)
        owner.pool_fd = -1

    def free_bytes(self) -> list[int]:
        return [device.free_bytes() for device in self._devices]

    def close(self) -> None:
        for owner in self._owners:
            owner.close()


@pytest.fixture(scope="module")
def places() -> Iterator[list[GpuPlace]]:
    """One for the tests that leave it whole and one for each that kills an owner: all owners
    start together, for that takes longer than a test."""
    starting = [start_owners() for _ in range(1 + len(MORTAL))]
    made = [GpuPlace(owners) for owners in starting]
    yield made
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def shared_place(places: list[GpuPlace]) -> GpuPlace:
    return places[0]


@pytest.fixture
def place(shared_place: GpuPlace) -> GpuPlace:
    shared_place.transports = GpuPlace.transports
    return shared_place


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with owned_run_dir(None) as folder:
        yield folder


async def test_a_killed_kvproxy(place: GpuPlace, run_dir: Path) -> None:
    await within(run_dir, service_faults.kill_during_moves(place, run_dir))


async def test_a_stopped_kvproxy(place: GpuPlace, run_dir: Path) -> None:
    await within(run_dir, service_faults.stop_and_continue_during_moves(place, run_dir))


@pytest.mark.parametrize("index", MORTAL.values(), ids=MORTAL)
async def test_a_dead_owner(places: list[GpuPlace], run_dir: Path, index: int) -> None:
    place = places[1 + index]
    await within(run_dir, service_faults.kill_owner_during_moves(place, run_dir, index))


@pytest.mark.parametrize("transport", ["pages", "push", "pull", "staged", "host"])
async def test_bytes_are_counted(place: GpuPlace, run_dir: Path, transport: str) -> None:
    place.transports = transport
    await within(run_dir, service_faults.count_bytes(place, run_dir, transport))


async def test_a_killed_kvproxy_that_moved_through_host_memory(
    place: GpuPlace, run_dir: Path
) -> None:
    place.transports = "host"
    await within(run_dir, service_faults.kill_during_moves(place, run_dir))
