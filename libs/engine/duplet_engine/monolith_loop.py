"""The monolith's loop: prompts and streams by turns, in one engine over one pool.

A turn is one decode step of all streams and one chunk of one prompt, on a GPU one pass over
several. The chunk's size is the whole policy: `chunk_rows` beyond the longest prompt computes
whole prompts between decode steps, and every stream waits for them; small chunks mix prompts
with decode steps.
"""

from __future__ import annotations

from typing import Protocol

from duplet_core.engine import Shutdown, Start, Stop, ToEngine
from duplet_core.errors import require
from duplet_engine.link import Link


class Half(Protocol):
    """A prefill loop's or a decode loop's state, on the CPU or on a GPU."""

    @property
    def busy(self) -> bool: ...
    def handle(self, message: ToEngine) -> bool: ...
    def step(self) -> None: ...


class MonolithLoop:
    """Both loops' states, stepped by turns. A prompt's seq and its stream's are two."""

    def __init__(self, link: Link, prefill: Half, decode: Half) -> None:
        self._link = link
        self._prefill = prefill
        self._decode = decode

    def run(self) -> None:
        """Serve until Shutdown. Blocks on the link while there is nothing to do."""
        while self.receive():
            self.step()

    def receive(self) -> bool:
        """Take the messages that wait; with nothing to do, wait for one. False at Shutdown."""
        busy = self._prefill.busy or self._decode.busy
        messages = self._link.poll() if busy else self._link.wait()
        return all(self._handle(message) for message in messages)

    def step(self) -> None:
        """A row for each stream, then a chunk of the prompt whose turn it is."""
        self._decode.step()
        self._prefill.step()

    def _handle(self, message: ToEngine) -> bool:
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, Stop):
            # Open in one of them at most; the other ignores it.
            return self._prefill.handle(message) and self._decode.handle(message)
        require(isinstance(message, Start), f"{type(message).__name__} is for a landed transfer")
        assert isinstance(message, Start)
        loop = self._decode if message.max_rows else self._prefill
        return loop.handle(message)
