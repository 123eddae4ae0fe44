"""Thirty-two listeners at once, each of whom must hear one voice: that of the request.

What is judged is sound: rows that come out of a live unit are made audible and identified by
pitch and spectrum, so that nothing between prompt and listener is taken on trust.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from duplet_client import AsyncClient, Finished, FinishReason, Rows, SamplingOptions
from duplet_models import directory
from duplet_pages.spec import ModelSpec
from duplet_voice.codec import Codec, load_codec
from duplet_voice.front_end import VoiceFrontEnd
from duplet_voice.speech import speak_rows
from duplet_voice.voices import Voices
from tests.e2e.live_unit import live_unit
from tests.e2e.streams import known_spec

LISTENERS = 32
TEXTS = (
    "The old man in the garden was already waiting for the evening news.",
    "Nobody on the platform had noticed the small brown bird.",
    "She turned the last page over and began to read it again.",
    "We shall meet near the river in the morning, all of us.",
)
SETTINGS = {
    "DUPLET_PREFILL_MODEL": "wren",
    "DUPLET_DECODE_MODEL": "wren",
    "DUPLET_DECODE_SLOTS": str(LISTENERS),
}


@dataclass(frozen=True, slots=True, eq=False)
class Listened:
    """What one listener asked for and got."""

    voice: str
    cold: bool
    """The prompt's voice prefix was nobody else's."""
    rows: NDArray[np.int32]
    cached_rows: int


async def listen_to(client: AsyncClient, front_end: VoiceFrontEnd, number: int) -> Listened:
    voices = front_end.voices
    voice = voices.names[number % len(voices.names)]
    cold = number // len(voices.names) % 2 == 1
    reference = voices[voice].rows
    text = TEXTS[number % len(TEXTS)]
    (piece,) = front_end.pieces(text, voice)
    # The same voice from another row on: every page of the prompt is another.
    prompt = front_end.prompt(reference[1 + number :], piece.phonemes) if cold else piece.prompt
    generation = client.generate(
        prompt, voice=voice, sampling=SamplingOptions(seed=number), max_rows=piece.max_rows
    )
    rows: list[NDArray[np.int32]] = []
    finished: Finished | None = None
    async with generation:
        async for event in generation:
            if isinstance(event, Rows):
                rows.append(event.rows)
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None and finished.reason is FinishReason.STOP
    return Listened(voice, cold, np.concatenate(rows), finished.usage.cached_rows)


def misheard(
    heard: Sequence[Listened], spec: ModelSpec, codec: Codec, voices: Voices
) -> list[tuple[int, str, str]]:
    """Which listeners did not hear the voice that they asked for: number, asked, heard."""
    found = []
    for number, one in enumerate(heard):
        who = voices.identify(speak_rows(spec, codec, one.rows))
        if who != one.voice:
            found.append((number, one.voice, who))
    return found


@pytest.mark.timeout(180)
async def test_every_listener_hears_the_voice_of_the_request() -> None:
    codec = load_codec(directory("wren"))
    async with live_unit(SETTINGS) as unit, AsyncClient(unit.listen) as client:
        spec = await known_spec(client)
        front_end = VoiceFrontEnd(spec)
        voices = front_end.voices
        for number in range(len(voices.names)):
            await listen_to(client, front_end, number)  # From here on the voices are cached.
        heard = await asyncio.gather(
            *(listen_to(client, front_end, number) for number in range(LISTENERS))
        )
        described = await client.unit()
    assert described.kv_checks > LISTENERS and described.kv_mismatches == 0
    assert all((one.cached_rows == 0) == one.cold for one in heard)
    assert misheard(heard, spec, codec, voices) == []

    # The ear must notice: two listeners of different voices get each other's rows.
    first, second = 5, 6
    assert heard[first].voice != heard[second].voice
    mixed = list(heard)
    mixed[first] = Listened(heard[first].voice, False, heard[second].rows, 0)
    mixed[second] = Listened(heard[second].voice, False, heard[first].rows, 0)
    assert misheard(mixed, spec, codec, voices) == [
        (first, heard[first].voice, heard[second].voice),
        (second, heard[second].voice, heard[first].voice),
    ]
