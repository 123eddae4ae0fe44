"""Shards of features to codes: every recording in every voice, and the codec that codes it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from duplet_voice.features import (
    BANDS,
    CEPSTRA,
    FRAME,
    HOP,
    LOG_F0,
    ROW,
    SAMPLE_RATE,
    STACK,
    VOICED,
    WARP,
)
from training.quantiser import encode, fit_books, pack_codes
from training.speakers import SPEAKERS, place_rows, take_rows

BOOKS, ENTRIES = 10, 1024
_ROUNDS = 12
_CEPSTRUM_SCALE, _LEVEL_SCALE = 0.2, 0.4
_F0_SCALE, _VOICING_SCALE, _BAND_SCALE_DB = 0.06, 0.6, 6.0


def read_shards(directory: Path) -> tuple[list[str], list[int], Tensor]:
    """Phonemes and number of frames of each recording, and all frames float32 [n, 44]."""
    phonemes: list[str] = []
    lengths: list[int] = []
    frames = []
    for path in sorted(directory.glob("[0-9]*[0-9].npz")):
        with np.load(path) as shard:
            phonemes.extend(map(str, shard["phonemes"]))
            lengths.extend(map(int, shard["lengths"]))
            frames.append(shard["frames"])
    return phonemes, lengths, torch.from_numpy(np.concatenate(frames).astype(np.float32))


def make_scale() -> Tensor:
    """Divisors of the 176 numbers: what is as loud as one unit, in each kind of number."""
    scale = torch.full((FRAME,), _CEPSTRUM_SCALE)
    scale[0] = _LEVEL_SCALE
    scale[CEPSTRA:LOG_F0] = _BAND_SCALE_DB
    scale[LOG_F0] = _F0_SCALE
    scale[VOICED] = _VOICING_SCALE
    return scale.repeat(STACK)


def fit_codec(rows: Tensor, rounds: int) -> dict[str, Tensor]:
    """Codebooks, mean and scale as `codec.safetensors` holds them, fitted to `rows [m, 176]`."""
    mean, scale = rows.mean(dim=0), make_scale().to(rows)
    books = fit_books((rows - mean) / scale, BOOKS, ENTRIES, rounds, seed=1)
    return {"codebooks": books.half(), "mean": mean, "scale": scale}


def save_codec(codec: dict[str, Tensor], path: Path) -> None:
    """Write the codec with what its numbers are."""
    about = {
        "sample_rate": SAMPLE_RATE, "hop": HOP, "frames_per_row": STACK, "alpha": WARP,
        "cepstra": CEPSTRA, "aperiodicities": BANDS, "numbers_per_row": ROW,
    }  # fmt: skip
    tensors = {name: tensor.cpu().contiguous() for name, tensor in codec.items()}
    save_file(tensors, path, {name: str(value) for name, value in about.items()})


def encode_features(rows: Tensor, codec: dict[str, Tensor]) -> Tensor:
    """Codes int64 [m, 10] of features [m, 176]."""
    scaled = (rows - codec["mean"].to(rows)) / codec["scale"].to(rows)
    return encode(scaled, codec["codebooks"].to(rows))


def write_codes(
    path: Path, codes: NDArray[np.int64], counts: NDArray[np.int64], phonemes: list[str]
) -> None:
    """One file of codes int64 [rows, 10]: voice after voice, recording after recording, of
    `counts [voices, recordings]` rows each, that say `phonemes`."""
    np.savez_compressed(
        path, packed=pack_codes(codes), rows=counts, phonemes=np.array(json.dumps(phonemes))
    )


def choose_voices(
    rng: np.random.Generator, recordings: int, each: int, beside: Path | None
) -> NDArray[np.bool_]:
    """Which voices say which recordings, [voices, recordings]: so many of each, in random order,
    and none in which the recording is in `beside`, a file of codes of the same shards.

    Raises:
        ValueError: that file is of other shards.
    """
    ranks = rng.permuted(np.tile(np.arange(len(SPEAKERS)), (recordings, 1)), axis=1).T
    if beside is not None:
        with np.load(beside) as file:
            known = file["rows"] > 0
        if known.shape != ranks.shape:
            raise ValueError(f"{beside}: {known.shape[1]} recordings, the shards have {recordings}")
        ranks = np.where(known, len(SPEAKERS), ranks).argsort(axis=0).argsort(axis=0)
        ranks = np.where(known, len(SPEAKERS), ranks)
    return np.asarray(ranks < each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--codec", type=Path, help="an existing one; fitted where not given")
    parser.add_argument("--voices-each", type=int, default=len(SPEAKERS), help="of a recording")
    parser.add_argument("--seed", type=int, default=1, help="of voices, offsets and tempi")
    parser.add_argument("--tempo-spread", type=float, default=0.0, help="0.03: by up to 3 %%")
    parser.add_argument("--beside", type=Path, help="codes of these shards, in other voices")
    parser.add_argument("--sample-rows", type=int, default=400_000, help="that the codec sees")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    phonemes, lengths, frames = read_shards(args.shards)
    frames = frames.to(args.device)
    firsts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    rng = np.random.default_rng(args.seed)
    wanted = choose_voices(rng, len(lengths), args.voices_each, args.beside)
    places, counts = [], []
    for speaker, chosen in zip(SPEAKERS.values(), wanted, strict=True):
        offsets = rng.integers(0, STACK, len(lengths))
        tempi = speaker.tempo * (1.0 + args.tempo_spread * rng.uniform(-1.0, 1.0, len(lengths)))
        # A recording that is not for this voice has no rows in it.
        placed = [
            place_rows(length if is_chosen else 0, float(tempo), int(offset))
            for length, tempo, offset, is_chosen in zip(
                lengths, tempi, offsets, chosen, strict=True
            )
        ]
        counts.append([len(place) // STACK for place in placed])
        places.append(np.concatenate([p + first for p, first in zip(placed, firsts, strict=True)]))

    def take(voice: int) -> Tensor:
        there = torch.from_numpy(places[voice]).to(args.device)
        return take_rows(frames, there, list(SPEAKERS.values())[voice])

    if args.codec is None:
        every = torch.cat([take(voice) for voice in range(len(SPEAKERS))])
        sample = torch.randperm(len(every), generator=torch.Generator().manual_seed(1))
        codec = fit_codec(every[sample[: args.sample_rows].to(args.device)], args.rounds)
        save_codec(codec, args.out / "codec.safetensors")
        del every
    else:
        codec = load_file(args.codec)
    voices = [encode_features(take(voice), codec).cpu() for voice in range(len(SPEAKERS))]
    codes = torch.cat(voices).numpy()
    write_codes(args.out / "codes.npz", codes, np.array(counts), phonemes)
    took = time.monotonic() - began
    print(f"{len(phonemes)} recordings, {len(codes)} rows of all voices coded in {took:.0f} s")


if __name__ == "__main__":
    main()
