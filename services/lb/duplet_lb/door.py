"""Refuses while the unit is full: first of all, before a prompt is received, parsed or checked.

A burst comes through one event loop, where whatever is done for one request is waited for by all
behind it. So a refusal here is no more than a status that was made beforehand: no times, no span,
no line of log of its own.

Whoever comes in has so long to send the whole request, and so many may be sending: what gRPC keeps
of half-sent requests is not kept for ever. How much of one it keeps is gRPC's own: it looks at a
message's length when the message is whole.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status  # type: ignore[import-untyped]

from duplet.speech.v1 import speech_pb2
from duplet_core.errors import DupletError, InvalidInput, Reason, Unavailable
from duplet_core.front_state import FULL
from duplet_lb.speech import LbExecutor
from duplet_runtime.status import HandlerGuard, status_proto

GENERATE = f"/{speech_pb2.DESCRIPTOR.services_by_name['Speech'].full_name}/Generate"
TELL_AFTER_S = 1.0
RECEIVE_S = 10.0
"""Time in which a request is to be here whole."""
MOST_RECEIVING = 512
"""Requests that are not. One more, and the one that has taken longest is let go."""


class Door(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Stands before every handler of lb's server. Lives in the event loop."""

    def __init__(self, executor: LbExecutor) -> None:
        self._executor = executor
        # A stream's handler begins before anything of the request is read.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._status = rpc_status.to_status(status_proto(Unavailable(Reason.OVERLOADED, FULL)))
        self._untold = 0
        self._receiving: dict[asyncio.Timeout, None] = {}
        """Limits of the requests that are not here whole, the oldest first."""
        self._receivers: dict[Any, Any] = {}
        """By handler: gRPC asks at every call."""
        # Ours; cancelled by `close`.
        self._telling: asyncio.TimerHandle | None = None

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method == GENERATE and self._executor.machine.full:
            return self._refusal
        handler = await continuation(handler_call_details)
        if handler_call_details.method != GENERATE:
            return handler
        if handler not in self._receivers:
            self._receivers[handler] = self._receiver(handler)
        return self._receivers[handler]

    def _receiver(self, handler: Any) -> Any:
        """The handler behind one that reads the request itself, and not for ever."""

        async def receive(_unread: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            ended: Reason | None = None
            try:
                async with HandlerGuard(context, self._executor.service.fail):
                    try:
                        request = await self._read(context)
                    except DupletError as error:
                        ended = error.reason
                        raise
                    await handler.unary_stream(request, context)
            except grpc.aio.AbortError:
                # A client that left is told nothing, and gRPC says no earlier that it did.
                if ended is not None:
                    self._executor.count_end(ended)
                raise

        return grpc.stream_stream_rpc_method_handler(
            receive, handler.request_deserializer, handler.response_serializer
        )

    async def _read(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with asyncio.timeout(RECEIVE_S) as limit:
                self._let_oldest_go()
                self._receiving[limit] = None
                request = await context.read()
        except TimeoutError:
            late = (
                f"the request was not here whole: it has {RECEIVE_S:g} s, and less while "
                f"{MOST_RECEIVING} others are on their way"
            )
            raise Unavailable(Reason.DEADLINE, late) from None
        finally:
            self._receiving.pop(limit, None)
        if request is grpc.aio.EOF:
            raise InvalidInput(Reason.INVALID_REQUEST, "no request was sent")
        return request

    def _let_oldest_go(self) -> None:
        """Make room for one more: whoever sends at once is there before its turn comes."""
        if len(self._receiving) < MOST_RECEIVING:
            return
        oldest = next(iter(self._receiving))
        del self._receiving[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())

    async def _refuse(self, _unread: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._executor.count_end(Reason.OVERLOADED)
        self._untold += 1
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_AFTER_S, self._tell)
        # Half the cost of `abort_with_status`, which raises.
        context.set_code(self._status.code)
        context.set_details(self._status.details)
        context.set_trailing_metadata(self._status.trailing_metadata)

    def _tell(self) -> None:
        """One line for all that were refused in the last second."""
        self._telling = None
        self._executor.service.log.info("requests refused", count=self._untold, detail=FULL)
        self._untold = 0

    def close(self) -> None:
        """Tell what is untold; no line follows."""
        if self._telling is not None:
            self._telling.cancel()
            self._tell()
