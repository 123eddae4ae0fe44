"""Calls as a client may make them that does not use the client library."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

LIMIT_S = 30.0
"""Deadline of a call that should fail at once."""

GENERATE = "/duplet.speech.v1.Speech/Generate"


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call ended."""

    code: grpc.StatusCode
    reasons: list[str]
    """Of all its ErrorInfos."""
    detail: str
    retry_s: float | None
    """RetryInfo's delay."""
    violations: list[str]
    """Fields of its BadRequest."""


async def failure_of(call: Any) -> Failure:
    """Read the call to its end, and its status."""
    if hasattr(call, "read"):
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
    code, text = await call.code(), await call.details() or ""
    error = grpc.aio.AioRpcError(
        code, await call.initial_metadata(), await call.trailing_metadata(), text
    )
    found = rpc_status.from_call(error)
    reasons, fields, retry_s = [], [], None
    for detail in found.details if found else []:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reasons.append(info.reason)
        elif detail.Unpack(retry):
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
    return Failure(code, reasons, text, retry_s, fields)


async def failure_of_bytes(channel: grpc.aio.Channel, data: bytes) -> Failure:
    """Send these bytes as a GenerateRequest."""
    method: Any = channel.unary_stream(GENERATE)
    return await failure_of(method(data, timeout=LIMIT_S))
