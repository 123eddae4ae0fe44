"""The wire between an I/O process and its engine process: codec, frames, the engine's end.

One Unix stream socket pair. A frame is a header (body length, type index, number of
descriptors), then the message as MessagePack; descriptors travel with the header's first byte
(SCM_RIGHTS). The type index is a message's place in the closed unions of
`duplet_core.engine`: both processes start from one installation, so it needs no version.

The engine process imports this module; it must stay free of asyncio and gRPC.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import typing
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from duplet_core.engine import EngineMessage, FromEngine, ToEngine
from duplet_core.errors import require

MESSAGE_BYTES = 8 << 20
"""Longest body: eight times the longest peer message, which carries the longest prompt."""

MAX_FDS = 4
"""Most descriptors beside one message."""

READ_BYTES = 1 << 18

_HEADER = struct.Struct("<IBB")
_TO_ENGINE: tuple[type, ...] = typing.get_args(ToEngine)
_FROM_ENGINE: tuple[type, ...] = typing.get_args(FromEngine)
_TYPES = (*_TO_ENGINE, *_FROM_ENGINE)
_INDEX = {kind: index for index, kind in enumerate(_TYPES)}
# Making a decoder checks that msgspec knows every field's type.
_DECODERS: tuple[msgspec.msgpack.Decoder[typing.Any], ...] = tuple(
    msgspec.msgpack.Decoder(kind) for kind in _TYPES
)
_ENCODER = msgspec.msgpack.Encoder()
require(
    set(_TYPES) == set(typing.get_args(EngineMessage)) and len(_INDEX) == len(_TYPES),
    "the table of engine messages is not the closed union",
)

M = TypeVar("M")


class LinkClosed(Exception):
    """The other process closed the link, by exit or by intent."""


class LinkBroken(Exception):
    """Bytes that are no message of this link: the two processes do not agree."""


def encode_frame(message: EngineMessage, fd_count: int = 0) -> bytes:
    """One message as a frame.

    Raises:
        LinkBroken: the message is longer than MESSAGE_BYTES.
    """
    body = _ENCODER.encode(message)
    if len(body) > MESSAGE_BYTES:
        raise LinkBroken(f"{type(message).__name__} of {len(body)} bytes is too long")
    return _HEADER.pack(len(body), _INDEX[type(message)], fd_count) + body


class Arrival(NamedTuple, Generic[M]):
    """A message with the descriptors that came with it, owned by who takes it."""

    message: M
    fds: tuple[int, ...]


class FrameReader:
    """Bytes and descriptors in, messages of one direction out.

    Owns the descriptors of messages that are not complete yet.
    """

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._allowed = frozenset(_INDEX[kind] for kind in kinds)
        self._buffer = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: Sequence[int]) -> list[Arrival[typing.Any]]:
        """Messages completed by `data`, in order.

        Raises:
            LinkBroken: a frame of the wrong direction, malformed, or too long.
        """
        self._fds.extend(fds)
        self._buffer += data
        arrivals: list[Arrival[typing.Any]] = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _HEADER.size:
                length, index, fd_count = _HEADER.unpack_from(view, start)
                if index not in self._allowed or length > MESSAGE_BYTES:
                    raise LinkBroken(f"frame of type {index} and {length} bytes")
                body = start + _HEADER.size
                if len(view) - body < length:
                    break
                arrivals.append(self._decode(index, view[body : body + length], fd_count))
                start = body + length
        del self._buffer[:start]
        return arrivals

    def close(self) -> None:
        """Close descriptors that no message took."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _decode(self, index: int, body: memoryview, fd_count: int) -> Arrival[typing.Any]:
        if fd_count > len(self._fds):
            raise LinkBroken(f"{_TYPES[index].__name__} without its descriptors")
        fds = tuple(self._fds[:fd_count])
        try:
            with body:
                message = _DECODERS[index].decode(body)
        except msgspec.MsgspecError as error:
            raise LinkBroken(f"{_TYPES[index].__name__}: {error}") from error
        del self._fds[:fd_count]
        return Arrival(message, fds)


def read_from_engine() -> FrameReader:
    """A reader for the I/O process's end."""
    return FrameReader(_FROM_ENGINE)


def receive_fds(
    sock: socket.socket, size: int, most_fds: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """One recvmsg: bytes, descriptors (close-on-exec, owned by the caller) and answer flags.

    Not `socket.recv_fds`, which takes flags and drops them: it blocks where MSG_DONTWAIT was
    asked for, and the descriptors would be inherited by children.
    """
    fds = array.array("i")
    room = socket.CMSG_SPACE(most_fds * fds.itemsize)
    data, ancillary, answer, _ = sock.recvmsg(size, room, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), answer


def receive_some(sock: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """One recvmsg: bytes (none at EOF) and the descriptors with them, close-on-exec.

    Raises:
        BlockingIOError: nothing waits and the socket or `flags` do not block.
        LinkBroken: descriptors were lost.
    """
    data, fds, answer = receive_fds(sock, READ_BYTES, MAX_FDS, flags)
    if answer & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise LinkBroken("more descriptors than a message may carry")
    return data, fds


class BlockingLink:
    """The engine's end. Not for threads; owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over `sock`, a connected Unix stream socket."""
        sock.setblocking(True)
        self._sock = sock
        self._reader = FrameReader(_TO_ENGINE)
        self._ready: list[ToEngine] = []
        self._at_end = False

    @staticmethod
    def from_fd(fd: int) -> BlockingLink:
        """Takes over an inherited descriptor; the engine's children would not inherit it."""
        os.set_inheritable(fd, False)
        return BlockingLink(socket.socket(fileno=fd))

    def poll(self) -> list[ToEngine]:
        """All messages that wait, in order; never blocks.

        Raises:
            LinkClosed: the I/O process is gone and every message before was handed out.
            LinkBroken: the bytes are no messages.
        """
        while not self._at_end and self._receive(socket.MSG_DONTWAIT):
            pass
        messages, self._ready = self._ready, []
        if not messages and self._at_end:
            raise LinkClosed("the I/O process closed the link")
        return messages

    def wait(self) -> list[ToEngine]:
        """As `poll`, but blocks until there is at least one."""
        while not self._ready and not self._at_end:
            self._receive(0)
        return self.poll()

    def send(self, message: FromEngine, fds: Sequence[int] = ()) -> None:
        """Send; blocks while the I/O process, which always reads, is behind. The caller keeps
        its descriptors.

        Raises:
            LinkClosed: the I/O process is gone.
        """
        frame = encode_frame(message, len(fds))
        try:
            sent = socket.send_fds(self._sock, [frame], list(fds)) if fds else 0
            self._sock.sendall(memoryview(frame)[sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise LinkClosed("the I/O process closed the link") from error

    def close(self) -> None:
        self._sock.close()
        self._reader.close()

    def _receive(self, flags: int) -> bool:
        """One read; False when nothing waited."""
        try:
            data, fds = receive_some(self._sock, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._at_end = True
            return False
        for message, unexpected in self._reader.feed(data, fds):
            if unexpected:
                raise LinkBroken(f"descriptors beside {type(message).__name__}")
            self._ready.append(message)
        return True
