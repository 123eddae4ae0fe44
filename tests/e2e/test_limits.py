"""A small unit and clients that want too much of it: more rows at once, more streams than there
are, and rows that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from duplet.speech.v1 import speech_pb2 as pb
from duplet.speech.v1.speech_pb2_grpc import SpeechStub
from duplet_client import AsyncClient, Rows, SamplingOptions, Started
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import LiveUnit, live_unit, until
from tests.e2e.raw_calls import failure_of
from tests.e2e.streams import Ask, Stream, assert_prefix, assert_same, known_spec, read_all

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOTS = 4
UNREAD_ROWS = 40
SETTINGS = {
    "DUPLET_DECODE_SLOTS": str(SLOTS),
    "DUPLET_DECODE_POOL_PAGES": "300",
    "DUPLET_LB_QUEUE_LIMIT": "2",
    "DUPLET_LB_UNREAD_ROWS": str(UNREAD_ROWS),
}
LONG_ROWS = 100
"""A stream of so many rows outlasts what a client may leave unread."""


@dataclass(frozen=True)
class Place:
    unit: LiveUnit
    client: AsyncClient
    spec: ModelSpec
    long: Stream
    """A stream of at least LONG_ROWS rows, as a client that reads gets it."""

    def request(self, ask: Ask) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            prompt=ask.prompt(self.spec).tobytes(),
            columns=self.spec.columns,
            max_rows=ask.max_rows,
            sampling=pb.Sampling(seed=ask.seed),
        )

    async def ended(self, outcome: str) -> int:
        """Requests that lb has ended so."""
        return (await self.client.unit()).requests.get(outcome, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[Place]:
    async with live_unit(SETTINGS) as unit, AsyncClient(unit.listen) as client:
        spec = await known_spec(client)
        tried = [await Stream(Ask(seed, max_rows=300)).read(client, spec) for seed in range(6)]
        long = max(tried, key=lambda stream: stream.count)
        assert long.error is None
        assert long.count >= LONG_ROWS, "no seed gives a long stream"
        yield Place(unit, client, spec, long)
        await unit.wait_idle()
        await unit.wait_pages_free()


# --- messages of the size that the client wants ----------------------------------------


@pytest.mark.parametrize(("first", "rest"), [(1, 1), (3, 16), (9, 4), (1, 1000), (70, 7), (500, 1)])
async def test_messages_have_exactly_the_rows_wished_for(
    place: Place, first: int, rest: int
) -> None:
    ask = Ask(place.long.ask.seed, max_rows=90)
    generation = place.client.generate(
        ask.prompt(place.spec),
        sampling=SamplingOptions(seed=ask.seed),
        max_rows=90,
        first_rows=first,
        rows_per_message=rest,
    )
    async with generation:
        parts = [event.rows async for event in generation if isinstance(event, Rows)]
    np.testing.assert_array_equal(np.concatenate(parts), place.long.rows[:90])
    sizes = [len(part) for part in parts]
    wished = [first, *[rest] * 90][: len(sizes)]
    assert sizes[:-1] == wished[:-1]
    assert sizes[-1] == 90 - sum(sizes[:-1]) <= wished[-1]


async def test_the_first_message_does_not_wait_for_the_rest(place: Place) -> None:
    generation = place.client.generate(
        place.long.ask.prompt(place.spec), max_rows=1000, first_rows=1, rows_per_message=1000
    )
    async with generation:
        assert isinstance(await anext(generation), Started)
        first = await anext(generation)
        assert isinstance(first, Rows)
        assert len(first.rows) == 1
        assert (await place.client.unit()).live_streams >= 1, "it came while the stream runs"


# --- clients that do not read ----------------------------------------


def lazy_channel(place: Place) -> grpc.aio.Channel:
    """A connection that lets in no more than its calls have asked for."""
    return grpc.aio.insecure_channel(
        place.unit.listen,
        options=[("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)],
    )


async def read_rows(call: Any, columns: int) -> NDArray[np.int32]:
    """The rows of all messages up to the call's end, however it ends."""
    data = b""
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            data += message.rows.rows
    except grpc.aio.AioRpcError:
        pass
    return np.frombuffer(data, "<i4").reshape(-1, columns)


async def test_who_does_not_read_loses_its_own_stream(place: Place) -> None:
    """Every slot but one is held by a client that reads nothing; the others get their rows."""
    before = await place.ended("SLOW_READER")
    lazy = SLOTS - 1
    async with lazy_channel(place) as channel:
        stub = SpeechStub(channel)
        calls = [stub.Generate(place.request(place.long.ask), timeout=60) for _ in range(lazy)]
        beside = asyncio.create_task(Stream(place.long.ask).read(place.client, place.spec))

        async def all_ended() -> bool:
            return await place.ended("SLOW_READER") >= before + lazy

        await until(all_ended, "lb ends the streams that nobody reads")
        await beside
        assert_same(beside.result(), place.long)
        await place.unit.wait_idle()
        # Who reads at last finds what was sent before, and then why there is no more.
        for call in calls:
            rows = await read_rows(call, place.spec.columns)
            np.testing.assert_array_equal(rows, place.long.rows[: len(rows)])
            failure = await failure_of(call)
            assert failure.code is grpc.StatusCode.ABORTED
            assert failure.reasons == ["SLOW_READER"]


async def test_who_reads_late_but_not_too_late_gets_everything(place: Place) -> None:
    """Fewer rows than may wait unread: the request ends in the unit before the client reads."""
    ask = Ask(place.long.ask.seed, max_rows=UNREAD_ROWS // 2)
    before = await place.ended("LENGTH")
    async with lazy_channel(place) as channel:
        call = SpeechStub(channel).Generate(place.request(ask), timeout=60)

        async def ended() -> bool:
            return await place.ended("LENGTH") > before

        await until(ended, "the request is over")
        rows = await read_rows(call, place.spec.columns)
        np.testing.assert_array_equal(rows, place.long.rows[: ask.max_rows])
        assert await call.code() is grpc.StatusCode.OK


# --- more than there is ----------------------------------------


async def test_more_streams_than_slots_are_refused_before_prefill(place: Place) -> None:
    asks = [Ask(seed, max_rows=80) for seed in range(700, 724)]
    before = await place.unit.gauge(Role.PREFILL, "prompt_rows_total")
    streams = await read_all(place.client, place.spec, asks)
    served = [stream for stream in streams if stream.error is None]
    refused = [stream for stream in streams if stream.error is not None]
    assert len(served) >= SLOTS
    assert len(refused) >= 1
    for stream in refused:
        assert stream.error is not None
        assert stream.error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stream.error.reason == "OVERLOADED"
        assert stream.error.retry_after_s is not None
        assert 0 < stream.error.retry_after_s < 60
        assert stream.started is None
        assert stream.count == 0
    spent = await place.unit.gauge(Role.PREFILL, "prompt_rows_total") - before
    assert spent == sum(len(stream.ask.prompt(place.spec)) for stream in served)
    for stream in served[:2]:
        assert_prefix(await Stream(stream.ask).read(place.client, place.spec), stream)


async def test_more_pages_than_there_are_are_refused_before_prefill(place: Place) -> None:
    """Two streams of the longest kind do not fit the pool together, though slots are free."""
    prompt = place.long.ask.prompt(place.spec)
    sampling = SamplingOptions(seed=place.long.ask.seed)  # one that runs on while we ask again
    async with place.client.generate(prompt, sampling=sampling, max_rows=2**32 - 1) as first:
        assert isinstance(await anext(first), Started)
        assert isinstance(await anext(first), Rows), "its prompt is computed"
        before = await place.unit.gauge(Role.PREFILL, "prompt_rows_total")
        second = Stream(Ask(1, max_rows=2**32 - 1))
        await second.read(place.client, place.spec)
        assert second.error is not None
        assert second.error.reason == "OVERLOADED"
        assert await place.unit.gauge(Role.PREFILL, "prompt_rows_total") == before
        small = await Stream(Ask(1, max_rows=5)).read(place.client, place.spec)
        assert small.error is None, "a small one still fits"
