"""The client of a unit, for asyncio."""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped, unused-ignore]

from duplet.speech.v1 import speech_pb2 as pb
from duplet.speech.v1.speech_pb2_grpc import SpeechStub
from duplet_client.errors import from_rpc_error
from duplet_client.options import channel_options
from duplet_client.prompts import Prompt, pack_prompt
from duplet_client.stream import Generation, SamplingOptions, encode_sampling, set_field
from duplet_client.unit import Unit, decode_unit
from duplet_core.errors import Reason

DEFAULT_TIMEOUT_S = 120.0
"""Deadline of a generation."""

ANSWER_TIMEOUT_S = 10.0
"""Deadline of the calls that only ask."""

Answer = TypeVar("Answer")


class AsyncClient:
    """Talks to one unit. Owns its channel: use `async with`, or call `close`.

    Must be made and used in one running event loop. Any number of tasks may share it.
    """

    def __init__(self, address: str) -> None:
        """Prepare a channel to `address`, such as 'localhost:50050' or 'unix:/run/lb.sock'; it
        connects with the first call."""
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(address))
        self._stub = SpeechStub(self._channel)
        # Of running generations; each adds its call and takes it out. Closing a channel alone
        # would leave a call that is being read as it is.
        self._calls: set[grpc.aio.Call] = set()
        self._check_health = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the calls that run and close the channel.

        Whoever reads one of them gets a GenerateError with the reason CANCELLED.
        """
        for call in tuple(self._calls):
            call.cancel()
        await self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        columns: int | None = None,
        sampling: SamplingOptions | None = None,
        max_rows: int | None = None,
        rows_per_message: int | None = None,
        first_rows: int | None = None,
        request_id: str = "",
        voice: str = "",
        session: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        traceparent: str = "",
    ) -> Generation:
        """Prepare a generation; reading it makes the call.

        Args:
            prompt: rows; see `duplet_client.prompts.Prompt`.
            columns: integers a row; needed with a prompt of bytes.
            sampling: None, or None in one of its fields: the unit's defaults.
            max_rows: most output rows; None: the model's default.
            rows_per_message: rows in each message after the first; None: 1.
            first_rows: rows in the first message; None: 1.
            request_id: empty: the unit mints one.
            voice: label for logs and routing.
            session: label for logs and routing.
            timeout_s: deadline of the whole call.
            traceparent: W3C trace context; the unit's spans become children of its span.

        Raises:
            InvalidInput: the prompt or a value cannot be sent; the detail names it.
        """
        data, width = pack_prompt(prompt, columns)
        request = pb.GenerateRequest(prompt=data)
        wishes = {
            "columns": width,
            "max_rows": max_rows,
            "rows_per_message": rows_per_message,
            "first_rows": first_rows,
            "request_id": request_id,
            "voice": voice,
            "session": session,
        }
        for field, value in wishes.items():
            if value is not None:
                set_field(request, field, value, Reason.INVALID_REQUEST, field)
        if sampling is not None:
            request.sampling.CopyFrom(encode_sampling(sampling))
        return Generation(self._stub, request, timeout_s, self._calls, traceparent)

    async def unit(self) -> Unit:
        """Ask what the unit is and how it does.

        Raises:
            GenerateError: the call failed.
        """
        call = self._stub.GetUnit(pb.GetUnitRequest(), timeout=ANSWER_TIMEOUT_S)
        return decode_unit(await _answer(call))

    async def drain(self) -> int:
        """Tell the unit to take nothing new; may be repeated.

        Returns:
            How many requests still run.

        Raises:
            GenerateError: the call failed.
        """
        call = self._stub.Drain(pb.DrainRequest(), timeout=ANSWER_TIMEOUT_S)
        return (await _answer(call)).live_streams

    async def health(self, name: str = "ready") -> str:
        """Ask the standard health service for `name`: 'live', 'ready', or a dependency's.

        Returns:
            'SERVING', 'NOT_SERVING', 'UNKNOWN', or 'SERVICE_UNKNOWN' for a name that the
            service does not have.

        Raises:
            GenerateError: the call failed.
        """
        call = self._check_health(
            health_pb2.HealthCheckRequest(service=name), timeout=ANSWER_TIMEOUT_S
        )
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise from_rpc_error(error) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def _answer(call: Awaitable[Answer]) -> Answer:
    """Wait for a call's one answer; a cancelled wait cancels the call."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
