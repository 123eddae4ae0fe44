"""Traces: when requests come, what their prompts share, how long their answers are.

Three formats are read: Mooncake's JSONL, Azure's CSV, and our own JSONL, one request a line:

    {"at_s": 1.25, "parts": [["voice-7", 1100], ["r-31", 240]], "output_rows": 180}

A prompt is its parts one after the other, and a part's rows follow from its name alone: prompts
that begin with equal parts begin with equal rows, which is what a prefix cache shares.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK = 512
"""Tokens of one of Mooncake's prefix blocks."""


class TraceError(ValueError):
    """A trace cannot be read; the text names file and line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    """Since the beginning of the trace."""
    parts: tuple[tuple[str, int], ...]
    """(name, rows) of the prompt's parts, in order; at least one row in all."""
    output_rows: int
    """Most output rows; at least 1."""

    @property
    def prompt_rows(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True, slots=True)
class Shape:
    """How requests of text models become requests of a speech model."""

    prompt_least: int = 1_000
    prompt_most: int = 2_000
    """A voice and a sentence: longer prompts are cut, shorter ones filled up with rows of their
    own."""
    output_least: int = 21
    output_most: int = 630
    rows_per_token: float = 6.0
    """Output rows for each generated token of text: about 3.5 tokens are spoken a second."""

    def prompt(self, tokens: int) -> int:
        return min(max(tokens, self.prompt_least), self.prompt_most)

    def output(self, tokens: int) -> int:
        return min(max(round(tokens * self.rows_per_token), self.output_least), self.output_most)


def read_trace(path: Path, shape: Shape) -> list[Arrival]:
    """A trace in the order of its arrivals; the format follows from the file's content. `shape`
    is for traces of others: our own say rows.

    Raises:
        TraceError: no known format, or a line that is wrong.
        OSError: the file cannot be read.
    """
    text = path.read_text("utf-8")
    first = text.partition("\n")[0]
    try:
        if first.startswith("TIMESTAMP,ContextTokens,GeneratedTokens"):
            found = list(_read_azure(text.splitlines(), shape))
        else:
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            if not lines:
                raise TraceError("no requests")
            own = "parts" in lines[0]
            found = [_read_own(line) for line in lines] if own else _read_mooncake(lines, shape)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: not a trace: {error!r}") from error
    return sorted(found, key=lambda arrival: arrival.at_s)


def _read_own(line: dict[str, Any]) -> Arrival:
    parts = tuple((str(name), int(rows)) for name, rows in line["parts"])
    arrival = Arrival(float(line["at_s"]), parts, int(line["output_rows"]))
    if arrival.prompt_rows < 1 or arrival.output_rows < 1 or arrival.at_s < 0:
        raise TraceError(f"{line}: at_s, rows and output_rows must be positive")
    return arrival


def _read_azure(lines: Iterable[str], shape: Shape) -> Iterator[Arrival]:
    """Nothing is said about prefixes, so every prompt is its own."""
    began: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines)):
        # Seven digits after the point; Python takes six.
        at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
        began = at if began is None else began
        rows = shape.prompt(int(row["ContextTokens"]))
        parts = ((f"azure-{number}", rows),)
        output = shape.output(int(row["GeneratedTokens"]))
        yield Arrival((at - began).total_seconds(), parts, output)


def _read_mooncake(lines: Sequence[dict[str, Any]], shape: Shape) -> list[Arrival]:
    """Blocks keep their sharing. Arrivals come in ticks; those of one are spread evenly until
    the next, or the tick is what gets measured."""
    ordered = sorted(lines, key=lambda line: int(line["timestamp"]))
    ticks = [(at, list(group)) for at, group in groupby(ordered, lambda line: line["timestamp"])]
    ends = [at for at, _ in ticks[1:]]
    ends.append(ticks[-1][0] + (ticks[-1][0] - ticks[-2][0] if len(ticks) > 1 else 1_000))
    found: list[Arrival] = []
    for (at, group), end in zip(ticks, ends, strict=True):
        for place, line in enumerate(group):
            at_s = (at + (end - at) * place / len(group)) / 1e3
            parts = tuple(_blocks(line, shape, f"mooncake-{len(found)}"))
            found.append(Arrival(at_s, parts, shape.output(int(line["output_length"]))))
    zero_s = found[0].at_s
    return [replace(arrival, at_s=arrival.at_s - zero_s) for arrival in found]


def _blocks(line: dict[str, Any], shape: Shape, own: str) -> Iterator[tuple[str, int]]:
    tokens = int(line["input_length"])
    left = min(tokens, shape.prompt_most)
    for block in line["hash_ids"]:
        rows = min(left, MOONCAKE_BLOCK)
        if rows > 0:
            yield f"block-{block}", rows
        left -= rows
    missing = shape.prompt(tokens) - min(tokens, shape.prompt_most) + left
    if missing > 0:
        yield own, missing


def write_trace(arrivals: Iterable[Arrival], path: Path) -> None:
    """Write our own format."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(arrival)) + "\n" for arrival in arrivals)


def cut_trace(
    arrivals: Sequence[Arrival], from_s: float, seconds: float, speed: float
) -> list[Arrival]:
    """The arrivals of [from_s, from_s + seconds), `speed` times as fast; from 0 on again."""
    return [
        replace(arrival, at_s=(arrival.at_s - from_s) / speed)
        for arrival in arrivals
        if from_s <= arrival.at_s < from_s + seconds
    ]
