"""More than a quarter of decode's pages without proof: decode drains, and resumes by itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from duplet_client import AsyncClient
from duplet_core.ids import Role
from tests.e2e.live_unit import stopped, until
from tests.e2e.streams import Ask, Stream, assert_same, read_all
from tests.faults.fault_cases import Scene

POOL_PAGES = 320
LONG = [Ask(seed, max_rows=500) for seed in range(400, 403)]
"""Streams that run while decode drains: 3 x 36 pages, about."""
STUCK = [Ask(seed, max_rows=120) for seed in range(410, 420)]
"""Requests whose transfers meet a stopped writer: 10 x 12 pages, about."""


def quarantine_settings() -> dict[str, str]:
    return {"DUPLET_DECODE_POOL_PAGES": str(POOL_PAGES)}


async def _drained_by_quarantine(scene: Scene, release: Callable[[int], None]) -> None:
    """Stop the writer under transfers; `release` (of its pid) brings the proofs."""
    unit, spec = scene.unit, scene.spec
    async with AsyncClient(unit.listen) as client:
        references = await read_all(client, spec, LONG)
        running = [Stream(ask) for ask in LONG]
        tasks = [asyncio.create_task(stream.read(client, spec)) for stream in running]
        for stream in running:
            await stream.wait_rows(1)
        writer = unit.pid(Role.KVPROXY)
        with stopped(writer):
            stuck = await read_all(client, spec, STUCK)
            ends = {stream.error.reason for stream in stuck if stream.error is not None}
            assert ends <= {"WRITER_LOST", "TRANSFER_DEADLINE", "OVERLOADED", "QUARANTINE"}, ends
            await _assert_says_so(scene)
            for task in tasks:
                await task
            for stream, reference in zip(running, references, strict=True):
                assert_same(stream, reference)
            release(writer)
            if release is kill:
                await unit.wait_told("exited", Role.KVPROXY, 1)
        # Nobody sends anything: it comes back by itself.
        await unit.wait_serving()
        await unit.wait_idle()
        await unit.wait_pages_free()
        again = await read_all(client, spec, scene.asks)
        for stream, reference in zip(again, scene.reference, strict=True):
            assert_same(stream, reference)
    await scene.observe()
    assert scene.mismatches == 0
    assert unit.complaints() == []


async def _assert_says_so(scene: Scene) -> None:
    """Health, metrics, GetUnit and refusals all name the quarantine."""
    unit = scene.unit

    async def refuses() -> bool:
        told = await unit.ask()
        return told is not None and told.credit is not None and told.credit.refusing == "QUARANTINE"

    await until(refuses, "GetUnit tells the quarantine")
    told = await unit.ask()
    assert told is not None
    assert told.pending_aborts > 0
    assert told.writers == 1, "stopped, not dead"
    assert told.pages["quarantined"] * 4 > POOL_PAGES
    held = await unit.gauge(Role.DECODE, "pages_quarantined")
    assert held * 4 > POOL_PAGES, held
    async with AsyncClient(unit.addresses[Role.DECODE]) as decode:
        assert await decode.health("quarantine") == "NOT_SERVING"
        assert await decode.health("ready") == "NOT_SERVING"
        assert await decode.health("live") == "SERVING"
    async with AsyncClient(unit.listen) as client:
        (refused,) = await read_all(client, scene.spec, scene.asks[:1])
    assert refused.error is not None
    assert refused.error.reason == "QUARANTINE"


def leave(pid: int) -> None:
    """The caller continues it."""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def released_by_the_writer(scene: Scene) -> None:
    await _drained_by_quarantine(scene, leave)


async def released_by_its_death(scene: Scene) -> None:
    await _drained_by_quarantine(scene, kill)


QUARANTINE_CASES: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "quarantine over 25 %, the writer continues": released_by_the_writer,
    "quarantine over 25 %, the writer dies": released_by_its_death,
}
