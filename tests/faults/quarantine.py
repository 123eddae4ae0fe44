"""More than a quarter of decode's pages without proof: decode drains, and resumes by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

from duplet_client import AsyncClient
from duplet_core.ids import Role
from tests.e2e.live_unit import stopped, until
from tests.e2e.streams import Ask, Stream, assert_same, read_all
from tests.faults.fault_cases import Ear, Outcome, Scene

POOL_PAGES = 320
LONG = [Ask(seed, max_rows=500) for seed in range(400, 403)]
"""Streams that run while decode drains: 3 x 36 pages, about."""
STUCK = [Ask(seed, max_rows=120) for seed in range(410, 420)]
"""Requests whose transfers meet a stopped writer: 10 x 12 pages, about."""


def quarantine_settings() -> dict[str, str]:
    return {"DUPLET_DECODE_POOL_PAGES": str(POOL_PAGES)}


async def _drained_by_quarantine(
    scene: Scene, name: str, release: Callable[[int], None]
) -> Outcome:
    """Stop the writer under transfers; `release` (of its pid) brings the proofs."""
    unit, spec = scene.unit, scene.spec
    began = time.monotonic()
    ear = Ear(scene)
    async with AsyncClient(unit.listen) as client:
        references = await read_all(client, spec, LONG)
        running, stuck = ([Stream(ask) for ask in asks] for asks in (LONG, STUCK))
        tasks = [_reading(stream, client, scene, name) for stream in running]
        for stream in running:
            await stream.wait_rows(1)
        writer = unit.pid(Role.KVPROXY)
        exits = len(unit.told("exited", Role.KVPROXY))
        with stopped(writer):
            await asyncio.gather(*(_reading(stream, client, scene, name) for stream in stuck))
            ends = {stream.error.reason for stream in stuck if stream.error is not None}
            assert ends <= {"WRITER_LOST", "TRANSFER_DEADLINE", "OVERLOADED", "QUARANTINE"}, ends
            refused = await _assert_says_so(scene, name)
            await asyncio.gather(*tasks)
            for stream, reference in zip(running, references, strict=True):
                assert_same(stream, reference)
            release(writer)
            if release is kill:
                await unit.wait_told("exited", Role.KVPROXY, exits + 1)
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
    return ear.outcome(name, time.monotonic() - began, [*running, *stuck, refused])


def _reading(stream: Stream, client: AsyncClient, scene: Scene, name: str) -> asyncio.Task[Stream]:
    """Read it to its end, under an id that the services' logs name."""
    request_id = f"{name.replace(' ', '-')}-{stream.ask.seed}"
    return asyncio.create_task(stream.read(client, scene.spec, request_id=request_id))


async def _assert_says_so(scene: Scene, name: str) -> Stream:
    """Health, metrics, GetUnit and refusals all name the quarantine; the refused one."""
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
        refused = await _reading(Stream(scene.asks[0]), client, scene, name)
    assert refused.error is not None
    assert refused.error.reason == "QUARANTINE"
    return refused


def leave(pid: int) -> None:
    """The caller continues it."""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def run_quarantine_case(scene: Scene, name: str) -> Outcome:
    """One of `QUARANTINE_CASES`, on a unit with `quarantine_settings`.

    Raises:
        AssertionError: something was not as it must be.
    """
    return await _drained_by_quarantine(scene, name, QUARANTINE_CASES[name])


QUARANTINE_CASES: dict[str, Callable[[int], None]] = {
    "quarantine over 25 %, the writer continues": leave,
    "quarantine over 25 %, the writer dies": kill,
}
