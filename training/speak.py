"""The teacher reads texts: phonemes and features of every piece, as shards of .npz files.

The teacher is hibari. Its own pitch curve is used as it is: nothing has to be guessed from sound.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from duplet_voice.features import FRAME, HOP, SAMPLE_RATE
from training.analysis import Array, analyse

TEACHER_RATE = 24_000
_TEACHER_FRAMES_PER_SECOND = 80.0
_VOICED_HZ = 40.0
LONGEST_PIECE = 130
"""Phoneme symbols that are read in one breath."""
_CLAUSE = re.compile(r"(?<=[,;:.!?—])\s+")
_SHARD_TEXTS = 100


def split_phonemes(phonemes: str, longest: int = LONGEST_PIECE) -> list[str]:
    """Pieces of at most `longest` symbols, cut at clauses where that goes, at words elsewhere."""
    pieces: list[str] = []
    for clause in _CLAUSE.split(phonemes):
        for word in [clause] if len(clause) <= longest else clause.split(" "):
            if pieces and len(pieces[-1]) + 1 + len(word) <= longest:
                pieces[-1] += f" {word}"
            else:
                pieces.append(word)
    return [piece.strip() for piece in pieces if piece.strip()]


class Teacher:
    """hibari's default voice. Owns its inference session."""

    def __init__(self) -> None:
        from hibari import Hibari

        self._voice = Hibari()

    def phonemes(self, text: str) -> str:
        """Phoneme symbols that the teacher knows, with stress, spaces and punctuation."""
        known = self._voice.vocab
        return "".join(symbol for symbol in self._voice.g2p(text) if symbol in known).strip()

    def read(self, phonemes: str, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Samples at 24 kHz, and f0 in Hz at 80 frames/s."""
        from hibari import dsp

        inputs = {
            "ids": np.asarray([self._voice.ids(phonemes)], np.int64),
            "speed": np.ones(1, np.float32),
        }
        *spectra, f0 = (output[0] for output in self._voice.sess.run(None, inputs))
        return dsp.synth(*spectra, f0, np.random.default_rng(seed)), f0

    def features(self, phonemes: str) -> Array:
        """float32 [frames, 44]; no frames where the teacher says nothing."""
        samples, f0 = self.read(phonemes)
        return analyse(resample(samples), place_pitch(f0, len(samples)))


def resample(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """24 kHz to 22,050 Hz."""
    from scipy.signal import resample_poly

    return np.asarray(resample_poly(samples, 147, 160), np.float64)


def place_pitch(f0: NDArray[np.float32], teacher_samples: int) -> NDArray[np.float64]:
    """The teacher's pitch curve at our hops; 0 where it has no pitch."""
    hops = -(-teacher_samples * 147 // 160) // HOP + 1
    places = np.arange(hops) * (HOP / SAMPLE_RATE * _TEACHER_FRAMES_PER_SECOND) - 0.5
    nearest = f0[np.clip(np.rint(places).astype(int), 0, len(f0) - 1)].astype(np.float64)
    # Between a voiced frame and an unvoiced one the straight line means nothing.
    curve = np.maximum(np.interp(places, np.arange(len(f0)), f0), 0.9 * nearest)
    return np.where(nearest > _VOICED_HZ, curve, 0.0)


def _read_shard(job: tuple[list[dict[str, str]], Path]) -> float:
    """Read some texts into one file; seconds of speech."""
    texts, path = job
    teacher = Teacher()
    phonemes, kinds, frames = [], [], []
    for text in texts:
        for piece in split_phonemes(teacher.phonemes(text["text"])):
            features = teacher.features(piece)
            if len(features):
                phonemes.append(piece)
                kinds.append(text["kind"])
                frames.append(features.astype(np.float16))
    np.savez(
        path.with_suffix(".part.npz"),
        phonemes=np.array(phonemes),
        kinds=np.array(kinds),
        lengths=np.array([len(f) for f in frames]),
        frames=np.concatenate(frames) if frames else np.empty((0, FRAME), np.float16),
    )
    path.with_suffix(".part.npz").rename(path)
    return sum(map(len, frames)) * HOP / SAMPLE_RATE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--hours", type=float, default=11.0, help="stop when so much is there")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument("--out", type=Path, required=True, help="a directory for the shards")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = [json.loads(line) for line in args.texts.read_text().splitlines()]
    jobs = [
        (texts[first : first + _SHARD_TEXTS], args.out / f"{first // _SHARD_TEXTS:04}.npz")
        for first in range(0, len(texts), _SHARD_TEXTS)
    ]
    seconds, began = 0.0, time.monotonic()
    with multiprocessing.Pool(args.jobs) as pool:
        for done, length in enumerate(pool.imap_unordered(_read_shard, jobs), 1):
            seconds += length
            took = time.monotonic() - began
            print(f"{done}/{len(jobs)} shards, {seconds / 3600:.2f} h in {took:.0f} s", flush=True)
            if seconds >= args.hours * 3600 or took >= args.seconds:
                break


if __name__ == "__main__":
    main()
