"""What a client may send that is wrong: the right code, one reason, what is at fault; and the
streams that run meanwhile get their rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duplet.speech.v1 import speech_pb2 as pb
from duplet.speech.v1.speech_pb2_grpc import SpeechStub
from duplet_client import AsyncClient, Finished, Rows, SamplingOptions, Started
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import LiveUnit, live_unit
from tests.e2e.raw_calls import LIMIT_S, Failure, failure_of, failure_of_bytes
from tests.e2e.streams import Ask, Load, Stream, assert_same, known_spec, read_all

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL_PAGES, DECODE_PAGES = 120, 600
"""A prompt of 2,000 rows fits the model and decode, but not prefill."""

INVALID = grpc.StatusCode.INVALID_ARGUMENT
ASKS = [Ask(seed, max_rows=60) for seed in (1, 2, 3)]


@dataclass(frozen=True)
class Place:
    """A unit with streams that run, whose rows are known."""

    unit: LiveUnit
    spec: ModelSpec
    client: AsyncClient
    channel: grpc.aio.Channel
    load: Load
    good: pb.GenerateRequest
    """A request that would be served."""

    def changed(self, change: Callable[[pb.GenerateRequest], object]) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(self.good)
        change(request)
        return request

    async def send(self, request: pb.GenerateRequest) -> Failure:
        return await failure_of(SpeechStub(self.channel).Generate(request, timeout=LIMIT_S))


@asynccontextmanager
async def undisturbed(address: str, client: AsyncClient, spec: ModelSpec) -> AsyncIterator[Load]:
    """Streams that run all the while; in the end each of them had the rows that it should."""
    alone = await read_all(client, spec, ASKS)
    async with Load(address, spec, ASKS) as load:
        yield load
    for reference, done in zip(alone, load.done, strict=True):
        assert done
        for stream in done:
            assert_same(stream, reference)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[Place]:
    pools = {
        "DUPLET_PREFILL_POOL_PAGES": str(PREFILL_PAGES),
        "DUPLET_DECODE_POOL_PAGES": str(DECODE_PAGES),
    }
    async with (
        live_unit(pools) as unit,
        AsyncClient(unit.listen) as client,
        grpc.aio.insecure_channel(unit.listen) as channel,
    ):
        spec = await known_spec(client)
        prompt = Ask(seed=1).prompt(spec)
        good = pb.GenerateRequest(prompt=prompt.tobytes(), columns=spec.columns, max_rows=2)
        async with undisturbed(unit.listen, client, spec) as load:
            yield Place(unit, spec, client, channel, load, good)
        await unit.wait_idle()
        await unit.wait_pages_free()


def assert_refused(failure: Failure, reason: str, field: str, detail: str) -> None:
    assert failure.code is INVALID, failure
    assert failure.reasons == [reason]
    assert failure.violations == [field]
    assert failure.detail.startswith(f"{field}: ")
    assert detail in failure.detail
    assert failure.retry_s is None, "trying again does not help"


async def test_the_good_request_is_served(place: Place) -> None:
    assert (await place.send(place.good)).code is grpc.StatusCode.OK


# --- prompts ---------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
async def test_wrong_values_are_named(place: Place, data: st.DataObject) -> None:
    """One value of a prompt that was right becomes wrong."""
    spec = place.spec
    rows = np.frombuffer(place.good.prompt, "<i4").reshape(-1, spec.columns).copy()
    row = data.draw(st.integers(0, len(rows) - 1), "row")
    column = data.draw(st.integers(0, spec.columns - 1), "column")
    limit = spec.vocab if column == 0 else spec.codebook_sizes[column - 1]
    wrong = st.integers(limit, 2**31 - 1) | st.integers(-(2**31), -1)
    semantic = spec.semantic_first <= rows[row, 0] <= spec.semantic_last
    if column == 1 and semantic:  # disagrees with the semantic id
        wrong |= st.integers(0, limit - 1).filter(lambda v: v != rows[row, 1])
    elif column > 0 and not semantic:  # a code where there is none
        wrong |= st.integers(1, limit - 1)
    value = data.draw(wrong, "value")
    rows[row, column] = value
    failure = await place.send(place.changed(lambda r: setattr(r, "prompt", rows.tobytes())))
    where = f"row {row}, column {column}: value {value} is not "
    assert_refused(failure, "INVALID_PROMPT", "prompt", where)


async def test_wrong_shapes_are_named(place: Place) -> None:
    columns, data = place.spec.columns, place.good.prompt
    longest = place.spec.longest_sequence
    cases: list[tuple[bytes, int, str, str, str]] = [
        (b"", columns, "INVALID_PROMPT", "prompt", "empty"),
        (data[:-1], columns, "INVALID_PROMPT", "prompt", f"{len(data) - 1} bytes"),
        (data + b"123", columns, "INVALID_PROMPT", "prompt", f"{len(data) + 3} bytes"),
        (data, columns - 1, "INVALID_PROMPT", "columns", str(columns - 1)),
        (data, 0, "INVALID_PROMPT", "columns", "0"),
        (data, 2**32 - 1, "INVALID_PROMPT", "columns", str(2**32 - 1)),
        (bytes(4 * columns * longest), columns, "PROMPT_TOO_LONG", "prompt", f"{longest} rows"),
    ]
    for prompt, width, reason, field, detail in cases:
        request = pb.GenerateRequest(prompt=prompt, columns=width)
        assert_refused(await place.send(request), reason, field, detail)


async def test_prompts_that_fit_no_pool(place: Place) -> None:
    """The model and decode would take them; prefill's pool does not."""
    spec = place.spec
    for rows, pages in [(2000, PREFILL_PAGES), (4095, PREFILL_PAGES)]:
        request = place.changed(
            lambda r, n=rows: setattr(r, "prompt", bytes(4 * spec.columns * n))  # type: ignore[misc]
        )
        failure = await place.send(request)
        assert (failure.code, failure.reasons) == (INVALID, ["PROMPT_TOO_LONG"])
        assert str(spec.pages_for(rows)) in failure.detail
        assert str(pages) in failure.detail


# --- everything else in a request ---------------------------------------------------------

NUMBERS = st.floats() | st.sampled_from([0.0, -0.0, 5.0, 5e-324, 1.0000001, float("nan")])


@given(
    field=st.sampled_from(["temperature", "top_p", "top_k", "repetition_window", "seed"]),
    number=NUMBERS,
    count=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
async def test_sampling_values_are_in_range_or_named(
    place: Place, field: str, number: float, count: int, seed: int
) -> None:
    value, good = {
        "temperature": (number, 0 <= number <= 5),
        "top_p": (number, 0 < number <= 1),
        "top_k": (count, 1 <= count < 2**31),
        "repetition_window": (count, count <= 128),
        "seed": (seed, seed < 2**63),
    }[field]
    failure = await place.send(place.changed(lambda r: setattr(r.sampling, field, value)))
    if good:
        assert failure.code is grpc.StatusCode.OK, failure
    else:
        assert_refused(failure, "INVALID_SAMPLING", f"sampling.{field}", f"{value} is not ")


@pytest.mark.parametrize(
    ("field", "value", "detail"),
    [
        ("max_rows", 0, "0 is below 1"),
        ("first_rows", 0, "0 is below 1"),
        ("rows_per_message", 0, "0 is below 1"),
        ("request_id", "x" * 129, "129 characters"),
        ("voice", "ü" * 257, "257 characters"),
        ("session", "x" * 100_000, "100000 characters"),
    ],
)
async def test_other_fields_are_named(
    place: Place, field: str, value: int | str, detail: str
) -> None:
    failure = await place.send(place.changed(lambda r: setattr(r, field, value)))
    assert_refused(failure, "INVALID_REQUEST", field, detail)


async def test_a_live_id_is_refused_and_may_return_after_its_end(place: Place) -> None:
    prompt = place.good.prompt
    columns, sampling = place.spec.columns, SamplingOptions(seed=7)
    async with place.client.generate(
        prompt, columns=columns, sampling=sampling, max_rows=1000, request_id="mine"
    ) as first:
        assert isinstance(await anext(first), Started)
        failure = await place.send(place.changed(lambda r: setattr(r, "request_id", "mine")))
        assert failure.code is grpc.StatusCode.ALREADY_EXISTS
        assert failure.reasons == ["DUPLICATE_REQUEST"]
        assert "'mine'" in failure.detail
        assert isinstance(await anext(first), Rows), "the first one goes on"
    served = place.changed(lambda r: setattr(r, "request_id", "mine"))
    while (failure := await place.send(served)).code is not grpc.StatusCode.OK:
        assert failure.reasons == ["DUPLICATE_REQUEST"], "its end is on the way"


async def test_absurd_limits(place: Place) -> None:
    """Wishes beyond all that there is: everything there is."""
    most = 2**32 - 1
    prompt, columns = place.good.prompt, place.spec.columns
    async with place.client.generate(
        prompt,
        columns=columns,
        sampling=SamplingOptions(seed=7),
        max_rows=most,
        first_rows=most,
        rows_per_message=most,
    ) as generation:
        events = [event async for event in generation]
    assert [type(event) for event in events] == [Started, Rows, Finished]
    calls = [
        SpeechStub(place.channel).Generate(place.good, timeout=timeout_s)
        for timeout_s in (1e-9, 0.0, 1e-3)
    ]
    for call in calls:
        assert (await failure_of(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    far = SpeechStub(place.channel).Generate(place.good, timeout=1e9)
    assert (await failure_of(far)).code is grpc.StatusCode.OK


@given(data=st.binary(min_size=1, max_size=300))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
async def test_bytes_that_are_no_request(place: Place, data: bytes) -> None:
    """Some are requests by accident; none is a good one."""
    failure = await failure_of_bytes(place.channel, data)
    assert failure.code is INVALID
    assert failure.reasons in (["INVALID_REQUEST"], ["INVALID_PROMPT"], ["INVALID_SAMPLING"])


async def test_messages_over_the_limit_and_unknown_methods(place: Place) -> None:
    """gRPC itself answers these, before anything of ours sees them."""
    failure = await failure_of_bytes(place.channel, bytes(3 << 20))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    unknown: Any = place.channel.unary_unary("/duplet.speech.v1.Speech/Sing")
    failure = await failure_of(unknown(b"", timeout=LIMIT_S))
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED


async def test_nothing_of_all_this_was_spent_on(place: Place) -> None:
    """A refused request reaches neither pool: only the good ones were ever prefilled."""
    before = await place.unit.gauge(Role.PREFILL, "prompt_rows_total")
    await place.load.stop()
    await place.unit.wait_idle()
    middle = await place.unit.gauge(Role.PREFILL, "prompt_rows_total")
    assert middle >= before
    bad = place.changed(lambda r: setattr(r, "prompt", r.prompt[:-4]))
    for _ in range(20):
        await place.send(bad)
    assert await place.unit.gauge(Role.PREFILL, "prompt_rows_total") == middle
    assert (await Stream(ASKS[0]).read(place.client, place.spec)).error is None
