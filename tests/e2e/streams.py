"""Requests that tests send, and what came back of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from duplet_client import (
    AsyncClient,
    Finished,
    GenerateError,
    Rows,
    SamplingOptions,
    Started,
    rows_from_text,
)
from duplet_pages.engine_config import SPEAKING_MODEL
from duplet_pages.spec import ModelSpec

VOICES = ("ada", "bo", "cleo", "dee")
SPEAKERS = ("amber", "cedar", "slate", "robin")
"""For the model that speaks and knows its voices."""
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; equal asks get equal rows."""

    seed: int
    text: str = "a sentence to be spoken"
    max_rows: int = 120
    voice_rows: int = 64

    @property
    def voice(self) -> str:
        return VOICES[self.seed % len(VOICES)]

    def prompt(self, spec: ModelSpec) -> NDArray[np.int32]:
        """int32 [rows, columns]."""
        voices = SPEAKERS if spec.name == SPEAKING_MODEL else VOICES
        voice = voices[self.seed % len(voices)]
        return rows_from_text(spec, f"{self.text} {self.seed}", voice, self.voice_rows)


@dataclass(slots=True, eq=False)
class Stream:
    """What a client has of one request so far."""

    ask: Ask
    parts: list[NDArray[np.int32]] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    error: GenerateError | None = None
    request_id: str = ""
    sent_s: float = 0.0
    """When the call was made: wall clock, as in the services' logs."""
    over_s: float = 0.0
    """When the client had the end of it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def count(self) -> int:
        """Rows so far."""
        return sum(len(part) for part in self.parts)

    @property
    def rows(self) -> NDArray[np.int32]:
        """int32 [rows so far, columns]."""
        return np.concatenate(self.parts) if self.parts else np.zeros((0, 0), np.int32)

    @property
    def over(self) -> bool:
        return self.finished is not None or self.error is not None

    async def wait_rows(self, count: int) -> None:
        """Wait until it has so many rows.

        Raises:
            AssertionError: it ended before.
        """
        while self.count < count:
            assert not self.over, f"it ended with {self.count} rows: {self.error}"
            self.changed.clear()
            await self.changed.wait()

    async def read(
        self,
        client: AsyncClient,
        spec: ModelSpec,
        *,
        request_id: str = "",
        timeout_s: float = 60.0,
    ) -> Stream:
        """Make the call and read it to its end; an error is kept, not raised."""
        self.request_id = request_id
        self.sent_s = time.time()
        generation = client.generate(
            self.ask.prompt(spec),
            sampling=SamplingOptions(seed=self.ask.seed),
            max_rows=self.ask.max_rows,
            voice=self.ask.voice,
            request_id=request_id,
            timeout_s=timeout_s,
        )
        try:
            async with generation:
                async for event in generation:
                    if isinstance(event, Rows):
                        self.parts.append(event.rows)
                    elif isinstance(event, Started):
                        self.started = event
                    else:
                        self.finished = event
                    self.changed.set()
        except GenerateError as error:
            self.error = error
        finally:
            self.over_s = time.time()
            self.changed.set()
        return self


async def read_all(client: AsyncClient, spec: ModelSpec, asks: Iterable[Ask]) -> list[Stream]:
    """Send all at once and read all of them to their ends."""
    return await asyncio.gather(*(Stream(ask).read(client, spec) for ask in asks))


async def known_spec(client: AsyncClient) -> ModelSpec:
    spec = (await client.unit()).spec
    assert spec is not None
    return spec


def assert_same(stream: Stream, reference: Stream) -> None:
    """The stream ended well, with exactly the reference's rows and end."""
    assert stream.error is None, f"seed {stream.ask.seed}: {stream.error}"
    assert stream.finished is not None
    assert reference.finished is not None
    assert stream.finished.reason == reference.finished.reason
    np.testing.assert_array_equal(stream.rows, reference.rows)


def assert_prefix(stream: Stream, reference: Stream) -> None:
    """The stream's rows are right as far as they go, and its end is a success or a clear error."""
    if stream.error is None:
        assert_same(stream, reference)
        return
    assert_clear_error(stream)
    if stream.count:
        np.testing.assert_array_equal(stream.rows, reference.rows[: stream.count])


def assert_clear_error(stream: Stream) -> None:
    """If it failed, the error says why."""
    # The error of an lb that is gone is gRPC's own.
    error = stream.error
    assert error is None or error.reason or error.code.name == "UNAVAILABLE", str(error)


def is_prefix(stream: Stream, reference: Stream) -> bool:
    """Whether its rows are the reference's as far as they go; all of them, if it ended well."""
    if stream.error is None and stream.count != reference.count:
        return False
    return not stream.count or bool((stream.rows == reference.rows[: stream.count]).all())


class Load:
    """So many clients, each sending one request after the other until told to stop."""

    def __init__(self, address: str, spec: ModelSpec, asks: list[Ask], name: str = "") -> None:
        """`name`: begins the id of every request; empty: the unit mints ids."""
        self._address = address
        self._spec = spec
        self._asks = asks
        self._name = name
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.current: list[Stream] = [Stream(ask) for ask in asks]
        """The request that each client waits for now."""
        self.done: list[list[Stream]] = [[] for _ in asks]
        """By client, in order."""

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._send(i)) for i in range(len(self._asks))]
        return self

    async def __aexit__(self, *error: object) -> None:
        if any(error):
            for task in self._tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks)
        await self.stop()

    def send_no_more(self) -> None:
        """What each client waits for now is its last."""
        self._stopping = True

    async def stop(self) -> None:
        """Send nothing more; every client reads what it waits for to the end."""
        self.send_no_more()
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    async def wait_each(self, condition: Callable[[Stream], bool]) -> None:
        """Wait until the condition holds for every client's current request at once."""
        await self._wait(lambda: all(condition(stream) for stream in self.current))

    async def wait_mixed(self, coming: int = 1, rounds: int = 1) -> None:
        """Wait until every client has ended `rounds` requests, some requests have rows and
        `coming` are on their way to the first one."""
        await self._wait(
            lambda: (
                any(stream.count for stream in self.current)
                and sum(bool(s.started and not s.count) for s in self.current) >= coming
                and all(len(done) >= rounds for done in self.done)
            )
        )

    async def wait_new_successes(self) -> None:
        """Wait until every client finished well a request that it sent after this call."""
        marks = [len(done) + 1 for done in self.done]  # the current one was sent before
        await self._wait(
            lambda: all(
                any(s.error is None for s in done[mark:])
                for mark, done in zip(marks, self.done, strict=True)
            )
        )

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert not any(task.done() for task in self._tasks), "a client broke"
                await asyncio.sleep(0.01)

    async def _send(self, index: int) -> None:
        async with AsyncClient(self._address) as client:
            while not self._stopping:
                stream = self.current[index] = Stream(self._asks[index])
                number = len(self.done[index])
                request_id = f"{self._name}-{index}-{number}" if self._name else ""
                await stream.read(client, self._spec, request_id=request_id)
                self.done[index].append(stream)
                if stream.error is not None:
                    await asyncio.sleep(RETRY_S)  # As a client would that means to try again.
