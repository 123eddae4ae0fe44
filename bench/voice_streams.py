"""`python -m bench.voice_streams`: listeners of the built-in voice that this machine's CPU feeds.

A unit, and in one process beside it that many listeners at once: each asks for a sentence, turns
its rows into samples as they come, and asks for the next. Everything runs on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.processes import clean_environment
from bench.results import Report, quantile
from bench.systems import UNIT, running
from duplet_client import AsyncClient, Rows, SamplingOptions
from duplet_core.playback import AUDIO_ROWS
from duplet_models import directory
from duplet_pages.spec import ModelSpec
from duplet_voice.codec import Codec, load_codec
from duplet_voice.front_end import Piece, VoiceFrontEnd
from duplet_voice.speech import Speech

FLOOR = 42.0
"""rows/s that every stream must have."""
WANTED = 3
"""Streams at the floor on two cores."""
TEXTS = (
    "The train leaves in ten minutes from platform two.",
    "She counted the pages again, and this time none was missing.",
    "Nobody on the platform had noticed the small bird.",
    "If you hear one voice from beginning to end, everything went well.",
)
MODEL = {"DUPLET_PREFILL_MODEL": "wren", "DUPLET_DECODE_MODEL": "wren"}


@dataclass(frozen=True, slots=True)
class Heard:
    """One request as its listener had it."""

    ttfa_s: float
    """From the call to the row from which audio can start."""
    rate: float
    """rows/s from the first to the last row."""
    audio_s: float


async def listen(
    client: AsyncClient, speech: Speech, piece: Piece, seed: int, rate: float
) -> Heard:
    """Send a piece and make its rows audible. `rate`: rows that make a second."""
    began = time.perf_counter()
    times: list[float] = []
    samples = 0
    generation = client.generate(
        piece.prompt, sampling=SamplingOptions(seed=seed), max_rows=piece.max_rows
    )
    async with generation:
        async for event in generation:
            if isinstance(event, Rows):
                times += [time.perf_counter()] * len(event.rows)
                samples += len(speech.push(event.rows))
    speech.flush()
    audible = times[min(AUDIO_ROWS, len(times)) - 1]
    took = times[-1] - times[0]
    return Heard(audible - began, (len(times) - 1) / took, len(times) / rate)


async def listen_on(
    client: AsyncClient,
    spec: ModelSpec,
    codec: Codec,
    pieces: Sequence[Piece],
    number: int,
    rounds: int,
) -> list[Heard]:
    """One listener's requests, one after the other."""
    heard = []
    for turn in range(rounds):
        piece = pieces[(number + turn) % len(pieces)]
        speech = Speech(spec, codec)
        seed = 1000 * number + turn
        heard.append(await listen(client, speech, piece, seed, spec.rows_per_second))
    return heard


async def listen_together(
    client: AsyncClient, spec: ModelSpec, streams: int, rounds: int
) -> list[Heard]:
    """That many listeners at once, each with so many requests."""
    front_end, codec = VoiceFrontEnd(spec), load_codec(directory(spec.name))
    voices = front_end.voices.names
    pieces = [next(front_end.pieces(text, voice)) for text in TEXTS for voice in voices]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(listen_on(client, spec, codec, pieces, number, rounds))
            for number in range(streams)
        ]
    return [one for task in tasks for one in task.result()]


async def measure(options: argparse.Namespace, report: Report) -> None:
    """Fill the report: each number of streams, then the largest that keeps the floor."""
    settings = dict(setting.split("=", 1) for setting in options.set)
    environment = clean_environment({**MODEL, "DUPLET_LOG_LEVEL": "warning", **settings})
    kept = 0
    async with running(UNIT, environment, (), 1024) as address, AsyncClient(address) as client:
        spec = (await client.unit()).spec
        assert spec is not None
        await listen_together(client, spec, 1, len(VoiceFrontEnd(spec).voices.names))
        for streams in options.streams:
            began = time.perf_counter()
            heard = await listen_together(client, spec, streams, options.rounds)
            took_s = time.perf_counter() - began
            rates = [one.rate for one in heard]
            slowest = quantile(rates, 0.05)
            case = f"{streams} streams"
            report.add(f"{case}, slowest 1 of 20", slowest, "rows/s")
            report.add(f"{case}, median", float(np.median(rates)), "rows/s")
            report.add(f"{case}, TTFA p95", quantile([h.ttfa_s for h in heard], 0.95) * 1e3, "ms")
            report.add(f"{case}, audio", sum(h.audio_s for h in heard) / took_s, "x real time")
            if slowest >= FLOOR:
                kept = max(kept, streams)
    report.add("voice_streams_at_floor", kept, "streams", f">= {WANTED}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12])
    parser.add_argument("--rounds", type=int, default=4, help="requests of each listener")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--dry", action="store_true", help="keep nothing")
    options = parser.parse_args()
    report = Report("voice_streams", f"{len(os.sched_getaffinity(0))} cores for unit and listeners")
    asyncio.run(measure(options, report))
    print(report.table())
    if not options.dry:
        report.save()


if __name__ == "__main__":
    main()
