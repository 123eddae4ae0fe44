"""Processes that are stopped, not dead: time proves nothing, and nothing late does harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import LiveUnit, live_unit, stopped, until
from tests.e2e.streams import Ask, Load, Stream, assert_prefix, assert_same, known_spec, read_all

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_COPIES = {Role.KVPROXY: "tests.faults.slow_kvproxy"}
ASKS = [Ask(seed, max_rows=40) for seed in range(100, 108)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit() -> AsyncIterator[LiveUnit]:
    settings = {
        "SLOW_COPY_S": "0.15",
        "DUPLET_DECODE_TRANSFER_DEADLINE_S": "1.5",
    }
    async with live_unit(settings, modules=SLOW_COPIES) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spec(unit: LiveUnit) -> ModelSpec:
    async with AsyncClient(unit.listen) as client:
        return await known_spec(client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(unit: LiveUnit, spec: ModelSpec) -> list[Stream]:
    """The rows of each ask when nothing happens; one after the other, as copies are slow."""
    async with AsyncClient(unit.listen) as client:
        streams = [(await read_all(client, spec, [ask]))[0] for ask in ASKS]
    assert all(stream.error is None for stream in streams)
    return streams


async def assert_unharmed(unit: LiveUnit, load: Load, reference: list[Stream]) -> None:
    """All rows right, all pages back, nothing mismatched."""
    assert unit.complaints() == []
    for done, expected in zip(load.done, reference, strict=True):
        for stream in done:
            assert_prefix(stream, expected)
    await unit.wait_serving()
    await unit.wait_idle()
    assert (await unit.wait_pages_free()).kv_mismatches == 0


def reasons(load: Load) -> set[str]:
    return {s.error.reason for done in load.done for s in done if s.error is not None}


async def test_kvproxy_stopped_past_the_deadline_and_continued(
    unit: LiveUnit, spec: ModelSpec, reference: list[Stream]
) -> None:
    """Clients hear at once; pages stay quarantined until the writer's word, not until some
    time; what it still copies when it wakes lands on nobody."""
    exits = len(unit.told("exited"))
    async with Load(unit.listen, spec, ASKS) as load:
        await load.wait_mixed()
        with stopped(unit.pid(Role.KVPROXY)):

            async def quarantined() -> float:
                return await unit.gauge(Role.DECODE, "pages_quarantined")

            assert await until(quarantined, "pages are quarantined") > 0
            await until(lost_writer(unit), "decode has lost its stream to the writer")
            await assert_told(unit)
            # Beyond the deadline, with no stream left: still nothing is free without proof.
            assert await quarantined() > 0
        await load.wait_new_successes()
        await load.stop()
    assert reasons(load) & {"WRITER_LOST", "TRANSFER_DEADLINE"}
    await assert_unharmed(unit, load, reference)
    # It may leave by itself, for ends that it withheld too long (its exit is a proof as well);
    # nobody else may.
    others = [e.service for e in unit.told("exited")[exits:] if e.service != Role.KVPROXY]
    assert not others


async def assert_told(unit: LiveUnit) -> None:
    """What waits for a proof is in the metrics and in what `duplet unit` shows."""
    assert await unit.gauge(Role.DECODE, "aborts_pending") > 0
    assert await unit.gauge(Role.DECODE, "writers") == 1, "stopped, not dead"

    async def shown() -> bool:
        told = await unit.ask()
        return told is not None and told.pages["quarantined"] > 0 and told.pending_aborts > 0

    await until(shown, "GetUnit tells what is quarantined")


def lost_writer(unit: LiveUnit) -> Callable[[], Awaitable[bool]]:
    async def lost() -> bool:
        async with AsyncClient(unit.addresses[Role.DECODE]) as client:
            return await client.health("peer.kvproxy") == "NOT_SERVING"

    return lost


async def test_prefill_engine_stopped_and_continued(
    unit: LiveUnit, spec: ModelSpec, reference: list[Stream]
) -> None:
    """Requests wait and lose nothing; one that is cancelled meanwhile gives its pages back."""
    exits = len(unit.told("exited"))
    async with Load(unit.listen, spec, ASKS) as load:
        await load.wait_mixed()
        with stopped(unit.engine_pid(Role.PREFILL)):
            await load.wait_each(lambda stream: stream.count == 0)
            async with AsyncClient(unit.listen) as client:
                stream = Stream(Ask(seed=200))
                task = asyncio.create_task(stream.read(client, spec))

                async def is_admitted() -> bool:
                    return stream.started is not None

                await until(is_admitted, "the request is admitted")
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        await load.wait_new_successes()
        await load.stop()
    for done, expected in zip(load.done, reference, strict=True):
        for stream in done:
            assert_same(stream, expected)
    await assert_unharmed(unit, load, reference)
    assert len(unit.told("exited")) == exits
