"""Listening beside the event loop: processes of their own, so that it disturbs no time measured."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from duplet_canary.recognisers import RecogniserName, make_recogniser
from duplet_core.errors import Reason, Unavailable
from duplet_pages.spec import ModelSpec
from duplet_runtime.fate import die_with_parent

if TYPE_CHECKING:
    # Loaded by the listening processes alone.
    from duplet_canary.listener import Listener


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer by ear."""

    errors: int
    """Edits from what was heard to what was to be said."""
    length: int
    """Units (phonemes or words) of what was to be said."""
    voice: str
    """Whose voice it sounds like; empty where there was too little to tell."""


class Ear(Protocol):
    """Hears whole answers."""

    async def hear(self, rows: NDArray[np.int32], text: str) -> Heard:
        """What is heard in an answer to `text`: int32 [n, columns]."""


class EarPool:
    """Listeners in processes. Owns them from `async with` to its end."""

    def __init__(self, recogniser: RecogniserName, spec: ModelSpec, processes: int) -> None:
        """`spec`: of the built-in model whose rows are heard."""
        self._pool = ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_listener,
            initargs=(recogniser, spec),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    async def hear(self, rows: NDArray[np.int32], text: str) -> Heard:
        """As `Ear.hear`. Called in the process's main thread, on which listeners' lives depend.

        Raises:
            Unavailable: ENGINE_FAILED; a listening process is gone, and with it all of them.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, _hear, rows, text)
        except BrokenProcessPool as error:
            raise Unavailable(
                Reason.ENGINE_FAILED, "a listening process was killed, or could not start"
            ) from error


_listener: Listener | None = None
"""Of a listening process; owned by it, for life."""


def _start_listener(recogniser: RecogniserName, spec: ModelSpec) -> None:
    """First thing in a listening process. Ctrl-C is its parent's, who still needs it."""
    global _listener
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import duplet_models
    from duplet_canary.listener import Listener
    from duplet_voice.codec import load_codec
    from duplet_voice.voices import load_voices

    model = duplet_models.directory(spec.name)
    _listener = Listener(spec, make_recogniser(recogniser), load_codec(model), load_voices(model))


def _hear(rows: NDArray[np.int32], text: str) -> Heard:
    assert _listener is not None
    return _listener.hear(rows, text)
