"""GPUs without peer access: the choice falls to what is allowed and works, and everybody is told;
or kvproxy does not start. Never anything else in silence."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duplet_core.ids import Role
from duplet_kvproxy.choice import Choice, TransportRefused
from duplet_kvproxy.transport import TransportName
from duplet_memory.layout import describe_pool
from duplet_memory.pool import Pool, create_pool
from tests.services.kvproxy_peers import (
    OwnedPool,
    both_ends,
    move_all,
    peer_end,
    running_kvproxy,
    told_path,
    wait_landed,
)
from tests.services.no_peer_kvproxy import UUIDS, no_peer_access

MODULE = "tests.services.no_peer_kvproxy"
NO_PEER = "no peer access between these GPUs"
PAGES, PAGE_ROWS = 12, 4


class Place:
    """Two pools, on a GPU each. Owns them, and this process's pidfd."""

    def __init__(self) -> None:
        self._pidfd = os.pidfd_open(os.getpid())
        self.pools: list[Pool] = []
        self.owned: list[OwnedPool] = []
        for uuid in UUIDS:
            described = describe_pool(
                layers=2,
                page_rows=PAGE_ROWS,
                kv_heads=1,
                head_dim=8,
                dtype="float32",
                pages=PAGES,
                arrangement="page-major",
            )
            pool = create_pool(described)
            self.pools.append(pool)
            on_gpu = replace(described, handle="cumem-fd", device=uuid)
            self.owned.append(OwnedPool(on_gpu, pool.fd, {"io": self._pidfd}))

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        os.close(self._pidfd)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_what_needs_peer_access_is_refused_and_the_next_allowed_one_is_taken(place: Place) -> None:
    source, dest = (owned.description for owned in place.owned)
    with no_peer_access():
        choice = Choice(("pages", "push", "host"))
    found = {(t.transport, t.arrangement): (t.ok, t.detail) for t in choice.trials}
    assert found["host", "page-major"] == (True, "")
    for key in (("pages", "page-major"), ("push", "page-major"), ("push", "layer-major")):
        assert not found[key][0]
        assert NO_PEER in found[key][1], key
    path, ok = choice.path_for(source, dest)
    assert ok
    assert path.startswith(f"host: {UUIDS[0]} to {UUIDS[1]}, page-major, ")
    layers = replace(source, arrangement="layer-major"), replace(dest, arrangement="layer-major")
    path, ok = choice.path_for(*layers)
    assert not ok, "`host` moves whole pages alone"
    assert path == f"no allowed transport from {UUIDS[0]} to {UUIDS[1]}"


@pytest.mark.parametrize("allowed", [("pages",), ("pages", "push", "pull", "staged")])
def test_without_an_allowed_one_that_works_there_is_no_choice(
    allowed: tuple[TransportName, ...],
) -> None:
    with no_peer_access(), pytest.raises(TransportRefused, match=NO_PEER) as caught:
        Choice(allowed)
    for name in allowed:
        assert f"{name}: " in caught.value.detail
    assert "DUPLET_KVPROXY_TRANSPORTS" in caught.value.detail


async def test_the_service_does_not_start_with_nothing_that_works(run_dir: Path) -> None:
    async with running_kvproxy(run_dir, "pages,push", free_port(), MODULE) as kvproxy:
        assert await asyncio.wait_for(kvproxy.process.wait(), 60) == 2
        last = kvproxy.log.splitlines()[-1]
    assert "no allowed transport works here (pages, push)" in last
    assert NO_PEER in last


async def test_the_service_names_the_path_that_it_uses(place: Place, run_dir: Path) -> None:
    source, dest = place.owned
    for pool, value in zip(place.pools, (7.0, 0.0), strict=True):
        pool.array[:] = value
    async with running_kvproxy(run_dir, "pages,host", free_port(), MODULE) as kvproxy:
        async with both_ends(run_dir, source, dest) as ends:
            decode = ends[1]
            assert (await decode.next_hello()).transport == "allowed: pages, host"
            path = await told_path(decode)
            assert path.startswith(f"host: {UUIDS[0]} to {UUIDS[1]}, page-major, ")
            assert (await ends[0].next_hello()).transport == path
            assert await kvproxy.health("transport") == (True, path)
            logged = [json.loads(line) for line in kvproxy.log.splitlines() if line[0] == "{"]
            assert [line["path"] for line in logged if line["event"] == "transport"] == [path]
            (found,) = (line["found"] for line in logged if line["event"] == "transports")
            assert f"pages page-major {UUIDS[0][:12]}→{UUIDS[1][:12]} refused" in found
            await wait_landed(decode, move_all(ends, 1, (3, 5), (0, 9), 2 * PAGE_ROWS))
            moved = 2 * source.description.page_bytes
            assert await kvproxy.metric("copies_total", transport="host") == 1
            assert await kvproxy.metric("copies_total", transport="pages") == 0
            assert await kvproxy.metric("copied_bytes_total") == moved
        async with peer_end(Role.DECODE, run_dir, dest) as again:
            assert (await again.next_hello()).transport == path, "a new stream hears it at once"
    written = {
        int(page) for page in np.flatnonzero((place.pools[1].array == 7).any((1, 2, 3, 4, 5)))
    }
    assert written == {0, 9}
