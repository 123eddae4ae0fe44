"""The I/O process's end of the engine link, on the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from duplet_core.engine import FromEngine, ToEngine
from duplet_runtime.engine_link import encode_frame, read_from_engine, receive_some

OUTBOX_BYTES = 64 << 20
"""What may wait for an engine that is inside a step: dozens of the longest prompts."""

READS_A_TURN = 8
"""Reads before the loop gets its turn again."""


class LinkOverflow(Exception):
    """The engine has not read for so long that the bound of waiting bytes is reached."""


class AsyncLink:
    """Sends without waiting, receives by callback. Owns the socket; lives in one event loop.

    `on_message(message, fds)` owns `fds`. `on_closed()` is called once, at the engine's end of
    file, after the last message; not after `close`. A LinkBroken is raised into the event loop,
    whose exception handler ends the service.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[FromEngine, tuple[int, ...]], None],
        on_closed: Callable[[], None],
    ) -> None:
        """Takes over `sock`, a connected Unix stream socket."""
        sock.setblocking(False)
        self._sock = sock
        self._on_message = on_message
        self._on_closed = on_closed
        self._reader = read_from_engine()
        self._outbox = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._read)
        self._open = True

    def send(self, message: ToEngine) -> None:
        """Queue a message; dropped when the engine is gone, which `on_closed` tells.

        Raises:
            LinkOverflow: more than OUTBOX_BYTES would wait.
        """
        if not self._open:
            return
        frame = encode_frame(message)
        if len(self._outbox) + len(frame) > OUTBOX_BYTES:
            raise LinkOverflow(f"{len(self._outbox)} bytes wait for the engine")
        waits = bool(self._outbox)
        self._outbox += frame
        if not waits:
            self._write()

    def close(self) -> None:
        """Close the socket; what waits is lost."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._reader.close()

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            # The reader meets the end of file and tells it, after the engine's last messages.
            self._outbox.clear()
            sent = 0
        del self._outbox[:sent]
        if self._outbox:
            self._loop.add_writer(self._sock.fileno(), self._write)
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        for _ in range(READS_A_TURN):
            try:
                data, fds = receive_some(self._sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, fds = b"", []
            if not data:
                self.close()
                self._on_closed()
                return
            for arrival in self._reader.feed(data, fds):
                self._on_message(arrival.message, arrival.fds)
                if not self._open:
                    return
