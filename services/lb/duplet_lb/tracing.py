"""Requests as OpenTelemetry spans: one trace a request, with the spans of all four services.

The spans are made of the request's timeline when it is over, so no service does anything for
them while it runs, and a span is as exact as the timeline. The caller's trace context comes in
the call's metadata (W3C `traceparent`) and is handed on explicitly; there is no global state.
This module is imported only where an endpoint is set.
"""

from __future__ import annotations

import time
from itertools import pairwise

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from duplet_core.effects import Submit
from duplet_core.ids import InstanceId, Role
from duplet_core.messages import Finished
from duplet_core.timeline import BESIDE, BESIDE_SPANS, CUT, POINTS, SEGMENTS, SERVICES
from duplet_lb.times import CallTimes

EXPORT_TIMEOUT_S = 2.0
"""Of one export; a collector that does not answer costs spans, never a request."""


class Tracing:
    """Owns the exporter, its thread and its bounded queue; `close` ends them."""

    def __init__(self, endpoint: str, instance: InstanceId) -> None:
        """`endpoint`: of an OTLP collector over gRPC, such as http://localhost:4317."""
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(exporter)
        self._tracers = {role: self._tracer(role, instance) for role in Role}
        self._propagator = TraceContextTextMapPropagator()

    def _tracer(self, role: Role, instance: InstanceId) -> trace.Tracer:
        resource = Resource.create({"service.name": f"duplet-{role}", "duplet.unit": instance})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider.get_tracer("duplet")

    def emit(
        self, submit: Submit, times: CallTimes, finished: Finished | None, outcome: str
    ) -> None:
        """Queue the spans of a request that is over."""
        points = times.points(finished)
        to_epoch_ns = time.time_ns() - time.monotonic_ns()
        carrier = {"traceparent": submit.trace} if submit.trace else {}
        whole = self._tracers[Role.LB].start_span(
            "generate",
            self._propagator.extract(carrier),
            trace.SpanKind.SERVER,
            {
                "duplet.request_id": submit.request_id,
                "duplet.transfer": submit.transfer,
                "duplet.voice": submit.voice,
                "duplet.outcome": outcome,
                "duplet.prompt_rows": submit.prompt_rows,
                "duplet.output_rows": finished.output_rows if finished else 0,
                "duplet.cached_rows": finished.cached_rows if finished else 0,
            },
            start_time=times.received_ns + to_epoch_ns,
        )
        if finished is None:
            whole.set_status(trace.StatusCode.ERROR, outcome)
        within = trace.set_span_in_context(whole)
        for name, service, start_ns, end_ns in _spans(points, well=finished is not None):
            span = self._tracers[Role(service)].start_span(
                name, within, start_time=start_ns + to_epoch_ns
            )
            span.end(end_ns + to_epoch_ns)
        whole.end(times.finished_ns + to_epoch_ns)

    def close(self) -> None:
        """Send what is queued, for at most one export's time, and end the thread."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _spans(points: dict[str, int], *, well: bool) -> list[tuple[str, str, int, int]]:
    """(name, whose, start, end) of the segments between the points, then of those beside."""
    chain = [(name, at_ns) for name, at_ns in points.items() if name not in BESIDE]
    found = []
    for (before, start_ns), (name, end_ns) in pairwise(chain):
        index = POINTS.index(name) - 1
        if well or POINTS[index] == before:
            found.append((SEGMENTS[index], SERVICES[index], start_ns, end_ns))
        else:
            found.append((CUT, "lb", start_ns, end_ns))
    for name, first, last, service in BESIDE_SPANS:
        if first in points and last in points:
            found.append((name, service, points[first], points[last]))
    return found
