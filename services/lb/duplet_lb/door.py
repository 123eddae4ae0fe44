"""Refuses while the unit is full: first of all, before a prompt is received, parsed or checked.

A burst comes through one event loop, where whatever is done for one request is waited for by all
behind it. So a refusal here is no more than a status that was made beforehand: no times, no span,
no line of log of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status  # type: ignore[import-untyped]

from duplet.speech.v1 import speech_pb2
from duplet_core.errors import Reason, Unavailable
from duplet_core.front_state import FULL
from duplet_lb.speech import LbExecutor
from duplet_runtime.status import status_proto

GENERATE = f"/{speech_pb2.DESCRIPTOR.services_by_name['Speech'].full_name}/Generate"
TELL_AFTER_S = 1.0


class Door(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Stands before every handler of lb's server. Lives in the event loop."""

    def __init__(self, executor: LbExecutor) -> None:
        self._executor = executor
        # A stream's handler begins before anything of the request is read.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._status = rpc_status.to_status(status_proto(Unavailable(Reason.OVERLOADED, FULL)))
        self._untold = 0
        # Ours; cancelled by `close`.
        self._telling: asyncio.TimerHandle | None = None

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method == GENERATE and self._executor.machine.full:
            return self._refusal
        return await continuation(handler_call_details)

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
