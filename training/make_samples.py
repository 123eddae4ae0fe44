"""A sentence in every voice as WAV files, and their spectrograms in one picture."""

from __future__ import annotations

import argparse
import wave
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot
from numpy.typing import NDArray

import duplet_models
from bench.voice import open_engine, say
from duplet_core.messages import Sampling
from duplet_voice.features import SAMPLE_RATE
from duplet_voice.vocoder import pcm16
from training.speakers import SPEAKERS

SENTENCE = "The same words are spoken here by four different voices."


def write_wav(path: Path, samples: NDArray[np.float32]) -> None:
    """16 bits, mono."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(pcm16(samples).tobytes())


def draw_spectrograms(path: Path, voices: dict[str, NDArray[np.float32]]) -> None:
    """One above the other, to 8 kHz."""
    mpl.use("Agg")
    figure, axes = pyplot.subplots(len(voices), figsize=(7, 6), sharex=True)
    for axis, (name, samples) in zip(axes, voices.items(), strict=True):
        axis.specgram(
            samples + 1e-7, NFFT=1024, Fs=SAMPLE_RATE, noverlap=768, vmin=-130, cmap="magma"
        )
        axis.set_ylim(0, 8000)
        axis.set_ylabel(f"{name}, Hz")
    axes[-1].set_xlabel("s")
    figure.tight_layout()
    figure.savefig(path, dpi=50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/voices"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model = duplet_models.directory("wren")
    engine = open_engine(model, threads=1)
    defaults = engine.spec.sampling
    sampling = Sampling(
        7, defaults.temperature, defaults.top_p, defaults.top_k, defaults.repetition_window
    )
    voices = {name: say(engine, model, [SENTENCE], name, sampling)[0].samples for name in SPEAKERS}
    engine.close()
    for name, samples in voices.items():
        write_wav(args.out / f"{name}.wav", samples)
    draw_spectrograms(args.out / "spectrograms.png", voices)


if __name__ == "__main__":
    main()
