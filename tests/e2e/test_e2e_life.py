"""Requests that end early, ids that meet, and what neighbours notice of it: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from duplet_client import AsyncClient, GenerateError
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import LiveUnit, live_unit, until
from tests.e2e.streams import Ask, Stream, assert_same, known_spec, read_all

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_ROWS = 1500
NEIGHBOURS = [Ask(seed) for seed in range(30, 33)]
SLOW_PROMPT = Ask(seed=60, text="y", max_rows=5, voice_rows=2000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit() -> AsyncIterator[LiveUnit]:
    # Copies are slow, so that an end can come before the first row.
    slow = {Role.KVPROXY: "tests.faults.slow_kvproxy"}
    async with live_unit({"SLOW_COPY_S": "0.05"}, modules=slow) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(unit: LiveUnit) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(unit.listen) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spec(client: AsyncClient) -> ModelSpec:
    return await known_spec(client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(client: AsyncClient, spec: ModelSpec) -> list[Stream]:
    """The neighbours' rows when nothing happens beside them."""
    return await read_all(client, spec, NEIGHBOURS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def long_ask(client: AsyncClient, spec: ModelSpec) -> Ask:
    """One whose stream draws no stop row for a long while."""
    seeds = range(70, 78)
    streams = await read_all(client, spec, [Ask(seed, max_rows=200) for seed in seeds])
    return Ask(max(streams, key=lambda stream: stream.count).ask.seed, max_rows=LONG_ROWS)


@pytest_asyncio.fixture(loop_scope="module")
async def neighbours(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec, reference: list[Stream]
) -> AsyncIterator[None]:
    """Streams beside the test's own: their rows must be right, and nothing may be left."""
    streams = [Stream(ask) for ask in NEIGHBOURS]
    tasks = [asyncio.create_task(stream.read(client, spec)) for stream in streams]
    yield
    for stream, expected in zip(await asyncio.gather(*tasks), reference, strict=True):
        assert_same(stream, expected)
    await unit.wait_idle()
    assert (await unit.wait_pages_free()).kv_mismatches == 0


async def outcomes(client: AsyncClient, reason: str) -> int:
    """How many requests ended with this reason so far."""
    return (await client.unit()).requests.get(reason, 0)


async def wait_outcome(client: AsyncClient, reason: str, count: int) -> None:
    async def reached() -> bool:
        return await outcomes(client, reason) >= count

    await until(reached, f"{count} requests ended with {reason}")


@pytest.mark.usefixtures("neighbours")
async def test_cancel_in_mid_stream(client: AsyncClient, spec: ModelSpec, long_ask: Ask) -> None:
    before = await outcomes(client, "CANCELLED")
    stream = Stream(long_ask)
    task = asyncio.create_task(stream.read(client, spec))
    await stream.wait_rows(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_outcome(client, "CANCELLED", before + 1)


@pytest.mark.usefixtures("neighbours")
async def test_cancel_before_the_first_row(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec
) -> None:
    before = await outcomes(client, "CANCELLED")
    stream = Stream(SLOW_PROMPT)
    task = asyncio.create_task(stream.read(client, spec))

    async def is_admitted() -> bool:
        return stream.started is not None

    await until(is_admitted, "the request is admitted")
    assert stream.count == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_outcome(client, "CANCELLED", before + 1)


@pytest.mark.usefixtures("neighbours")
async def test_the_clients_deadline(client: AsyncClient, spec: ModelSpec, long_ask: Ask) -> None:
    """Ends the request in the unit too, whichever of both ends notices first."""
    stream = await Stream(long_ask).read(client, spec, timeout_s=1.0)
    assert stream.error is not None
    assert stream.error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < stream.count < LONG_ROWS

    async def is_gone() -> bool:
        return (await client.unit()).live_streams <= len(NEIGHBOURS)

    await until(is_gone, "the request ended in the unit")


CLIENT_PROGRAM = """
import asyncio, sys
from duplet_client import AsyncClient, Rows, SamplingOptions, rows_from_text
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        spec = (await client.unit()).spec
        prompt = rows_from_text(spec, sys.argv[4], "ada")
        options = SamplingOptions(seed=int(sys.argv[2]))
        async for event in client.generate(prompt, sampling=options, max_rows=int(sys.argv[3])):
            if isinstance(event, Rows):
                print("rows", flush=True)
asyncio.run(main())
"""


@pytest.mark.usefixtures("neighbours")
async def test_a_client_that_is_killed(unit: LiveUnit, client: AsyncClient, long_ask: Ask) -> None:
    before = await outcomes(client, "CANCELLED")
    arguments = (unit.listen, str(long_ask.seed), str(LONG_ROWS), f"{long_ask.text} lost")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT_PROGRAM, *arguments), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"rows\n"
    process.kill()
    await process.wait()
    await wait_outcome(client, "CANCELLED", before + 1)


@pytest.mark.usefixtures("neighbours")
async def test_a_closed_channel(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec, long_ask: Ask
) -> None:
    before = await outcomes(client, "CANCELLED")
    other = AsyncClient(unit.listen)
    stream = Stream(long_ask)
    task = asyncio.create_task(stream.read(other, spec))
    await stream.wait_rows(3)
    await other.close()
    await task
    assert stream.error is not None
    assert stream.error.reason == "CANCELLED"
    await wait_outcome(client, "CANCELLED", before + 1)


@pytest.mark.usefixtures("neighbours")
async def test_an_id_is_taken_while_it_lives_and_free_afterwards(
    client: AsyncClient, spec: ModelSpec
) -> None:
    ask = NEIGHBOURS[0]
    first = Stream(ask)
    task = asyncio.create_task(first.read(client, spec, request_id="taken"))
    await first.wait_rows(1)
    second = await Stream(Ask(seed=2)).read(client, spec, request_id="taken")
    assert second.error is not None
    assert second.error.code is grpc.StatusCode.ALREADY_EXISTS
    assert second.error.reason == "DUPLICATE_REQUEST"
    assert "taken" in second.error.detail
    await task
    assert first.error is None, "the live one was disturbed"
    third = await Stream(ask).read(client, spec, request_id="taken")
    assert_same(third, first)


@pytest.mark.usefixtures("neighbours")
async def test_an_id_may_return_at_once_after_a_cancel(
    client: AsyncClient, spec: ModelSpec, long_ask: Ask, reference: list[Stream]
) -> None:
    before = await outcomes(client, "CANCELLED")
    for _ in range(3):
        stream = Stream(long_ask)
        task = asyncio.create_task(stream.read(client, spec, request_id="again"))
        await stream.wait_rows(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before += 1
        await wait_outcome(client, "CANCELLED", before)
    last = await Stream(NEIGHBOURS[1]).read(client, spec, request_id="again")
    assert_same(last, reference[1])


async def test_sigterm_lets_streams_finish_and_refuses_new_ones(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec, reference: list[Stream]
) -> None:
    """lb leaves with exit code 0 once its last stream has ended; its successor serves."""
    streams = [Stream(ask) for ask in NEIGHBOURS]
    tasks = [asyncio.create_task(stream.read(client, spec)) for stream in streams]
    for stream in streams:
        await stream.wait_rows(1)
    exits = len(unit.told("exited", Role.LB))
    os.kill(unit.pid(Role.LB), signal.SIGTERM)

    async def refuses() -> GenerateError | None:
        return (await Stream(Ask(seed=3, max_rows=1)).read(client, spec)).error

    error = await until(refuses, "a new request is refused")
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert error.retry_after_s is not None
    for stream, expected in zip(await asyncio.gather(*tasks), reference, strict=True):
        assert_same(stream, expected)
    assert (await unit.wait_told("exited", Role.LB, exits + 1)).how == "exit code 0"
    await unit.wait_serving()
    assert_same(await Stream(NEIGHBOURS[0]).read(client, spec), reference[0])
    await unit.wait_idle()


async def test_drain_by_request(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec, reference: list[Stream]
) -> None:
    """lb stays and refuses, until it is started again. Last here: it leaves the unit drained."""
    stream = Stream(NEIGHBOURS[0])
    task = asyncio.create_task(stream.read(client, spec))
    await stream.wait_rows(1)
    assert await client.drain() == 1
    refused = await Stream(Ask(seed=3)).read(client, spec)
    assert refused.error is not None
    assert (refused.error.code, refused.error.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
    )
    assert await client.health("ready") == "NOT_SERVING"
    assert await client.health("live") == "SERVING"
    assert_same(await task, reference[0])
    assert await client.drain() == 0
    os.kill(unit.pid(Role.LB), signal.SIGTERM)
    await unit.wait_serving()
    assert_same(await Stream(NEIGHBOURS[0]).read(client, spec), reference[0])
