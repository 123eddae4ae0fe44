"""One generation: its request, the reading of its events, and its timing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio
import numpy as np

from duplet.speech.v1 import speech_pb2 as pb
from duplet_client.errors import GenerateError, broken_stream, from_rpc_error
from duplet_client.events import Event, Finished, FinishReason, Rows, Started, Usage
from duplet_client.timing import StreamTiming, Timeline, make_timeline
from duplet_core.errors import InvalidInput, Reason
from duplet_pages.spec import MOST_REQUEST_BYTES

if TYPE_CHECKING:
    # Exists for type checkers alone.
    from duplet.speech.v1.speech_pb2_grpc import SpeechAsyncStub

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


_MOST_TIMEOUT_S = 1e9
"""More is no deadline that gRPC can count with."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling values; None leaves one to the unit. Ranges stand in `speech.proto`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_window: int | None = None
    seed: int | None = None


def encode_sampling(options: SamplingOptions) -> pb.Sampling:
    """Set what is given.

    Raises:
        InvalidInput: INVALID_SAMPLING; a value has the wrong type or cannot be sent at all.
    """
    sampling = pb.Sampling()
    for name in ("temperature", "top_p", "top_k", "repetition_window", "seed"):
        value = getattr(options, name)
        if value is not None:
            set_field(sampling, name, value, Reason.INVALID_SAMPLING, f"sampling.{name}")
    return sampling


def set_field(
    message: pb.Sampling | pb.GenerateRequest, field: str, value: object, reason: Reason, name: str
) -> None:
    """Set a field of a request; `name` is what the caller calls it.

    Raises:
        InvalidInput: with `reason`, when the field's type cannot hold the value.
    """
    try:
        setattr(message, field, value)
    except (TypeError, ValueError, UnicodeError) as error:
        why = str(error).removesuffix(f": {value}")
        raise InvalidInput(reason, f"{name}: {value!r} cannot be sent: {why}") from error


@dataclass(slots=True)
class _Told:
    """What a request's answer has said about its time."""

    points: list[tuple[str, int]] = field(default_factory=list)
    timeline: Timeline | None = None
    """Of Finished."""


class Generation:
    """The events of one request; read once, by one task.

    The call begins with the first read and is cancelled when the reader leaves: `async with`
    does that at once, a plain `async for` that breaks does it when this object is dropped.
    """

    def __init__(
        self,
        stub: SpeechAsyncStub,
        request: pb.GenerateRequest,
        timeout_s: float,
        running: set[grpc.aio.Call],
        traceparent: str = "",
    ) -> None:
        """`running`: the client's calls; this one is in it from its first read to its end."""
        if request.ByteSize() > MOST_REQUEST_BYTES:
            raise InvalidInput(
                Reason.PROMPT_TOO_LONG,
                f"prompt: the request has {request.ByteSize()} bytes, "
                f"more than the {MOST_REQUEST_BYTES} of a message",
            )
        # gRPC would take these for a deadline that has passed, or wait it out and send nothing.
        if not timeout_s < _MOST_TIMEOUT_S:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"timeout_s: {timeout_s} is not below {_MOST_TIMEOUT_S:g} seconds",
            )
        if not (traceparent.isascii() and traceparent.isprintable()):
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"traceparent: {traceparent!r} cannot be sent: it is no printable ASCII",
            )
        self.timing = StreamTiming()
        """Filled while events are read."""
        self._told = _Told()
        # The reader does not hold this object, so that dropping it ends the reader.
        call = partial(
            stub.Generate,
            request,
            timeout=timeout_s,
            metadata=(("traceparent", traceparent),) if traceparent else (),
        )
        self._events = _read_events(call, request, self.timing, self._told, running)

    @property
    def timeline(self) -> Timeline | None:
        """Where its time went, as far as it was told; None before its end, however it ends."""
        timing, told = self.timing, self._told
        if told.timeline is not None:
            return told.timeline
        if timing.sent_ns is None or timing.ended_ns is None:
            return None
        return make_timeline(timing.sent_ns, told.points, timing.ended_ns, finished=False)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event.

        Raises:
            GenerateError: the call failed.
        """
        return await anext(self._events)

    async def aclose(self) -> None:
        """Cancel the call unless it has ended."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


async def _read_events(
    start: Callable[[], grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]],
    request: pb.GenerateRequest,
    timing: StreamTiming,
    told: _Told,
    running: set[grpc.aio.Call],
) -> AsyncGenerator[Event, None]:
    """Make the call and read it to its end. Owns the call."""
    sent_ns = time.monotonic_ns()
    timing.sent_ns = sent_ns
    request.sent_ns = sent_ns
    call = start()
    running.add(call)
    finished = False
    try:
        async for response in call:
            if finished:
                raise broken_stream("the unit went on after Finished")
            now_ns = time.monotonic_ns()
            event = _decode_event(response, request.columns, sent_ns, now_ns)
            if isinstance(event, Rows):
                if event.first_index != timing.rows:
                    raise broken_stream(
                        f"rows.first_index: {event.first_index} follows {timing.rows} rows"
                    )
                timing.note_rows(len(event.rows), now_ns)
            elif isinstance(event, Finished):
                timing.finished_ns = timing.ended_ns = now_ns
                told.timeline = event.timeline
                finished = True
            else:
                told.points += [(point.name, point.at_ns) for point in response.started.timeline]
            yield event
        if not finished:
            raise broken_stream("the stream ended without Finished")
    except grpc.aio.AioRpcError as error:
        failure = from_rpc_error(error)
        told.points += failure.points_ns.items()
        raise failure from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled the reader: it was the call, by the client's close.
        raise GenerateError(
            grpc.StatusCode.CANCELLED, Reason.CANCELLED.value, "the client was closed"
        ) from error
    finally:
        if timing.ended_ns is None:
            timing.ended_ns = time.monotonic_ns()
        running.discard(call)
        call.cancel()


def _decode_event(response: pb.GenerateResponse, columns: int, sent_ns: int, now_ns: int) -> Event:
    if response.HasField("rows"):
        data = response.rows.rows
        if not data or len(data) % (4 * columns):
            raise broken_stream(f"rows.rows: {len(data)} bytes are not rows of {columns} columns")
        rows = np.frombuffer(data, dtype="<i4").reshape(-1, columns)
        return Rows(first_index=response.rows.first_index, rows=rows)
    if response.HasField("started"):
        return Started(request_id=response.started.request_id, seed=response.started.seed)
    if response.HasField("finished"):
        return _decode_finished(response.finished, sent_ns, now_ns)
    raise broken_stream("event: empty or of a kind unknown here")


def _decode_finished(finished: pb.Finished, sent_ns: int, now_ns: int) -> Finished:
    reason = _FINISH_REASONS.get(finished.reason)
    if reason is None:
        raise broken_stream(f"finished.reason: {finished.reason} is not known here")
    usage = finished.usage
    return Finished(
        reason=reason,
        usage=Usage(
            prompt_rows=usage.prompt_rows,
            cached_rows=usage.cached_rows,
            output_rows=usage.output_rows,
            kv_checks=usage.kv_checks,
        ),
        timeline=make_timeline(
            sent_ns,
            [(point.name, point.at_ns) for point in finished.timeline],
            now_ns,
            step_gaps_ns=tuple(finished.step_gaps_ns),
        ),
    )
