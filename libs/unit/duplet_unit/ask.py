"""One request from the command line: its prompt, its rows, and what it measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_client import (
    AsyncClient,
    Finished,
    Rows,
    SamplingOptions,
    Started,
    StreamTiming,
    front_end,
    rows_from_text,
)
from duplet_client.front_end import DEFAULT_VOICE_ROWS
from duplet_core.errors import InvalidInput, Reason, Unavailable
from duplet_pages.spec import ModelSpec
from duplet_unit.waterfall import milliseconds


@dataclass(frozen=True, slots=True)
class Ask:
    """What to send."""

    prompt: NDArray[np.int32]
    """[rows, columns]."""
    voice: str
    sampling: SamplingOptions
    max_rows: int | None
    timeout_s: float
    request_id: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What came back of a request that ended well."""

    started: Started
    voice: str
    rows: NDArray[np.int32]
    """[output rows, columns]."""
    finished: Finished
    timing: StreamTiming
    client_ns: int
    """From before the call to its last event, by this side's own clock."""

    def to_fields(self) -> dict[str, Any]:
        """The answer as JSON has it, without its rows."""
        return {
            "request_id": self.started.request_id,
            "seed": self.started.seed,
            "voice": self.voice,
            "reason": self.finished.reason.value,
            "usage": asdict(self.finished.usage),
            "ttft_s": self.timing.ttft_s,
            "ttfa_s": self.timing.ttfa_s,
            "rows_per_second": self.timing.rows_per_second,
            "client_ns": self.client_ns,
            "timeline": self.finished.timeline.to_fields(),
        }

    def summary(self) -> str:
        """The answer in one line."""
        usage = self.finished.usage
        return (
            f"{self.finished.reason.value}: {usage.output_rows} rows in "
            f"{milliseconds(self.client_ns)} ms, {describe_progress(self.timing)}; prompt "
            f"{usage.prompt_rows} rows ({usage.cached_rows} cached), {usage.kv_checks} kv checks; "
            f"seed {self.started.seed}"
        )


async def run_request(
    client: AsyncClient, ask: Ask, on_rows: Callable[[StreamTiming], None]
) -> Answer:
    """Send a request and read it to its end; `on_rows` hears of every message of rows.

    Raises:
        GenerateError: the unit refused it, or it failed.
        InvalidInput: it cannot be sent; the detail names the value.
    """
    began_ns = time.monotonic_ns()
    generation = client.generate(
        ask.prompt,
        sampling=ask.sampling,
        max_rows=ask.max_rows,
        voice=ask.voice,
        request_id=ask.request_id,
        timeout_s=ask.timeout_s,
    )
    started: Started | None = None
    finished: Finished | None = None
    client_ns = 0
    pieces = [np.empty((0, ask.prompt.shape[1]), dtype=np.int32)]
    async with generation:
        async for event in generation:
            if isinstance(event, Rows):
                pieces.append(event.rows)
                on_rows(generation.timing)
            elif isinstance(event, Started):
                started = event
            else:
                finished = event
                client_ns = time.monotonic_ns() - began_ns
    if started is None or finished is None:
        raise Unavailable(Reason.PEER_PROTOCOL, "the stream had no Started or no Finished")
    rows = np.concatenate(pieces)
    return Answer(started, ask.voice, rows, finished, generation.timing, client_ns)


async def known_spec(client: AsyncClient) -> ModelSpec:
    """The unit's model.

    Raises:
        GenerateError: the unit does not answer.
        Unavailable: NOT_READY; it does not know its model yet.
    """
    spec = (await client.unit()).spec
    if spec is None:
        raise Unavailable(Reason.NOT_READY, "the unit does not know its model yet")
    return spec


def prompt_from_text(
    spec: ModelSpec, text: str, voice: str, voice_rows: int = DEFAULT_VOICE_ROWS
) -> tuple[NDArray[np.int32], str]:
    """A prompt, int32 [rows, columns], and what whoever hears the output must know.

    `voice_rows`: length of the voice's reference, where the front end makes one up.

    Raises:
        InvalidInput: the model has no text front end, or the text does not suit it.
    """
    rows = rows_from_text(spec, text, voice, voice_rows)
    made = front_end(spec, voice_rows)
    assert made is not None, "it has just made the rows"
    return rows, made.notice


def prompt_from_file(spec: ModelSpec, path: Path) -> NDArray[np.int32]:
    """A prompt, int32 [rows, columns], from a .npy file or from raw little-endian int32.

    The values are judged by the unit.

    Raises:
        InvalidInput: INVALID_PROMPT; the file does not hold whole rows of integers.
    """
    if path.suffix == ".npy":
        try:
            rows = np.load(path, allow_pickle=False)
        except ValueError as error:
            raise InvalidInput(Reason.INVALID_PROMPT, f"prompt: {path}: {error}") from error
        if rows.ndim != 2 or rows.dtype.kind not in "iu":
            raise InvalidInput(
                Reason.INVALID_PROMPT,
                f"prompt: {path}: {rows.dtype} {list(rows.shape)} is not integer [rows, columns]",
            )
        return np.asarray(rows)
    data = path.read_bytes()
    if len(data) % (4 * spec.columns):
        raise InvalidInput(
            Reason.INVALID_PROMPT,
            f"prompt: {path}: {len(data)} bytes are not whole rows of {spec.columns} int32",
        )
    return np.frombuffer(data, dtype="<i4").reshape(-1, spec.columns)


def describe_progress(timing: StreamTiming) -> str:
    """Rate, TTFT and TTFA as far as they are known."""
    rate = timing.rows_per_second
    parts = [
        f"{rate:.1f} rows/s" if rate is not None else "- rows/s",
        f"TTFT {describe_seconds(timing.ttft_s)} ms",
        f"TTFA {describe_seconds(timing.ttfa_s)} ms",
    ]
    return ", ".join(parts)


def describe_seconds(seconds: float | None) -> str:
    """Seconds as ms; a dash where they are not known."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
