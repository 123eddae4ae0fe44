"""Stands in for a trace store: OTLP over gRPC on port 4317, each span a line of JSON on stdout.

A program of its own, with nothing but what lb's image has.
"""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

ADDRESS = "0.0.0.0:4317"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Tells what comes and forgets it."""

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        for of_resource in request.resource_spans:
            told = {a.key: a.value.string_value for a in of_resource.resource.attributes}
            for span in (span for scope in of_resource.scope_spans for span in scope.spans):
                said = {"trace": span.trace_id.hex(), "service": told["service.name"]}
                print(json.dumps({**said, "name": span.name}), flush=True)
        return pb.ExportTraceServiceResponse()


def main() -> None:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: server.stop(None))
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        Collector(), server
    )
    server.add_insecure_port(ADDRESS)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
