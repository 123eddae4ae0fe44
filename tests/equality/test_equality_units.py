"""Monolith and unit give the same rows: alone, in company, in every chunking and layout.

The reference is the monolith, each prompt whole, many streams at once. Every other way to get
the same request must give exactly its rows and its end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from duplet_client import AsyncClient, FinishReason, Unit
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import LiveUnit, live_unit
from tests.equality.asks import Answer, Ask, assert_same, cancel_some, read, read_all
from tests.equality.live_monolith import live_monolith

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ASKS = [Ask(number) for number in range(208)]
SOME = ASKS[::4]
FEW = ASKS[3::13]
CANCELLED = [Ask(number) for number in range(1000, 1032)]
AT_ONCE = 12
PATIENT = {"DUPLET_LB_QUEUE_WAIT_MS": "60000", "DUPLET_LB_QUEUE_LIMIT": "64"}
"""These tests are about rows; nothing is refused because the machine is slow."""


def shuffled(asks: list[Ask], seed: int) -> list[Ask]:
    """Other company than last time."""
    return random.Random(seed).sample(asks, len(asks))


async def known_spec(client: AsyncClient) -> ModelSpec:
    spec = (await client.unit()).spec
    assert spec is not None
    return spec


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def monolith() -> AsyncIterator[AsyncClient]:
    """Whole prompts between decode steps."""
    settings = {**PATIENT, "DUPLET_MONOLITH_CHUNK_ROWS": "4096"}
    async with live_monolith(settings) as listen, AsyncClient(listen) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(monolith: AsyncClient) -> Mapping[int, Answer]:
    return await read_all(monolith, await known_spec(monolith), ASKS, AT_ONCE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit() -> AsyncIterator[LiveUnit]:
    """As it comes: page-major pools, chunks of 256 rows, prefix cache on."""
    async with live_unit(PATIENT) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(unit: LiveUnit) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(unit.listen) as made:
        yield made


async def assert_all_free(client: AsyncClient) -> Unit:
    """lb's last word on the pages: none is in use. Asked until it is so."""
    while True:
        unit = await client.unit()
        assert unit.credit is not None
        if unit.live_streams == 0 and unit.credit.free_pages == unit.credit.total_pages:
            return unit
        await asyncio.sleep(0.02)


async def test_the_requests_are_of_every_kind(reference: Mapping[int, Answer]) -> None:
    assert len(reference) == len(ASKS) >= 200
    reasons = [answer.reason for answer in reference.values()]
    assert reasons.count(FinishReason.STOP) >= 5
    assert reasons.count(FinishReason.LENGTH) >= 50
    assert any(answer.cached_rows for answer in reference.values())
    assert any(not answer.cached_rows for answer in reference.values())
    assert len({answer.rows for answer in reference.values()}) > 150


async def test_the_monolith_alone(monolith: AsyncClient, reference: Mapping[int, Answer]) -> None:
    """Nobody beside it, and all that can be shared is cached."""
    spec = await known_spec(monolith)
    answers = {ask.number: await read(monolith, spec, ask) for ask in FEW}
    assert_same(answers, reference)
    assert sum(answer.cached_rows > 0 for answer in answers.values()) > len(FEW) // 2
    await assert_all_free(monolith)


async def test_the_monolith_with_cancels_beside(
    monolith: AsyncClient, reference: Mapping[int, Answer]
) -> None:
    spec = await known_spec(monolith)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(read_all(monolith, spec, shuffled(SOME, 1), AT_ONCE))
        group.create_task(cancel_some(monolith, spec, CANCELLED))
    assert_same(reading.result(), reference)
    await assert_all_free(monolith)


async def test_a_monolith_is_shown_as_one_process(monolith: AsyncClient) -> None:
    services = {service.name: service for service in (await monolith.unit()).services}
    assert services["prefill"].instance == services["decode"].instance != ""
    assert services["lb"].instance != services["decode"].instance


async def test_another_monolith_in_small_chunks_and_layers(
    reference: Mapping[int, Answer],
) -> None:
    settings = {
        **PATIENT,
        "DUPLET_MONOLITH_CHUNK_ROWS": "32",
        "DUPLET_MONOLITH_ARRANGEMENT": "layer-major",
        "DUPLET_MONOLITH_PREFIX_CACHE": "false",
    }
    async with live_monolith(settings) as listen, AsyncClient(listen) as client:
        spec = await known_spec(client)
        answers = await read_all(client, spec, shuffled(SOME, 2), 8)
        await assert_all_free(client)
    assert_same(answers, reference)
    assert not any(answer.cached_rows for answer in answers.values())


async def test_the_unit_with_cancels_beside(
    client: AsyncClient, reference: Mapping[int, Answer]
) -> None:
    spec = await known_spec(client)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(read_all(client, spec, shuffled(ASKS, 3), AT_ONCE))
        group.create_task(cancel_some(client, spec, CANCELLED))
    assert_same(reading.result(), reference)
    cached = [answer.cached_rows > 0 for answer in reading.result().values()]
    assert any(cached)
    assert not all(cached)
    assert (await assert_all_free(client)).kv_mismatches == 0


async def test_the_unit_alone(client: AsyncClient, reference: Mapping[int, Answer]) -> None:
    spec = await known_spec(client)
    answers = {ask.number: await read(client, spec, ask) for ask in FEW}
    assert_same(answers, reference)
    assert sum(answer.cached_rows > 0 for answer in answers.values()) > len(FEW) // 2


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL, Role.KVPROXY])
async def test_the_unit_after_a_service_was_restarted(
    unit: LiveUnit, client: AsyncClient, reference: Mapping[int, Answer], role: Role
) -> None:
    spec = await known_spec(client)
    began = len(unit.told("started", role))
    unit.kill(unit.pid(role))
    await unit.wait_told("started", role, began + 1)
    await unit.wait_serving()
    answers = await read_all(client, spec, shuffled(FEW, 4), 8)
    assert_same(answers, reference)
    assert (await assert_all_free(client)).kv_mismatches == 0


@pytest.mark.parametrize(
    ("prefill", "decode", "chunk_rows"),
    [("layer-major", "layer-major", 32), ("page-major", "layer-major", 100)],
)
async def test_units_of_other_layouts_and_chunks(
    reference: Mapping[int, Answer], prefill: str, decode: str, chunk_rows: int
) -> None:
    settings = {
        **PATIENT,
        "DUPLET_PREFILL_ARRANGEMENT": prefill,
        "DUPLET_DECODE_ARRANGEMENT": decode,
        "DUPLET_PREFILL_CHUNK_ROWS": str(chunk_rows),
        "DUPLET_PREFILL_PREFIX_CACHE": str(chunk_rows == 100).lower(),
    }
    async with live_unit(settings) as started, AsyncClient(started.listen) as client:
        spec = await known_spec(client)
        answers = await read_all(client, spec, shuffled(SOME, chunk_rows), AT_ONCE)
        assert (await assert_all_free(client)).kv_mismatches == 0
    assert_same(answers, reference)
    assert any(answer.cached_rows for answer in answers.values()) is (chunk_rows == 100)
