"""The long-lived bidirectional streams that join peers: `Dialer` at one end, `Acceptor` at the
other.

Both hand events to `on_event`, synchronously and in order per stream, and take `send` and
`close`, which never wait. Runtime moves messages and numbers streams; what a Hello means, core
alone knows.

A stream at the dialer: StreamOpened, Received…, StreamClosed. At the acceptor: Received (a
Hello first)…, StreamClosed; a stream that brings no Hello is never told of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc.aio

from duplet_core.effects import Received, StreamClosed, StreamOpened
from duplet_core.errors import Reason, Unavailable
from duplet_core.ids import Role
from duplet_core.messages import Hello, Message
from duplet_runtime.logs import get_logger
from duplet_runtime.machine import FatalErrors
from duplet_runtime.peer_stream import OUTBOX_MESSAGES, PeerStream, StreamEnd
from duplet_runtime.server import peer_channel_options
from duplet_runtime.status import abort

P = TypeVar("P")
PeerEvent = StreamOpened | Received | StreamClosed

BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 1.0

HELLO_LIMIT_S = 2.0
"""A stream that has not brought its Hello by then is closed."""

MAX_HALF_OPEN = 8
"""Streams of one acceptor that wait for their Hello; one more is refused."""

MAX_STREAMS = 64
"""Calls of one acceptor, ended ones whose dialer reads nothing included; one more is refused."""

_log = get_logger("duplet.peers")


class Dialer(Generic[P]):
    """Keeps one stream open to a peer, for ever, also when nothing is to be said.

    Streams are numbered 1, 2, 3 … over the dialer's life. Between two streams it waits 100 ms,
    doubled up to 1 s while streams end without having brought a message.
    """

    def __init__(
        self,
        peer: Role,
        address: str,
        method: Callable[[grpc.aio.Channel], Any],
        encode: Callable[[Message], P],
        decode: Callable[[P], Message],
        on_event: Callable[[PeerEvent], None],
        outbox: int = OUTBOX_MESSAGES,
        together: bool = False,
    ) -> None:
        """`method` picks the bidirectional method of a stub: `lambda c: PrefillStub(c).Peer`.
        `together`: as in PeerStream.

        `decode` raises RemoteProtocolError for a malformed message: the stream is closed.
        """
        self._peer = peer
        self._address = address
        self._method = method
        self._encode = encode
        self._decode = decode
        self._on_event = on_event
        self._outbox = outbox
        self._together = together
        self._number = 0
        self._stream: PeerStream[P] | None = None

    async def run(self) -> None:
        """Dial and redial; ends only by being cancelled, with stream and channel closed.

        Raises:
            Exception: whatever `on_event` raised.
        """
        channel = grpc.aio.insecure_channel(self._address, options=peer_channel_options())
        method = self._method(channel)
        backoff_s = BACKOFF_FIRST_S
        try:
            while True:
                await channel.channel_ready()
                was_used = await self._one_stream(method)
                backoff_s = BACKOFF_FIRST_S if was_used else min(2 * backoff_s, BACKOFF_MOST_S)
                await asyncio.sleep(backoff_s)
        finally:
            await channel.close()

    def send(self, stream: int, message: Message) -> None:
        """Queue a message; dropped when `stream` is gone. A full outbox ends the stream."""
        if self._stream is not None and self._stream.number == stream:
            self._stream.put(self._encode(message))

    def close(self, stream: int, reason: Reason, detail: str) -> None:
        """End the stream; a caller cannot give the peer a reason, so it is logged."""
        if self._stream is not None and self._stream.number == stream:
            self._stream.finish(reason, detail)

    async def _one_stream(self, method: Any) -> bool:
        """One stream from call to end; whether it brought a message."""
        self._number += 1
        number = self._number
        stream = PeerStream(number, self._decode, self._outbox, self._together)
        was_used = False

        def take(message: Message) -> None:
            nonlocal was_used
            was_used = True
            self._on_event(Received(self._peer, number, message))

        call = method()
        why = ""
        try:
            self._stream = stream
            self._on_event(StreamOpened(self._peer, number))
            end = await stream.run(call.read, call.write, take)
            _log_end(self._peer, number, end)
            why = end.detail
        finally:
            call.cancel()
            self._stream = None
            self._on_event(StreamClosed(self._peer, number, why))
            await stream.drop_write()
        return was_used


class Acceptor(Generic[P]):
    """Takes the streams of one role of peers; a servicer's method awaits `serve(context)`.

    Streams get local numbers 1, 2, 3 … in the order in which they arrive.
    """

    def __init__(
        self,
        peer: Role,
        encode: Callable[[Message], P],
        decode: Callable[[P], Message],
        on_event: Callable[[PeerEvent], None],
        on_fatal: Callable[[BaseException], None],
        hello_limit_s: float = HELLO_LIMIT_S,
        outbox: int = OUTBOX_MESSAGES,
        together: bool = False,
    ) -> None:
        """`on_fatal` hears of what `on_event` raised, for gRPC would keep it to itself.
        `together`: as in PeerStream."""
        self._peer = peer
        self._encode = encode
        self._decode = decode
        self._on_event = on_event
        self._on_fatal = on_fatal
        self._hello_limit_s = hello_limit_s
        self._outbox = outbox
        self._together = together
        self._number = 0
        self._half_open: set[int] = set()
        self._streams: dict[int, PeerStream[P]] = {}
        self._calls = 0
        self._closing: Unavailable | None = None

    def send(self, stream: int, message: Message) -> None:
        """Queue a message; dropped when `stream` is gone. A full outbox ends the stream."""
        if stream in self._streams:
            self._streams[stream].put(self._encode(message))

    def close(self, stream: int, reason: Reason, detail: str) -> None:
        """End the stream; the dialer gets the reason as the call's status."""
        if stream in self._streams:
            self._streams[stream].finish(reason, detail)

    def close_all(self, reason: Reason, detail: str) -> None:
        """End all streams, each when its last message is written, and refuse new ones; before
        the server stops, whose grace bounds the time that a peer gets which does not read."""
        self._closing = Unavailable(reason, detail)
        for stream in self._streams.values():
            stream.finish_when_sent(reason, detail)

    async def serve(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One incoming stream from its first message to its end.

        Raises:
            grpc.aio.AbortError: the stream was refused, or closed with a reason.
        """
        if self._closing is not None:
            await abort(context, self._closing)
        if len(self._half_open) >= MAX_HALF_OPEN or self._calls >= MAX_STREAMS:
            await abort(context, Unavailable(Reason.OVERLOADED, "too many peer streams"))
        self._calls += 1
        try:
            end = await self._serve_stream(context)
            if end.reason is not None:
                await abort(context, Unavailable(end.reason, end.detail))
        finally:
            self._calls -= 1

    async def _serve_stream(self, context: grpc.aio.ServicerContext[Any, Any]) -> StreamEnd:
        """One stream, told of from Hello to end; returns when gRPC can take a status."""
        self._number += 1
        number = self._number
        stream = PeerStream(number, self._decode, self._outbox, self._together)
        self._streams[number] = stream
        self._half_open.add(number)
        try:
            with FatalErrors(self._on_fatal):
                end = await self._run_stream(stream, context)
        finally:
            del self._streams[number]
            if number in self._half_open:
                self._half_open.discard(number)
            else:
                with FatalErrors(self._on_fatal):
                    self._on_event(StreamClosed(self._peer, number))
            await stream.settle()
        _log_end(self._peer, number, end)
        return end

    async def _run_stream(
        self, stream: PeerStream[P], context: grpc.aio.ServicerContext[Any, Any]
    ) -> StreamEnd:
        number = stream.number

        def take(message: Message) -> None:
            if number in self._half_open:
                if not isinstance(message, Hello):
                    stream.finish(Reason.PEER_PROTOCOL, f"{type(message).__name__} before Hello")
                    return
                self._half_open.discard(number)
                late.cancel()
            self._on_event(Received(self._peer, number, message))

        late = asyncio.get_running_loop().call_later(
            self._hello_limit_s,
            stream.finish,
            Reason.PEER_PROTOCOL,
            f"no Hello within {self._hello_limit_s} s",
        )
        try:
            return await stream.run(context.read, context.write, take)
        finally:
            late.cancel()


def _log_end(peer: Role, number: int, end: StreamEnd) -> None:
    _log.info("stream ended", peer=peer, stream=number, reason=end.reason, detail=end.detail)
