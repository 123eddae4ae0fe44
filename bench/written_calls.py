"""Many gRPC calls at once from a client that costs nothing: their bytes are made beforehand.

A client needs about as long for a call as a server that refuses it, and a burst's figures would
have that in them. Here the HTTP/2 frames of all calls stand ready, each connection's are written
at once, and of what comes back only the ends of streams are looked at.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME_HEAD_BYTES = 9
WINDOW_BYTES = 1 << 30
"""Of what may come to us."""
MOST_BYTES = 65_535
"""Of messages on one connection: HTTP/2's first window, for which nobody need wait."""
GIVE_UP_S = 30.0
SETTLE_S = 0.3
"""For both sides' settings, before the calls are written."""


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return len(data).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + data


def _header(name: str, value: str) -> bytes:
    """A literal that no table keeps."""
    return b"".join((b"\0", _text(name), _text(value)))


def _text(text: str) -> bytes:
    if len(text) > 126:
        raise ValueError(f"{text!r} does not fit one byte of length")
    return bytes((len(text),)) + text.encode()


def call_frames(method: str, messages: Sequence[bytes]) -> bytes:
    """A connection's calls of `method`, such as /package.Service/Method, one a message.

    Raises:
        ValueError: the messages are longer than a connection takes at once.
    """
    if sum(map(len, messages)) + 5 * len(messages) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes of messages on one connection")
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
    fields |= {"te": "trailers", "content-type": "application/grpc", "grpc-timeout": "60S"}
    head = b"".join(_header(name, value) for name, value in fields.items())
    parts = []
    for number, message in enumerate(messages):
        stream = 2 * number + 1
        parts.append(frame(HEADERS, END_HEADERS, stream, head))
        body = b"\0" + len(message).to_bytes(4) + message
        parts.append(frame(DATA, END_STREAM, stream, body))
    return b"".join(parts)


@dataclass
class Connection:
    """One connection and its calls. Owns its socket; `close` ends both."""

    address: tuple[str, int]
    calls: bytes
    ended_s: dict[int, float] = field(default_factory=dict)
    """By stream: the time at which it ended."""
    answered: set[int] = field(default_factory=set)
    """Streams with a message: of calls that were taken."""

    def __post_init__(self) -> None:
        self.socket = socket.create_connection(self.address, timeout=GIVE_UP_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        window = b"\0\x04" + WINDOW_BYTES.to_bytes(4)  # SETTINGS_INITIAL_WINDOW_SIZE
        more = frame(WINDOW_UPDATE, 0, 0, WINDOW_BYTES.to_bytes(4))
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        self.socket.sendall(preface + frame(SETTINGS, 0, 0, window) + more)
        self._unread = b""

    def take(self, data: bytes, now_s: float) -> None:
        """Look at what came.

        Raises:
            ConnectionError: nothing will come any more.
        """
        if not data:
            raise ConnectionError("the server has closed a connection")
        for kind, flags, stream, body in self._frames(data):
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.socket.sendall(frame(kind, ACK, 0, body if kind == PING else b""))
            elif kind == DATA:
                self.answered.add(stream)
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                self.ended_s[stream] = now_s

    def _frames(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        data, at = self._unread + data, 0
        while len(data) - at >= FRAME_HEAD_BYTES:
            end = at + FRAME_HEAD_BYTES + int.from_bytes(data[at : at + 3])
            if len(data) < end:
                break
            stream = int.from_bytes(data[at + 5 : at + FRAME_HEAD_BYTES])
            yield data[at + 3], data[at + 4], stream, data[at + FRAME_HEAD_BYTES : end]
            at = end
        self._unread = data[at:]


def refusal_times(address: str, method: str, connections: Iterable[Sequence[bytes]]) -> list[float]:
    """Write all calls and wait for the end of each: s from the first write, of those refused.

    `connections`: the messages of each connection's calls.

    Raises:
        ConnectionError, TimeoutError: the server does not answer them all.
    """
    host, _, port = address.rpartition(":")
    lines = [Connection((host, int(port)), call_frames(method, m)) for m in connections]
    try:
        with selectors.DefaultSelector() as selector:
            for line in lines:
                selector.register(line.socket, selectors.EVENT_READ, line)
            _read(selector, time.monotonic() + SETTLE_S)
            began_s = time.monotonic()
            for line in lines:
                line.socket.sendall(line.calls)
            calls = sum(line.calls.count(b":authority") for line in lines)
            _read(selector, began_s + GIVE_UP_S, lambda: _ended(lines) == calls)
    finally:
        for line in lines:
            line.socket.close()
    if _ended(lines) < calls:
        raise TimeoutError(f"{calls - _ended(lines)} of {calls} calls have not ended")
    return [
        ended_s - began_s
        for line in lines
        for stream, ended_s in line.ended_s.items()
        if stream not in line.answered
    ]


def _ended(lines: Iterable[Connection]) -> int:
    return sum(len(line.ended_s) for line in lines)


def _read(selector: Any, until_s: float, over: Any = lambda: False) -> None:
    """Hand what comes to its connection, until then or until it is over."""
    while not over() and (left_s := until_s - time.monotonic()) > 0:
        for key, _ in selector.select(left_s):
            key.data.take(key.fileobj.recv(1 << 20), time.monotonic())
