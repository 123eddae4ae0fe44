"""One unit that nobody disturbs: what a client gets from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]
    reflection_pb2,
    reflection_pb2_grpc,
)

from duplet_client import AsyncClient, FinishReason, GenerateError, SamplingOptions, Timeline
from duplet_core.ids import Role
from duplet_core.timeline import POINTS, SEGMENTS
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import LiveUnit, live_unit
from tests.e2e.streams import Ask, Stream, assert_same, known_spec, read_all

LONG = 250
"""Rows within which some of a few streams draw the stop row."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit() -> AsyncIterator[LiveUnit]:
    async with live_unit() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(unit: LiveUnit) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(unit.listen) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spec(client: AsyncClient) -> ModelSpec:
    return await known_spec(client)


def assert_rows_fit(stream: Stream, spec: ModelSpec) -> None:
    """Every row is one that the model may produce: ranges, and codes that agree with the id."""
    rows = stream.rows
    assert rows.dtype == np.int32
    assert rows.shape == (stream.count, spec.columns)
    ids, codes = rows[:, 0], rows[:, 1:]
    assert ((ids >= spec.semantic_first) & (ids <= spec.semantic_last)).all()
    assert (codes >= 0).all()
    assert (codes < np.array(spec.codebook_sizes)).all()
    np.testing.assert_array_equal(codes[:, 0], ids - spec.semantic_first)


def assert_whole(timeline: Timeline) -> None:
    """Every point is there, in order of time, and the segments are the client's whole time."""
    assert timeline.shares_clock
    assert tuple(name for name, _ in timeline.points) == POINTS
    segments = timeline.segments()
    assert tuple(segment.name for segment in segments) == SEGMENTS
    assert all(segment.duration_ns >= 0 for segment in segments)
    assert sum(segment.duration_ns for segment in segments) == timeline.total_ns


async def test_one_request(client: AsyncClient, spec: ModelSpec) -> None:
    ask = Ask(seed=1)
    stream = await Stream(ask).read(client, spec, request_id="first")
    assert stream.error is None
    assert stream.started is not None
    assert stream.finished is not None
    assert (stream.started.request_id, stream.started.seed) == ("first", 1)
    assert_rows_fit(stream, spec)
    assert 1 <= stream.count <= ask.max_rows
    usage = stream.finished.usage
    assert usage.prompt_rows == len(ask.prompt(spec))
    assert usage.output_rows == stream.count
    assert usage.kv_checks >= 1
    assert_whole(stream.finished.timeline)


async def test_lb_mints_what_the_client_leaves_out(client: AsyncClient, spec: ModelSpec) -> None:
    prompt = Ask(seed=1).prompt(spec)
    names = set()
    for _ in range(2):
        async with client.generate(prompt, max_rows=1) as generation:
            events = [event async for event in generation]
        names.add((events[0].request_id, events[0].seed))  # type: ignore[union-attr]
    assert len(names) == 2


async def test_a_seed_gives_the_same_rows_alone_and_in_company(
    client: AsyncClient, spec: ModelSpec
) -> None:
    alone = await Stream(Ask(seed=5)).read(client, spec)
    again = await Stream(Ask(seed=5)).read(client, spec)
    assert_same(again, alone)
    company = await read_all(client, spec, [Ask(seed) for seed in range(5, 13)])
    assert_same(company[0], alone)
    distinct = {stream.rows.tobytes() for stream in company}
    assert len(distinct) == len(company), "different seeds gave the same rows"


async def test_stop_row_and_limit(client: AsyncClient, spec: ModelSpec) -> None:
    """Some streams draw their stop row; cut by max_rows they begin with the same rows."""
    long = await read_all(client, spec, [Ask(seed, max_rows=LONG) for seed in range(20, 28)])
    stopped = [s for s in long if s.finished and s.finished.reason is FinishReason.STOP]
    assert stopped, "no stream drew the stop row"
    whole = stopped[0]
    assert_rows_fit(whole, spec)  # The stop row itself is not among the rows.
    assert whole.finished is not None
    assert whole.finished.usage.output_rows == whole.count < LONG
    for limit in (1, 2, whole.count):
        cut = await Stream(Ask(whole.ask.seed, max_rows=limit)).read(client, spec)
        assert cut.finished is not None, str(cut.error)
        assert cut.finished.reason is FinishReason.LENGTH
        assert cut.count == cut.finished.usage.output_rows == limit
        np.testing.assert_array_equal(cut.rows, whole.rows[:limit])
        assert_whole(cut.finished.timeline)


async def test_rows_travel_as_the_client_wishes(client: AsyncClient, spec: ModelSpec) -> None:
    ask = Ask(seed=5, max_rows=40)
    plain = await Stream(ask).read(client, spec)
    sizes, rows = [], []
    generation = client.generate(
        ask.prompt(spec),
        sampling=SamplingOptions(seed=5),
        max_rows=40,
        first_rows=3,
        rows_per_message=16,
    )
    async with generation:
        async for event in generation:
            if hasattr(event, "rows"):
                sizes.append(len(event.rows))
                rows.append(event.rows)
    np.testing.assert_array_equal(np.concatenate(rows), plain.rows)
    assert sizes[0] >= 3
    assert all(size >= 16 for size in sizes[1:-1])


async def test_a_prompt_of_2000_rows(client: AsyncClient, spec: ModelSpec) -> None:
    ask = Ask(seed=9, text="x", max_rows=20, voice_rows=2000)
    stream = await Stream(ask).read(client, spec)
    assert stream.finished is not None, str(stream.error)
    assert stream.finished.usage.prompt_rows > 2000
    assert_rows_fit(stream, spec)
    assert_whole(stream.finished.timeline)


async def test_sixteen_at_once_over_four_voices(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec
) -> None:
    asks = [Ask(seed, max_rows=60) for seed in range(40, 56)]
    assert len({ask.voice for ask in asks}) == 4
    streams = await read_all(client, spec, asks)
    for stream in streams:
        assert stream.finished is not None, str(stream.error)
        assert_rows_fit(stream, spec)
        assert_whole(stream.finished.timeline)
    again = await Stream(asks[7]).read(client, spec)
    assert_same(again, streams[7])
    await unit.wait_idle()
    told = await unit.wait_pages_free()
    assert told.kv_mismatches == 0
    # Once when the KV landed and once at the stream's end.
    assert told.kv_checks >= 2 * len(asks)


# --- prompts that are at fault -----------------------------------------------------


async def refused(client: AsyncClient, prompt: object, **options: object) -> GenerateError:
    """The error of a request that the unit must refuse."""
    async with client.generate(prompt, **options) as generation:  # type: ignore[arg-type]
        with pytest.raises(GenerateError) as caught:
            await anext(generation)
    return caught.value


async def test_bad_prompts_are_named_and_disturb_nobody(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec
) -> None:
    reference = await read_all(client, spec, [Ask(seed) for seed in range(3)])
    beside = [asyncio.create_task(Stream(Ask(seed)).read(client, spec)) for seed in range(3)]
    good = Ask(seed=1).prompt(spec)
    last = len(good) - 1

    def changed(row: int, column: int, value: int) -> np.ndarray:
        rows = good.copy()
        rows[row, column] = value
        return rows

    semantic = 3  # A row of the voice.
    cases = [
        (changed(last, 0, spec.vocab), f"row {last}, column 0: value {spec.vocab}"),
        (changed(2, 0, -1), "row 2, column 0: value -1"),
        (changed(semantic, 4, 64), f"row {semantic}, column 4: value 64"),
        (changed(last, 2, 1), f"row {last}, column 2: value 1"),
        (
            changed(semantic, 1, int(good[semantic, 1]) ^ 1),
            f"row {semantic}, column 1: value {int(good[semantic, 1]) ^ 1}",
        ),
        (good[:, :-1].copy(), f"columns: {spec.columns - 1}"),
        (np.zeros((0, spec.columns), np.int32), "prompt: empty"),
    ]
    for prompt, where in cases:
        error = await refused(client, prompt)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.reason == "INVALID_PROMPT"
        assert where in error.detail
    error = await refused(client, b"12345", columns=spec.columns)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PROMPT")
    assert "5 bytes" in error.detail
    for stream, expected in zip(await asyncio.gather(*beside), reference, strict=True):
        assert_same(stream, expected)
    await unit.wait_idle()


async def test_prompts_that_are_too_long(client: AsyncClient, spec: ModelSpec) -> None:
    rows = np.zeros((spec.longest_sequence, spec.columns), np.int32)
    error = await refused(client, rows)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert str(spec.longest_sequence) in error.detail


@pytest.mark.parametrize(
    ("sampling", "where"),
    [
        (SamplingOptions(temperature=float("nan")), "sampling.temperature: nan"),
        (SamplingOptions(temperature=5.1), "sampling.temperature: 5.1"),
        (SamplingOptions(top_p=float("inf")), "sampling.top_p: inf"),
        (SamplingOptions(top_p=0.0), "sampling.top_p: 0.0"),
        (SamplingOptions(top_k=0), "sampling.top_k: 0"),
        (SamplingOptions(repetition_window=129), "sampling.repetition_window: 129"),
        (SamplingOptions(seed=2**63), f"sampling.seed: {2**63}"),
    ],
)
async def test_bad_sampling(
    client: AsyncClient, spec: ModelSpec, sampling: SamplingOptions, where: str
) -> None:
    error = await refused(client, Ask(seed=1).prompt(spec), sampling=sampling)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_SAMPLING")
    assert where in error.detail


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_rows": 0}, "max_rows: 0"),
        ({"first_rows": 0}, "first_rows: 0"),
        ({"rows_per_message": 0}, "rows_per_message: 0"),
        ({"request_id": "x" * 129}, "request_id: 129"),
    ],
)
async def test_bad_wishes(
    client: AsyncClient, spec: ModelSpec, options: dict[str, object], field: str
) -> None:
    error = await refused(client, Ask(seed=1).prompt(spec), **options)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert field in error.detail


# --- health and reflection -----------------------------------------------------------

HEALTH_NAMES = {
    Role.LB: ("", "live", "ready", "peer.prefill", "peer.decode"),
    Role.PREFILL: ("", "live", "ready", "peer.kvproxy", "engine"),
    Role.DECODE: ("", "live", "ready", "peer.kvproxy", "engine", "quarantine"),
    Role.KVPROXY: ("", "live", "ready", "writer"),
}


@pytest.mark.parametrize("role", HEALTH_NAMES)
async def test_health_names(unit: LiveUnit, role: Role) -> None:
    async with AsyncClient(unit.addresses[role]) as asking:
        for name in HEALTH_NAMES[role]:
            assert await asking.health(name) == "SERVING", name
        assert await asking.health("no.such.name") == "SERVICE_UNKNOWN"


METRICS = {
    Role.DECODE: (
        *("pages_free", "pages_granted", "pages_live", "pages_quarantined"),
        *("aborts_pending", "aborts_resent_total", "kv_checks", "writers"),
    ),
    Role.PREFILL: ("pages_free", "writers"),
    Role.KVPROXY: ("ends_withheld", "transfers"),
}


@pytest.mark.parametrize("role", METRICS)
async def test_what_an_operator_watches_is_measured(unit: LiveUnit, role: Role) -> None:
    for name in METRICS[role]:
        assert await unit.gauge(role, name) >= 0, name


REFLECTED = {
    Role.LB: "duplet.speech.v1.Speech",
    Role.PREFILL: "duplet.prefill.v1.PrefillPeer",
    Role.DECODE: "duplet.decode.v1.DecodePeer",
    Role.KVPROXY: "duplet.kvproxy.v1.KvProxy",
}


@pytest.mark.parametrize("role", REFLECTED)
async def test_reflection_lists_the_services(unit: LiveUnit, role: Role) -> None:
    options = [("grpc.default_authority", "localhost")]
    async with grpc.aio.insecure_channel(unit.addresses[role], options=options) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=10)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        names = {service.name for service in answer.list_services_response.service}
        call.cancel()
    assert names >= {REFLECTED[role], "grpc.health.v1.Health"}
