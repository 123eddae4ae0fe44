"""One side of the comparison: what it is asked and what it answers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from duplet_client import AsyncClient, Finished, GenerateError, Rows, SamplingOptions
from duplet_core.errors import Reason
from duplet_pages.spec import ModelSpec

NOT_NOW = (Reason.OVERLOADED, Reason.NOT_READY, Reason.DRAINING, Reason.QUARANTINE)
"""Reasons that speak of load, not of quality."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to one side."""

    prompt: NDArray[np.int32]
    """[rows, columns]."""
    voice: str
    seed: int
    max_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Spoken:
    """One side's answer. Times in seconds; None where they were not reached."""

    rows: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    """[n, columns]."""
    finish: str = ""
    """STOP or LENGTH; empty after an error."""
    ttft_s: float | None = None
    ttfa_s: float | None = None
    rows_per_second: float | None = None
    error: str = ""
    """A reason, where the request failed."""

    @property
    def digest(self) -> str:
        """Names rows and end: 16 hexadecimal digits."""
        data = np.ascontiguousarray(self.rows, dtype="<i4").tobytes() + self.finish.encode()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def says_the_same_as(self, other: Spoken) -> bool:
        """Whether every integer of every row is equal, and the end too."""
        return self.finish == other.finish and np.array_equal(self.rows, other.rows)


class Speaker(Protocol):
    """Answers requests; a failed one is an answer with an error."""

    async def say(self, ask: Ask) -> Spoken: ...


class GrpcSpeaker:
    """The unit or monolith at an address. Uses the client; owned by whoever made that."""

    def __init__(self, client: AsyncClient, spec: ModelSpec, timeout_s: float) -> None:
        self._client = client
        self._columns = spec.columns
        self._timeout_s = timeout_s

    async def say(self, ask: Ask) -> Spoken:
        generation = self._client.generate(
            ask.prompt,
            sampling=SamplingOptions(seed=ask.seed),
            max_rows=ask.max_rows,
            voice=ask.voice,
            timeout_s=self._timeout_s,
        )
        pieces = [np.empty((0, self._columns), np.int32)]
        finish = ""
        try:
            async with generation:
                async for event in generation:
                    if isinstance(event, Rows):
                        pieces.append(event.rows)
                    elif isinstance(event, Finished):
                        finish = event.reason.value
        except GenerateError as error:
            return Spoken(error=error.reason or error.code.name)
        timing = generation.timing
        return Spoken(
            rows=np.concatenate(pieces),
            finish=finish,
            ttft_s=timing.ttft_s,
            ttfa_s=timing.ttfa_s,
            rows_per_second=timing.rows_per_second,
        )
