"""What a call to a unit can end with."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped, unused-ignore]

from duplet_core.errors import Reason

_DETAILS_KEY = "grpc-status-details-bin"


class GenerateError(Exception):
    """A call failed. Branch on `reason`; where it is empty, on `code`."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        detail: str,
        retry_after_s: float | None = None,
        points_ns: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(f"{reason or code.name}: {detail}")
        self.code = code
        self.reason = reason
        """A name of `duplet_core.errors.Reason`, or one that a newer unit knows; empty when the
        error is gRPC's own, such as a refused connection."""
        self.detail = detail
        self.retry_after_s = retry_after_s
        """How long to wait before another try; None where the unit does not say."""
        self.points_ns = dict(points_ns or {})
        """Points of the request's timeline that lb knew when it failed."""


def from_rpc_error(error: grpc.aio.AioRpcError) -> GenerateError:
    """Read the ErrorInfo and RetryInfo that a status carries."""
    reason, retry_after_s = "", None
    points_ns: dict[str, int] = {}
    for detail in _read_details(error):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
            told = info.metadata.items()
            points_ns = {name: int(at_ns) for name, at_ns in told if at_ns.isdecimal()}
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.CANCELLED and not reason:
        # Duplet says why it cancels. Without a word it was the server's gRPC: a call that came
        # in at the moment in which a leaving lb closed its port is ended so.
        code, text = grpc.StatusCode.UNAVAILABLE, "the server left before it took the call"
    return GenerateError(code, reason, text, retry_after_s, points_ns)


def broken_stream(detail: str) -> GenerateError:
    """The error for a server that does not keep to the contract."""
    return GenerateError(grpc.StatusCode.INTERNAL, Reason.PEER_PROTOCOL.value, detail)


def _read_details(error: grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                # Some other server's bytes; the code and the text still tell what happened.
                return []
    return []
