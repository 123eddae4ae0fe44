"""One peer stream while it is open: a reader task, a writer task, a bounded outbox.

Shared by both ends; `peers` gives it the calls to read and write with. A stream ends once,
for the first cause that comes: the other end, our close, a malformed message, an outbox that
overflows. What is then still in the outbox is lost, as it would be with a broken connection;
a service that leaves in peace ends its streams with `finish_when_sent`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from duplet_core.errors import Reason, RemoteProtocolError
from duplet_core.messages import Message

OUTBOX_MESSAGES = 1024
"""Messages that wait for a peer that does not read; one more ends the stream."""
OUTBOX_ANSWERS = 131_072
"""The same where messages go together. A Hello lists as many transfers as a message has room for,
and each of them is answered at once: that many may wait though the peer reads."""

TOGETHER_MESSAGES = 32
TOGETHER_BYTES = 64 << 10
"""So many waiting messages at most go out as one: gRPC takes several times as long to carry a
message as core takes to act on it. Larger ones go alone. A peer that puts more messages into one
is refused."""

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why a stream ended. `reason` is None when the other end finished or broke it."""

    reason: Reason | None
    detail: str


class PeerStream(Generic[P]):
    """One open stream. Owns its reader and writer task while `run` runs."""

    def __init__(
        self, number: int, decode: Callable[[P], Message], outbox: int, together: bool
    ) -> None:
        """`together`: messages have a field `more`, repeated, of their own kind."""
        self.number = number
        self._decode = decode
        self._together = together
        self._outbox: deque[P] = deque()
        self._outbox_size = outbox
        self._filled = asyncio.Event()
        self._end: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        # Owned here from `run` to `settle` or `drop_write`.
        self._writer: asyncio.Task[None] | None = None
        self._in_write = False
        self._last: StreamEnd | None = None
        """The end that comes when the outbox is written."""

    @property
    def ended(self) -> bool:
        """True from the first cause of an end on; nothing is sent or received any more."""
        return self._end.done()

    def put(self, proto: P) -> None:
        """Queue one message; ends the stream when the outbox is full."""
        if self.ended:
            return
        if len(self._outbox) < self._outbox_size:
            self._outbox.append(proto)
            self._filled.set()
        else:
            self.finish(
                Reason.PEER_PROTOCOL, f"{self._outbox_size} messages wait; the peer reads none"
            )

    def finish(self, reason: Reason | None, detail: str) -> None:
        """End the stream; only the first cause counts."""
        if not self.ended:
            self._end.set_result(StreamEnd(reason, detail))

    def finish_when_sent(self, reason: Reason | None, detail: str) -> None:
        """End the stream when all that was put is written; any other cause may come first."""
        if not self._outbox and not self._in_write:
            self.finish(reason, detail)
        else:
            self._last = StreamEnd(reason, detail)

    async def run(
        self,
        read: Callable[[], Awaitable[object]],
        write: Callable[[P], Awaitable[None]],
        take: Callable[[Message], None],
    ) -> StreamEnd:
        """Read and write until the stream ends; `settle` or `drop_write` must follow.

        `take` gets every message in the order of arrival, until the stream has an end. Reading
        is not possible any more then; a write may still be under way.

        Raises:
            Exception: whatever `take` raised.
        """
        reader = asyncio.create_task(self._read_all(read, take))
        self._writer = asyncio.create_task(self._write_all(write))
        try:
            waited: set[asyncio.Future[Any]] = {reader, self._writer, self._end}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.finish(None, "the service stopped")
            reader.cancel()
            if not self._in_write:
                self._writer.cancel()
            await asyncio.wait({reader})
        if not reader.cancelled() and (error := reader.exception()) is not None:
            raise error
        return self._end.result()

    async def settle(self) -> None:
        """Wait for the write that was under way when the stream ended.

        gRPC takes no status from a handler while a write is pending, and a cancelled write
        stays pending. With a peer that reads nothing this lasts until its connection ends.
        """
        if self._writer is None:
            return
        try:
            await asyncio.wait({self._writer})
        finally:
            self._writer.cancel()
        if not self._writer.cancelled():
            self._writer.result()

    async def drop_write(self) -> None:
        """Give up the write that was under way when the stream ended: for who cancelled the call.

        gRPC's write first waits until the call's headers have left. They never leave when the call
        is cancelled before, and that write waits for ever.
        """
        if self._writer is None:
            return
        self._writer.cancel()
        await asyncio.wait({self._writer})
        if not self._writer.cancelled():
            self._writer.result()

    async def _read_all(
        self, read: Callable[[], Awaitable[object]], take: Callable[[Message], None]
    ) -> None:
        while not self.ended:
            try:
                proto = await read()
            except (grpc.RpcError, grpc.aio.BaseError) as error:
                self.finish(None, _describe(error))
                return
            except asyncio.CancelledError:
                # Ours, or the call's own: gRPC cancels a read when its call is cancelled.
                self.finish(None, "the call was cancelled")
                raise
            if self.ended:
                return
            if proto is grpc.aio.EOF:
                self.finish(None, "the peer closed the stream")
                return
            if proto is None or isinstance(proto, DecodeError):
                # Bytes that are no protobuf: None comes from gRPC's calls, the error from ours.
                self.finish(Reason.PEER_PROTOCOL, "message: no valid protobuf")
                return
            self._take_all(proto, take)

    def _take_all(self, proto: Any, take: Callable[[Message], None]) -> None:
        """Hand on a message and those that came with it, until the stream has an end."""
        following = proto.more if self._together else ()
        if len(following) >= TOGETHER_MESSAGES:  # they are acted on in one turn of the loop
            detail = f"message.more: {len(following)} messages behind one"
            self.finish(Reason.PEER_PROTOCOL, f"{detail}, most are {TOGETHER_MESSAGES - 1}")
            return
        for part in (proto, *following):
            if self.ended:
                return
            try:
                if part is not proto and part.more:
                    raise RemoteProtocolError("message.more: one of these has more")
                message = self._decode(part)
            except RemoteProtocolError as error:
                self.finish(error.reason, error.detail)
                return
            take(message)

    async def _write_all(self, write: Callable[[P], Awaitable[None]]) -> None:
        while not self.ended:
            while not self._outbox:
                self._filled.clear()
                await self._filled.wait()
            self._in_write = True
            try:
                await write(self._take_waiting())
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
                self.finish(None, _describe(error))
            self._in_write = False
            if self._last is not None and not self._outbox:
                self.finish(self._last.reason, self._last.detail)

    def _take_waiting(self) -> P:
        """The outbox's first message, with what waits behind it where that goes together."""
        first: Any = self._outbox.popleft()
        if self._together and self._outbox:
            count, room = 1, TOGETHER_BYTES - first.ByteSize()
            while self._outbox and count < TOGETHER_MESSAGES:
                following: Any = self._outbox[0]
                room -= following.ByteSize()
                if room < 0:
                    break
                first.more.append(self._outbox.popleft())
                count += 1
        result: P = first
        return result


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
