"""Spans of all four services arrive at a collector as one trace, which the caller began."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from duplet_client import AsyncClient, SamplingOptions
from duplet_core.timeline import BESIDE_SPANS, SEGMENTS, SERVICES
from tests.e2e.live_unit import live_unit
from tests.e2e.streams import Ask, known_spec

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UNIT_SEGMENTS = dict(zip(SEGMENTS[1:-1], SERVICES[1:-1], strict=True))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what comes; (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    async def Export(
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        for of_resource in request.resource_spans:
            told = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.spans += [(told["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server = grpc.aio.server()
    kept = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        kept, server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield kept, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_one_request_is_one_trace_of_four_services() -> None:
    async with (
        collector() as (kept, endpoint),
        live_unit({"DUPLET_LB_OTLP_ENDPOINT": endpoint}) as unit,
        AsyncClient(unit.listen) as client,
    ):
        spec = await known_spec(client)
        good = client.generate(
            Ask(1).prompt(spec),
            max_rows=20,
            sampling=SamplingOptions(seed=1),
            traceparent=f"00-{TRACE}-{PARENT}-01",
        )
        async for _ in good:
            pass
        async with client.generate(Ask(3).prompt(spec), request_id="left") as left:
            await anext(left)
        await unit.wait_idle()
        # The unit has ended, so all that it queued is here.
    assert good.timeline is not None
    spans = [(service, s) for service, s in kept.spans if s.trace_id.hex() == TRACE]
    (whole,) = [s for _, s in spans if s.name == "generate"]
    assert whole.parent_span_id.hex() == PARENT
    assert whole.kind == Span.SPAN_KIND_SERVER
    told = {a.key: a.value.int_value or a.value.string_value for a in whole.attributes}
    assert told["duplet.output_rows"] == good.timing.rows
    parts = {s.name: (service, s) for service, s in spans if s.name != "generate"}
    assert {s.parent_span_id for _, s in parts.values()} == {whole.span_id}
    wanted = {**UNIT_SEGMENTS, **{name: service for name, _, _, service in BESIDE_SPANS}}
    assert {n: service for n, (service, _) in parts.items()} == {
        name: f"duplet-{service}" for name, service in wanted.items()
    }
    lasted_ns = {s.name: s.duration_ns for s in good.timeline.segments()}
    for name in UNIT_SEGMENTS:
        span = parts[name][1]
        assert span.end_time_unix_nano - span.start_time_unix_nano == lasted_ns[name], name
    (cancelled,) = [s for s in (s for _, s in kept.spans) if is_request(s, "left")]
    assert cancelled.status.code == Status.STATUS_CODE_ERROR
    assert cancelled.status.message == "CANCELLED"
    assert cancelled.trace_id.hex() != TRACE


def is_request(span: Span, request_id: str) -> bool:
    return any(
        a.key == "duplet.request_id" and a.value.string_value == request_id for a in span.attributes
    )


async def test_a_collector_that_is_not_there_costs_no_request() -> None:
    nobody = {"DUPLET_LB_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    async with live_unit(nobody) as unit, AsyncClient(unit.listen) as client:
        prompt = Ask(1).prompt(await known_spec(client))
        for seed in range(3):
            async with asyncio.timeout(30):
                options = SamplingOptions(seed=seed)
                async for _ in client.generate(prompt, max_rows=3, sampling=options):
                    pass
