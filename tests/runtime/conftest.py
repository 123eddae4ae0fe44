"""What the tests of the chassis share."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from duplet_core.effects import StreamClosed


class Record(list[Any]):
    """What callbacks told, in order; a test waits until it says what the test is after."""

    def __init__(self) -> None:
        super().__init__()
        self.whys: list[str] = []
        """Why streams ended: apart, for the words are gRPC's where we dialed."""
        self._changed = asyncio.Event()

    def take(self, *what: Any) -> bool:
        """True: what was told is welcome, where a callback is asked that."""
        event = what[0] if len(what) == 1 else what
        if isinstance(event, StreamClosed):
            self.whys.append(event.detail)
            event = StreamClosed(event.peer, event.stream)
        self.append(event)
        self._changed.set()
        return True

    async def until(self, condition: Callable[[list[Any]], bool]) -> None:
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()


@pytest.fixture
def record() -> Callable[[], Record]:
    return Record


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder with a short path, for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="dup-"))
    yield path
    shutil.rmtree(path)
