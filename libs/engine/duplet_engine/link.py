"""What the loops need of the link to the I/O process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from duplet_core.engine import FromEngine, ToEngine


class Link(Protocol):
    """`duplet_runtime.engine_link.BlockingLink`, or a fake of it in tests."""

    def poll(self) -> list[ToEngine]:
        """All messages that wait; never blocks."""
        ...

    def wait(self) -> list[ToEngine]:
        """Block until a message is there; all that wait then."""
        ...

    def send(self, message: FromEngine, fds: Sequence[int] = ()) -> None:
        """Send a message, with descriptors lent for the call."""
        ...
