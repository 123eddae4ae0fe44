"""Who speaks, by ear."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from duplet_core.errors import InvalidInput
from duplet_voice.features import VOICED, split_rows
from duplet_voice.vocoder import Vocoder
from duplet_voice.voices import VoiceEntry, Voices, listen, load_voices
from tests.voice.voice_parts import speech_features


def spoken(f0_hz: float, tilt: float, seed: int, voiced: bool = True) -> np.ndarray:
    """Half a minute of nobody's language: pitch and envelope are the speaker's."""
    features = speech_features(60, f0_hz, seed)
    frames = split_rows(features)
    frames[:, 1] = tilt
    if not voiced:
        frames[:, VOICED] = 0.0
    vocoder = Vocoder()
    return np.concatenate([vocoder.push(features), vocoder.flush()])


SPEAKERS = {"high": (210.0, 0.8), "low": (110.0, 0.8), "dull": (210.0, 1.4), "bright": (110.0, 0.3)}


@pytest.fixture(scope="module")
def voices() -> Voices:
    none = np.zeros((0, 11), np.int32)
    return Voices(
        {
            name: VoiceEntry(name, "", listen(spoken(f0_hz, tilt, 0)), none)
            for name, (f0_hz, tilt) in SPEAKERS.items()
        }
    )


@pytest.mark.parametrize("name", SPEAKERS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_speaker_is_known_by_pitch_or_by_spectrum(voices: Voices, name: str, seed: int) -> None:
    assert voices.identify(spoken(*SPEAKERS[name], seed)) == name


def test_level_does_not_change_the_speaker(voices: Voices) -> None:
    samples = spoken(*SPEAKERS["dull"], 5)
    assert voices.identify(samples * np.float32(0.1)) == "dull"
    heard, quiet = listen(samples), listen(samples * np.float32(0.1))
    assert heard.distance(quiet) < 0.05


@pytest.mark.parametrize(
    "samples",
    [np.zeros(100, np.float32), np.zeros(22_050, np.float32), spoken(150.0, 0.8, 1, voiced=False)],
    ids=["short", "silent", "unvoiced"],
)
def test_what_is_no_voice_is_nobodys(voices: Voices, samples: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="samples"):
        voices.identify(samples)


def test_the_voices_of_a_directory(model: Path) -> None:
    voices = load_voices(model)
    assert voices.names == ("amber", "cedar")
    assert voices.describe() == [("amber", "amber's voice"), ("cedar", "cedar's voice")]
    assert voices["cedar"].heard.f0_hz == 110.0
    assert voices["cedar"].rows.shape == (20, 11)
