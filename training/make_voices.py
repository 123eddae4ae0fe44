"""The voices' files: reference rows of each, and what each sounds like."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file

from duplet_voice.codec import load_codec
from duplet_voice.vocoder import Vocoder
from duplet_voice.voices import Heard, listen
from training.make_codes import encode_features
from training.speak import Teacher
from training.speakers import SPEAKERS, Speaker, place_rows, take_rows

REFERENCE = "The rain stopped before noon, and the whole garden smelled of earth and leaves."
_HEARD = (
    "Every morning the baker opens his shop while the street is still dark.",
    "She found an old map under the floor, and nobody knew who had drawn it.",
    "Which of these roads leads back to the harbour?",
    "Seven ships were waiting outside, but only two of them had enough water.",
    "I will call you again on Thursday, around a quarter past four.",
    "The judge measured her words, and then she let the young man go.",
    "Cold weather keeps the apples fresh until the end of March.",
    "You should never trust a clock that has stopped twice in one day.",
)
"""By these a voice's pitch and spectrum are measured."""


def code_speech(
    teacher: Teacher, text: str, speaker: Speaker, codec: dict[str, torch.Tensor]
) -> NDArray[np.int32]:
    """A text in a voice as codes, int32 [rows, 10], without the model."""
    frames = torch.from_numpy(teacher.features(teacher.phonemes(text)))
    places = torch.from_numpy(place_rows(len(frames), speaker.tempo, 0))
    return encode_features(take_rows(frames, places, speaker), codec).numpy().astype(np.int32)


def speak_features(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Samples of features [rows, 176]."""
    vocoder = Vocoder()
    return np.concatenate([vocoder.push(rows), vocoder.flush()])


def describe_sound(heard: list[Heard]) -> dict[str, object]:
    """What identifies a voice by ear."""
    spectra = np.mean([h.spectrum_db for h in heard], axis=0)
    return {
        "f0_hz": round(float(np.median([h.f0_hz for h in heard])), 2),
        "spectrum_db": [round(float(value), 3) for value in spectra],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a directory with the codec")
    args = parser.parse_args()
    tensors, codec = load_file(args.model / "codec.safetensors"), load_codec(args.model)
    first = json.loads((args.model / "config.json").read_text())["semantic_start_token_id"]
    teacher = Teacher()
    rows, facts = {}, {}
    for name, speaker in SPEAKERS.items():
        codes = code_speech(teacher, REFERENCE, speaker, tensors)
        rows[name] = np.concatenate((codes[:, :1] + first, codes), axis=1)
        heard = [
            listen(speak_features(codec.features(code_speech(teacher, text, speaker, tensors))))
            for text in _HEARD
        ]
        facts[name] = {"description": speaker.description, **describe_sound(heard)}
        print(f"{name}: {len(codes)} rows, {facts[name]['f0_hz']} Hz")
    save_file(rows, args.model / "voices.safetensors")
    (args.model / "voices.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
