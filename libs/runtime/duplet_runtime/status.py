"""The one mapping of reasons to gRPC statuses, and the guard around every handler."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc import StatusCode
from grpc_status import rpc_status  # type: ignore[import-untyped]

from duplet_core.errors import DupletError, InvalidInput, InvariantError, Reason
from duplet_runtime.logs import get_logger

ERROR_DOMAIN = "duplet"

RETRY_DELAY_MS = 500
"""What a client should wait before it asks again, where asking again can help."""

DETAIL_CHARS = 500
"""Longest detail sent: status and details travel in headers, which peers limit to 8 KiB."""

STATUS_LIMIT_S = 5.0
"""A status travels behind what was written before it. A handler waits so long for a client that
reads nothing; then it leaves, and gRPC keeps the status for as long as the connection lasts."""

STATUS_OF: Mapping[Reason, StatusCode] = MappingProxyType(
    {
        Reason.INVALID_PROMPT: StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_SAMPLING: StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_REQUEST: StatusCode.INVALID_ARGUMENT,
        Reason.PROMPT_TOO_LONG: StatusCode.INVALID_ARGUMENT,
        Reason.DUPLICATE_REQUEST: StatusCode.ALREADY_EXISTS,
        Reason.OVERLOADED: StatusCode.RESOURCE_EXHAUSTED,
        Reason.NOT_READY: StatusCode.UNAVAILABLE,
        Reason.DRAINING: StatusCode.UNAVAILABLE,
        Reason.QUARANTINE: StatusCode.UNAVAILABLE,
        Reason.CANCELLED: StatusCode.CANCELLED,
        Reason.DEADLINE: StatusCode.DEADLINE_EXCEEDED,
        Reason.SLOW_READER: StatusCode.ABORTED,
        Reason.LB_LOST: StatusCode.UNAVAILABLE,
        Reason.PREFILL_LOST: StatusCode.UNAVAILABLE,
        Reason.DECODE_LOST: StatusCode.UNAVAILABLE,
        Reason.WRITER_LOST: StatusCode.UNAVAILABLE,
        Reason.TRANSFER_FAILED: StatusCode.UNAVAILABLE,
        # Not DEADLINE_EXCEEDED: it is the unit's deadline, not the client's.
        Reason.TRANSFER_DEADLINE: StatusCode.UNAVAILABLE,
        Reason.KV_MISMATCH: StatusCode.DATA_LOSS,
        Reason.ENGINE_FAILED: StatusCode.INTERNAL,
        Reason.VERSION_MISMATCH: StatusCode.FAILED_PRECONDITION,
        Reason.STALE_STREAM: StatusCode.ABORTED,
        Reason.SUPERSEDED: StatusCode.ABORTED,
        Reason.OTHER_INSTANCE: StatusCode.FAILED_PRECONDITION,
        Reason.NO_LIFELINE: StatusCode.UNAVAILABLE,
        Reason.PEER_DIED: StatusCode.UNAVAILABLE,
        Reason.PEER_PROTOCOL: StatusCode.INVALID_ARGUMENT,
    }
)

RETRYABLE = frozenset(
    reason
    for reason, code in STATUS_OF.items()
    if code in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
)
"""Asking again can help: the unit is full, or a part of it is away and comes back."""

_FIELD = re.compile(r"([a-z][a-z0-9_.\[\]]*): ")

_log = get_logger("duplet.status")


def status_proto(error: DupletError) -> status_pb2.Status:
    """The error as google.rpc.Status: one ErrorInfo, RetryInfo where waiting helps, and
    BadRequest where the caller's input is at fault and the detail begins with "field: "."""
    detail = error.detail[:DETAIL_CHARS]
    points = {name: str(at_ns) for name, at_ns in error.points_ns.items()}
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.value, domain=ERROR_DOMAIN, metadata=points
    )
    details: list[Proto] = [info]
    if error.reason in RETRYABLE:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(RETRY_DELAY_MS)
        details.append(retry)
    field = _FIELD.match(detail)
    if isinstance(error, InvalidInput) and field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field.group(1), description=detail[field.end() :]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=STATUS_OF[error.reason].value[0], message=detail)
    for entry in details:
        packed = any_pb2.Any()
        packed.Pack(entry)
        status.details.append(packed)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DupletError) -> NoReturn:
    """End a handler's call with this error.

    Raises:
        grpc.aio.AbortError: always; gRPC sends the status.
    """
    await context.abort_with_status(rpc_status.to_status(status_proto(error)))
    raise AssertionError("abort_with_status returned")


class HandlerGuard:
    """Outermost context of one handler: whatever leaves the handler, the client gets a status.

    DupletErrors become theirs. A CancelledError that gRPC would swallow without a word becomes
    UNAVAILABLE, DRAINING (a client that cancelled by itself does not see it). Anything else is
    a bug: it is logged, the client learns nothing of it but INTERNAL, and `on_fatal` hears of
    a broken invariant.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._context = context
        self._on_fatal = on_fatal

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        """True, which keeps the error here, where its status waits for the client to read."""
        if error is None or isinstance(error, grpc.aio.AbortError | GeneratorExit):
            return False
        if isinstance(error, asyncio.CancelledError):
            error = DupletError(Reason.DRAINING, "the service ended this call early")
        if isinstance(error, DupletError):
            return await self._tell(abort(self._context, error))
        _log.error("handler failed", exc_info=error)
        if isinstance(error, InvariantError):
            self._on_fatal(error)
        unknown = "internal error; see the service's log"
        return await self._tell(self._context.abort(StatusCode.INTERNAL, unknown))

    async def _tell(self, aborting: Awaitable[NoReturn]) -> bool:
        """Send a status; True when the client has not taken it within the limit.

        Raises:
            grpc.aio.AbortError: the status is out.
        """
        try:
            async with asyncio.timeout(STATUS_LIMIT_S):
                await aborting
        except TimeoutError:
            _log.info("a status waits for a client that does not read")
        except grpc.aio.InternalError as error:
            # The client is gone already, or its first message is stuck, with which gRPC sends the
            # initial metadata: no status can be sent.
            _log.debug("call ended without status", detail=str(error))
        return True


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Puts a HandlerGuard around every handler of a server."""

    def __init__(self, on_fatal: Callable[[BaseException], None]) -> None:
        self._on_fatal = on_fatal
        self._guarded: dict[Any, Any] = {}
        """By handler: gRPC asks at every call."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler not in self._guarded:
            self._guarded[handler] = self._guard(handler)
        return self._guarded[handler]

    def _guard(self, handler: Any) -> Any:
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        inner = getattr(handler, kind)
        wrap = self._guard_stream if handler.response_streaming else self._guard_unary
        build = getattr(grpc, f"{kind}_rpc_method_handler")
        deserialize = handler.request_deserializer and _keep_fault(handler.request_deserializer)
        return build(wrap(inner), deserialize, handler.response_serializer)

    def _guard_unary(self, inner: Any) -> Any:
        async def guarded(request: Any, context: Any) -> Any:
            async with HandlerGuard(context, self._on_fatal):
                _check_parsed(request)
                return await inner(request, context)

        return guarded

    def _guard_stream(self, inner: Any) -> Any:
        """Handlers that stream are coroutines (writer API) or async generators."""

        async def guarded(request: Any, context: Any) -> None:
            async with HandlerGuard(context, self._on_fatal):
                _check_parsed(request)
                running = inner(request, context)
                if hasattr(running, "__aiter__"):
                    async with contextlib.aclosing(running):
                        async for response in running:
                            await context.write(response)
                else:
                    await running

        return guarded


def _keep_fault(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserializer that returns the DecodeError of bytes that are no message: what it raises,
    gRPC would answer with a status of its own, without a reason."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return parse


def _check_parsed(request: Any) -> None:
    """Refuse a single request that was no message; a stream's reader sees to its own."""
    if isinstance(request, DecodeError):
        raise InvalidInput(Reason.INVALID_REQUEST, f"request: no valid message: {request}")


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
