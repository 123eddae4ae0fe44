"""The demo's last part: a sentence in two voices, as WAV files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from duplet_client import AsyncClient, SamplingOptions
from duplet_models import directory
from duplet_pages.spec import ModelSpec
from duplet_unit.say import SayOptions, say
from duplet_unit.say_output import wav_file
from duplet_voice.codec import load_codec
from duplet_voice.front_end import VoiceFrontEnd
from duplet_voice.speech import Speech

SENTENCE = "If you hear one voice from beginning to end, everything went well."
SPEAKERS = 2
SEED = 7


async def speak_sentence(
    client: AsyncClient, spec: ModelSpec, out_dir: Path, console: Console
) -> list[str]:
    """Say SENTENCE in the first voices, one after the other, to a WAV file each in `out_dir`.

    Returns:
        What went wrong.
    """
    front_end, codec = VoiceFrontEnd(spec), load_codec(directory(spec.name))
    problems: list[str] = []
    played: list[Path] = []
    for voice in front_end.voices.names[:SPEAKERS]:
        path = out_dir / f"{voice}.wav"
        options = SayOptions(voice, SamplingOptions(seed=SEED))
        async with wav_file(path) as write:
            said = await say(
                client,
                front_end.pieces(SENTENCE, voice),
                Speech(spec, codec),
                options,
                write,
                lambda _: None,
            )
        console.print(Text(f"{voice}: {said.summary()}"))
        problems += [f"{voice}: {problem}" for problem in said.problems]
        played.append(path)
    console.print(Text(f"hear it: {describe_files(played)}", style="bold"))
    return problems


def describe_files(paths: Sequence[Path]) -> str:
    """Their names in one line."""
    return ", ".join(str(path) for path in paths)
