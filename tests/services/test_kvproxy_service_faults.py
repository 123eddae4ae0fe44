"""A real kvproxy is killed, stopped and told to leave while KV moves between CPU pools."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from duplet_memory.layout import describe_pool
from duplet_memory.pool import Pool, create_pool
from tests.services import service_faults
from tests.services.kvproxy_peers import OwnedPool

PAGES, PAGE_ROWS = 64, 4
POISON = -1.0


class CpuPlace:
    """Two pools of this process, whose owners are two processes that wait. Owns all of them."""

    transports = "shm"
    rows = 6 * PAGE_ROWS

    def __init__(self) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.metrics: int = sock.getsockname()[1]
        self.pools: list[Pool] = []
        """The source's and the destination's."""
        self._owners: list[subprocess.Popen[bytes]] = []
        self._pidfds: list[int] = []
        self.owned: list[OwnedPool] = []
        for _ in range(2):
            described = describe_pool(
                layers=2,
                page_rows=PAGE_ROWS,
                kv_heads=1,
                head_dim=8,
                dtype="float32",
                pages=PAGES,
                arrangement="page-major",
            )
            self.pools.append(create_pool(described))
            self._owners.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
            self._pidfds.append(os.pidfd_open(self._owners[-1].pid))
            pidfds = {"engine": self._pidfds[-1]}
            self.owned.append(OwnedPool(described, self.pools[-1].fd, pidfds))
        for page in range(PAGES):
            self.pools[0].array[page] = page

    def poison(self) -> None:
        self.pools[1].array[:] = POISON

    def wrong_rows(self, source_pages: Sequence[int], dest_pages: Sequence[int], rows: int) -> int:
        assert rows == len(dest_pages) * PAGE_ROWS
        expected = np.full_like(self.pools[1].array, POISON)
        expected[list(dest_pages)] = self.pools[0].array[list(source_pages)]
        return int((expected != self.pools[1].array).any((1, 2, 4, 5)).sum())

    def kill_owner(self, index: int) -> None:
        self._owners[index].kill()

    def free_bytes(self) -> list[int]:
        return [0, 0]

    def close(self) -> None:
        for owner, pool, pidfd in zip(self._owners, self.pools, self._pidfds, strict=True):
            owner.kill()
            owner.communicate()
            pool.close()
            os.close(pidfd)


@pytest.fixture
def place() -> Iterator[CpuPlace]:
    made = CpuPlace()
    yield made
    made.close()


async def test_a_killed_kvproxy(place: CpuPlace, run_dir: Path) -> None:
    await service_faults.kill_during_moves(place, run_dir)


async def test_a_stopped_kvproxy(place: CpuPlace, run_dir: Path) -> None:
    await service_faults.stop_and_continue_during_moves(place, run_dir)


@pytest.mark.parametrize("index", [0, 1], ids=["source", "dest"])
async def test_a_dead_owner(place: CpuPlace, run_dir: Path, index: int) -> None:
    await service_faults.kill_owner_during_moves(place, run_dir, index)


async def test_bytes_are_counted(place: CpuPlace, run_dir: Path) -> None:
    await service_faults.count_bytes(place, run_dir, "shm")
