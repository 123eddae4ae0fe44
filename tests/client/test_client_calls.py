"""The client against a Speech service in the same process."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.rpc import (  # type: ignore[import-untyped, unused-ignore]
    code_pb2,
    error_details_pb2,
    status_pb2,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]

from duplet.speech.v1 import speech_pb2 as pb
from duplet.speech.v1.speech_pb2_grpc import SpeechServicer, add_SpeechServicer_to_server
from duplet_client import (
    AsyncClient,
    Event,
    Finished,
    FinishReason,
    GenerateError,
    Rows,
    SamplingOptions,
    Started,
)
from duplet_core.errors import InvalidInput, Reason
from duplet_pages.spec import MOST_REQUEST_BYTES, ModelSpec

SPEC = ModelSpec(
    name="tiny",
    fingerprint="0",
    codebooks=1,
    vocab=8,
    codebook_sizes=(4,),
    semantic_first=4,
    semantic_last=7,
    stop_id=3,
    page_rows=4,
    longest_sequence=32,
    default_max_rows=8,
    layers=1,
    kv_heads=1,
    head_dim=4,
    dtype="float32",
    kv_hash="xxh3-128",
    rows_per_second=21.5,
)

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
Handler = Callable[[pb.GenerateRequest, Context], Awaitable[None]]


class StubSpeech(SpeechServicer):
    """A Speech service whose Generate is set by the test."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.model_spec = SPEC.to_json()
        self.request: pb.GenerateRequest | None = None
        self.ended = asyncio.Event()
        """Generate's handler has left."""

    async def Generate(  # type: ignore[override]  # the writer API, which the stubs do not know
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        self.request = request
        assert self.handler is not None
        try:
            await self.handler(request, context)
        finally:
            self.ended.set()

    async def GetUnit(self, request: pb.GetUnitRequest, context: Any) -> pb.GetUnitResponse:
        return pb.GetUnitResponse(
            model_spec=self.model_spec,
            services=[pb.ServiceInfo(name="lb", instance="ab", version="1", connected=True)],
            conditions=[pb.Condition(name="decode", ok=False, detail="no stream")],
            live_streams=2,
            credit=pb.Credit(total_pages=9, free_pages=5, free_slots=1, refusing="DRAINING"),
            transport="pages",
            totals=pb.Totals(kv_checks=7, requests={"STOP": 3}, pages={"free": 5}),
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        return pb.DrainResponse(live_streams=4)


@pytest.fixture
async def speech() -> StubSpeech:
    return StubSpeech()


@pytest.fixture
async def client(speech: StubSpeech, tmp_path: Any) -> AsyncIterator[AsyncClient]:
    server = grpc.aio.server()
    add_SpeechServicer_to_server(speech, server)
    conditions = health.aio.HealthServicer()
    await conditions.set("ready", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(conditions, server)
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    async with AsyncClient(address) as made:
        yield made
    await server.stop(None)


def packed(*rows: tuple[int, ...]) -> bytes:
    return np.array(rows, dtype="<i4").tobytes()


def started() -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.Started(request_id="r1", seed=7))


def rows(first: int, count: int) -> pb.GenerateResponse:
    data = packed(*((first + i, 0) for i in range(count)))
    return pb.GenerateResponse(rows=pb.Rows(first_index=first, rows=data))


def finished(reason: int = pb.FINISH_REASON_STOP) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=pb.FinishReason.ValueType(reason),
            usage=pb.Usage(prompt_rows=1, cached_rows=0, output_rows=10, kv_checks=1),
            timeline=[pb.TimePoint(name="lb_received", at_ns=5)],
        )
    )


def says(*responses: pb.GenerateResponse) -> Handler:
    async def handler(request: pb.GenerateRequest, context: Context) -> None:
        for response in responses:
            await context.write(response)

    return handler


def fails(code: int, *details: Any) -> Handler:
    async def handler(request: pb.GenerateRequest, context: Context) -> None:
        status = status_pb2.Status(code=code, message="prompt: row 3")
        for detail in details:
            packed_detail = any_pb2.Any()
            packed_detail.Pack(detail)
            status.details.append(packed_detail)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        await context.abort(STATUS_BY_NUMBER[code], status.message)

    return handler


STATUS_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


async def test_events_and_timing(client: AsyncClient, speech: StubSpeech) -> None:
    speech.handler = says(started(), rows(0, 1), rows(1, 7), rows(8, 2), finished())
    stream = client.generate([[1, 0]])
    events = [event async for event in stream]
    assert events[0] == Started(request_id="r1", seed=7)
    got = [event for event in events if isinstance(event, Rows)]
    assert [event.first_index for event in got] == [0, 1, 8]
    assert np.concatenate([event.rows for event in got]).tolist() == [[i, 0] for i in range(10)]
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.STOP
    assert (end.usage.prompt_rows, end.usage.output_rows, end.usage.kv_checks) == (1, 10, 1)
    timing = stream.timing
    assert timing.rows == 10
    assert timing.sent_ns is not None and timing.finished_ns is not None
    assert timing.ttft_s is not None and timing.ttfa_s is not None
    assert 0 < timing.ttft_s <= timing.ttfa_s
    assert end.timeline.client_sent_ns == timing.sent_ns
    assert end.timeline.total_ns == timing.finished_ns - timing.sent_ns
    assert end.timeline.unit_points == (("lb_received", 5),)


async def test_everything_asked_for_is_sent(client: AsyncClient, speech: StubSpeech) -> None:
    speech.handler = says(finished(pb.FINISH_REASON_LENGTH))
    stream = client.generate(
        [[1, 0], [5, 1]],
        sampling=SamplingOptions(temperature=0.5, top_k=3, seed=0),
        max_rows=9,
        rows_per_message=4,
        first_rows=2,
        request_id="mine",
        voice="anna",
        session="s",
    )
    (end,) = [event async for event in stream]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    request = speech.request
    assert request is not None
    assert request.prompt == packed((1, 0), (5, 1))
    assert (request.columns, request.max_rows) == (2, 9)
    assert (request.rows_per_message, request.first_rows) == (4, 2)
    assert (request.request_id, request.voice, request.session) == ("mine", "anna", "s")
    assert request.sent_ns == stream.timing.sent_ns
    given = {field.name for field, _ in request.sampling.ListFields()}
    assert given == {"temperature", "top_k", "seed"}
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)


async def test_what_is_not_asked_for_is_unset(client: AsyncClient, speech: StubSpeech) -> None:
    speech.handler = says(finished())
    async for _ in client.generate(packed((1, 0)), columns=2):
        pass
    assert speech.request is not None
    given = {field.name for field, _ in speech.request.ListFields()}
    assert given == {"prompt", "columns", "sent_ns"}


async def test_error_details_are_read(client: AsyncClient, speech: StubSpeech) -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    info = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="duplet")
    speech.handler = fails(code_pb2.RESOURCE_EXHAUSTED, retry, info)
    with pytest.raises(GenerateError) as caught:
        await anext(client.generate([[1, 0]]))
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.reason == "OVERLOADED"
    assert caught.value.detail == "prompt: row 3"
    assert caught.value.retry_after_s == 1.5


async def test_error_without_details_has_its_code(client: AsyncClient, speech: StubSpeech) -> None:
    async def handler(request: pb.GenerateRequest, context: Context) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    speech.handler = handler
    with pytest.raises(GenerateError, match=r"^UNAVAILABLE: gone$") as caught:
        await anext(client.generate([[1, 0]]))
    assert (caught.value.reason, caught.value.retry_after_s) == ("", None)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ((), grpc.StatusCode.UNAVAILABLE),
        ((error_details_pb2.ErrorInfo(reason="CANCELLED"),), grpc.StatusCode.CANCELLED),
    ],
)
async def test_a_server_that_leaves_is_told_from_one_that_cancels(
    client: AsyncClient,
    speech: StubSpeech,
    told: tuple[error_details_pb2.ErrorInfo, ...],
    code: grpc.StatusCode,
) -> None:
    """gRPC ends a call with a bare CANCELLED where it comes in while the port closes."""
    speech.handler = fails(code_pb2.CANCELLED, *told)
    with pytest.raises(GenerateError) as caught:
        await anext(client.generate([[1, 0]]))
    assert caught.value.code is code


async def test_rows_before_an_error_arrive(client: AsyncClient, speech: StubSpeech) -> None:
    async def handler(request: pb.GenerateRequest, context: Context) -> None:
        await context.write(rows(0, 2))
        await fails(code_pb2.DATA_LOSS, error_details_pb2.ErrorInfo(reason="KV_MISMATCH"))(
            request, context
        )

    speech.handler = handler
    stream = client.generate([[1, 0]])
    first = await anext(stream)
    assert isinstance(first, Rows)
    with pytest.raises(GenerateError, match=r"^KV_MISMATCH: "):
        await anext(stream)
    assert stream.timing.rows == 2


@pytest.mark.parametrize(
    ("responses", "detail"),
    [
        ([started()], "ended without Finished"),
        ([rows(1, 1)], "rows.first_index: 1 follows 0 rows"),
        ([rows(0, 2), rows(3, 1)], "rows.first_index: 3 follows 2 rows"),
        ([pb.GenerateResponse(rows=pb.Rows(rows=b"1234567"))], "rows.rows: 7 bytes"),
        ([pb.GenerateResponse(rows=pb.Rows())], "rows.rows: 0 bytes"),
        ([pb.GenerateResponse()], "event: empty"),
        ([finished(0)], "finished.reason: 0"),
        ([finished(9)], "finished.reason: 9"),
        ([finished(), rows(0, 1)], "went on after Finished"),
    ],
)
async def test_a_server_that_breaks_the_contract(
    client: AsyncClient,
    speech: StubSpeech,
    responses: list[pb.GenerateResponse],
    detail: str,
) -> None:
    speech.handler = says(*responses)
    with pytest.raises(GenerateError) as caught:
        async for _ in client.generate([[1, 0]]):
            pass
    assert caught.value.reason == Reason.PEER_PROTOCOL
    assert detail in caught.value.detail


async def hang(request: pb.GenerateRequest, context: Context) -> None:
    """One event, then silence until the call is cancelled."""
    await context.write(started())
    await asyncio.Event().wait()


async def test_leaving_the_stream_cancels_the_call(client: AsyncClient, speech: StubSpeech) -> None:
    speech.handler = hang
    async with client.generate([[1, 0]]) as stream:
        assert isinstance(await anext(stream), Started)
    await speech.ended.wait()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_breaking_the_loop_cancels_the_call(client: AsyncClient, speech: StubSpeech) -> None:
    speech.handler = hang
    async for event in client.generate([[1, 0]]):
        assert isinstance(event, Started)
        break
    gc.collect()
    await speech.ended.wait()


async def test_cancelled_reader_cancels_the_call(client: AsyncClient, speech: StubSpeech) -> None:
    speech.handler = hang
    reading = asyncio.Event()

    async def read() -> list[Event]:
        events = []
        async for event in client.generate([[1, 0]]):
            events.append(event)
            reading.set()
        return events

    task = asyncio.create_task(read())
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await speech.ended.wait()


async def test_closing_the_client_ends_its_calls(client: AsyncClient, speech: StubSpeech) -> None:
    """The reader was not cancelled, so it must not hear that it was."""
    speech.handler = hang
    reading = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate([[1, 0]]):
            reading.set()

    task = asyncio.create_task(read())
    await reading.wait()
    await client.close()
    with pytest.raises(GenerateError) as caught:
        await task
    assert caught.value.reason == Reason.CANCELLED
    await speech.ended.wait()


async def test_deadline_ends_the_call(client: AsyncClient, speech: StubSpeech) -> None:
    speech.handler = hang
    with pytest.raises(GenerateError) as caught:
        async for _ in client.generate([[1, 0]], timeout_s=0.2):
            pass
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await speech.ended.wait()


@pytest.mark.parametrize(
    ("wishes", "reason", "detail"),
    [
        ({"max_rows": -1}, Reason.INVALID_REQUEST, "max_rows: -1 cannot be sent"),
        ({"max_rows": "x"}, Reason.INVALID_REQUEST, "max_rows: 'x' cannot be sent"),
        ({"voice": "\ud800"}, Reason.INVALID_REQUEST, "voice: "),
        ({"sampling": SamplingOptions(top_k=-1)}, Reason.INVALID_SAMPLING, "sampling.top_k: -1"),
        ({"sampling": SamplingOptions(seed=2**64)}, Reason.INVALID_SAMPLING, "sampling.seed: "),
        ({"timeout_s": float("inf")}, Reason.INVALID_REQUEST, "timeout_s: inf"),
        ({"timeout_s": float("nan")}, Reason.INVALID_REQUEST, "timeout_s: nan"),
        ({"traceparent": "00-\n"}, Reason.INVALID_REQUEST, "traceparent: '00-"),
        ({"traceparent": "é"}, Reason.INVALID_REQUEST, "traceparent: 'é'"),
        (
            {"prompt": bytes(MOST_REQUEST_BYTES), "columns": 2},
            Reason.PROMPT_TOO_LONG,
            "prompt: the request",
        ),
    ],
)
async def test_what_cannot_be_sent_is_named(
    client: AsyncClient, wishes: dict[str, Any], reason: Reason, detail: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        client.generate(**({"prompt": [[1, 0]]} | wishes))
    assert caught.value.reason is reason
    assert caught.value.detail.startswith(detail)


async def test_unit_drain_and_health(client: AsyncClient) -> None:
    unit = await client.unit()
    assert unit.spec == SPEC
    assert [service.name for service in unit.services] == ["lb"]
    assert [(c.name, c.ok, c.detail) for c in unit.conditions] == [("decode", False, "no stream")]
    assert unit.credit is not None
    assert (unit.credit.free_pages, unit.credit.refusing) == (5, "DRAINING")
    assert (unit.live_streams, unit.kv_checks, unit.requests) == (2, 7, {"STOP": 3})
    assert unit.pages == {"free": 5}
    assert await client.drain() == 4
    assert await client.health("ready") == "NOT_SERVING"
    assert await client.health("") == "SERVING"
    assert await client.health("no such name") == "SERVICE_UNKNOWN"


async def test_nobody_listens(tmp_path: Any) -> None:
    async with AsyncClient(f"unix:{tmp_path}/nobody") as client:
        for call in (client.unit(), client.drain(), client.health(), anext(client.generate([[1]]))):
            with pytest.raises(GenerateError) as caught:
                await call
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert caught.value.reason == ""


async def test_an_unknown_spec_is_refused(client: AsyncClient, speech: StubSpeech) -> None:
    speech.model_spec = '{"name": "x"}'
    with pytest.raises(GenerateError, match=r"^PEER_PROTOCOL: model spec"):
        await client.unit()


async def test_no_spec_is_none(client: AsyncClient, speech: StubSpeech) -> None:
    speech.model_spec = ""
    assert (await client.unit()).spec is None
