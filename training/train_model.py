"""Train the model for a set time; keep the averaged weights that do best on recordings left out."""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.dual_ar import DualAr, read_config
from training.examples import (
    ENTRIES,
    GENERATE,
    SEMANTIC_FIRST,
    Batch,
    Corpus,
    Drawer,
    Lesson,
    draw_batches,
)

_HELD_EVERY = 50
"""One recording of so many is left out, for validation, by its number in its file of codes: the
same one in every file of the same shards."""
_VALIDATION_BATCHES, _VALIDATION_ROWS = 16, 6_144
_WARM_STEPS = 200
_RESIDUAL_WEIGHT, _EARLY_RESIDUAL_WEIGHT = 1.0, 0.3
_EASY_SHARE = 0.4
"""Of the time, at its beginning, in which the model has only to learn to read. Weights that go on
can read."""
_FADE_FROM, _LEAST_NOISE = 0.6, 0.3
"""From this share of the time on the noise falls, to this at the end: a model that has learnt not
to lean on its past learns then to fit it well."""
_GIVE_UP_SHARE, _READING_GAP = 0.55, 0.15
"""A model that does not read by then is not going to."""
_SOME_PHONEME = 59
_CODED_PART = 6
"""The codebook transformer learns from at most one in so many of a batch's rows."""
HEAD_GAIN = 16.0
"""The residual books' head is published multiplied by this. A draw at temperature T is then one at
T / 16, as good as the most probable code, with no sampling option of its own."""


def find_lesson(done: float, easy_share: float) -> Lesson:
    """What is drawn when this share of the time is over."""
    faded = max(0.0, done - _FADE_FROM) / (1.0 - _FADE_FROM)
    return Lesson(done < easy_share, 1.0 - (1.0 - _LEAST_NOISE) * min(faded, 1.0))


@dataclass(frozen=True, slots=True)
class Exercise:
    """A batch as tensors. What is learnt is found here, in the loader, so that the GPU need not
    tell the host how much it is."""

    rows: Tensor
    """int16 [batch, length, 11]"""
    places: Tensor
    """int64 [n]: whose next rows are learnt, of the batch's rows one after the other"""
    wanted: Tensor
    """int16 [n, 10]: those; stop is 1,024 in book 0"""
    coded: Tensor
    """int64 [m]: from which of the n the codebook transformer learns; no stop among them"""

    @staticmethod
    def make(batch: Batch, rng: np.random.Generator, most: int) -> Exercise:
        """Of a batch; the codebook transformer learns from at most so many rows."""
        targets = batch.targets.reshape(-1, batch.targets.shape[-1])
        places = np.flatnonzero(targets[:, 0] >= 0)
        wanted = targets[places]
        coded = rng.permutation(np.flatnonzero(wanted[:, 0] < ENTRIES))[:most]
        parts = (batch.rows, places, wanted, coded)
        return Exercise(*map(torch.from_numpy, parts))

    def pin_memory(self) -> Exercise:
        """The loader asks for it."""
        tensors = (self.rows, self.places, self.wanted, self.coded)
        return Exercise(*(tensor.pin_memory() for tensor in tensors))

    def to(self, device: str) -> Exercise:
        """There, all of it int64; on the way it is small."""
        tensors = (self.rows, self.places, self.wanted, self.coded)
        return Exercise(*(tensor.to(device, non_blocking=True).long() for tensor in tensors))


class Batches(IterableDataset[Exercise]):
    """Batches drawn by each worker with a seed of its own; the time runs from here."""

    def __init__(
        self,
        corpus: Corpus,
        recordings: np.ndarray,
        batch_rows: int,
        seconds: float,
        easy_share: float,
    ) -> None:
        self._corpus, self._recordings, self._batch_rows = corpus, recordings, batch_rows
        self._began, self._seconds, self._easy_share = time.monotonic(), seconds, easy_share

    def __iter__(self) -> Iterator[Exercise]:
        worker = get_worker_info()
        seed = 1000 + (worker.id if worker else 0)

        def lesson() -> Lesson:
            return find_lesson((time.monotonic() - self._began) / self._seconds, self._easy_share)

        rng = np.random.default_rng(seed)
        drawer = Drawer(self._corpus, self._recordings, seed, lesson())
        for batch in draw_batches(drawer, self._batch_rows, seed, lesson):
            yield Exercise.make(batch, rng, self._batch_rows // _CODED_PART)


def find_losses(model: DualAr, exercise: Exercise) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the token and of the residual codes."""
    hidden = model.hidden(exercise.rows).flatten(0, 1).index_select(0, exercise.places)
    wanted, coded = exercise.wanted, exercise.coded
    token_loss = functional.cross_entropy(model.token_logits(hidden).float(), wanted[:, 0])
    codes = wanted[coded]
    logits = model.code_logits(hidden.index_select(0, coded), codes)
    code_loss = functional.cross_entropy(logits.flatten(0, 1).float(), codes[:, 1:].flatten())
    return token_loss, code_loss


@torch.no_grad()
def validate(model: DualAr, exercises: list[Exercise], device: str) -> dict[str, float]:
    """Mean losses over exercises that are drawn once; also that of the token where every phoneme
    reads the same: the difference says whether the model has learnt to read."""
    model.eval()
    losses = []
    for exercise in (e.to(device) for e in exercises):
        ids = exercise.rows[..., :1]
        text = (ids > GENERATE) & (ids < SEMANTIC_FIRST)
        without_text = exercise.rows.masked_fill(text, _SOME_PHONEME)
        with torch.autocast(device, torch.bfloat16):
            pair = find_losses(model, exercise)
            deaf = find_losses(model, replace(exercise, rows=without_text))
        losses.append([pair[0].item(), pair[1].item(), deaf[0].item()])
    token, code, deaf_token = np.mean(losses, axis=0)
    return {"token": float(token), "code": float(code), "token_without_text": float(deaf_token)}


@torch.no_grad()
def average(averaged: DualAr, model: DualAr, decay: float) -> None:
    """Move the averaged weights towards the model's."""
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1.0 - decay)


def publish(model: DualAr, path: Path) -> None:
    """Weights in bfloat16 under S2-Pro's names."""
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    state["audio_decoder.output.weight"] = state["audio_decoder.output.weight"] * HEAD_GAIN
    save_file({name: t.bfloat16().cpu().contiguous() for name, t in state.items()}, path)


def restore(model: DualAr, path: Path) -> None:
    """Weights that `publish` wrote."""
    state = {name: tensor.float() for name, tensor in load_file(path).items()}
    state["audio_decoder.output.weight"] /= HEAD_GAIN
    model.load_state_dict(state)


def split_parameters(model: DualAr, decay: float) -> list[dict[str, object]]:
    """Only the matrices inside blocks decay."""
    inside = [p for n, p in model.named_parameters() if p.dim() == 2 and "embeddings" not in n]
    known = {id(p) for p in inside}
    others = [p for p in model.parameters() if id(p) not in known]
    return [{"params": inside, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codes", type=Path, required=True, nargs="+", help="of make_codes")
    parser.add_argument("--model", type=Path, required=True, help="with config.json, phonemes.json")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--start", type=Path, help="published weights to go on from")
    parser.add_argument("--batch-rows", type=int, default=6_144)
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=min(12, max(0, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--validate-every", type=float, default=15.0, help="seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    symbols = json.loads((args.model / "phonemes.json").read_text())
    corpus = Corpus.read(args.codes, symbols)
    held = corpus.places % _HELD_EVERY == 0
    drawer = Drawer(corpus, np.flatnonzero(held), seed=1, lesson=Lesson(noise=0.0))
    rows = min(_VALIDATION_ROWS, args.batch_rows)
    drawn, rng = draw_batches(drawer, rows, seed=1), np.random.default_rng(1)
    left_out = [Exercise.make(next(drawn), rng, rows) for _ in range(_VALIDATION_BATCHES)]
    easy_share = 0.0 if args.start is not None else _EASY_SHARE
    loader = DataLoader(
        Batches(corpus, np.flatnonzero(~held), args.batch_rows, args.seconds, easy_share),
        batch_size=None,
        num_workers=args.workers,
        pin_memory=args.device == "cuda",
        prefetch_factor=4 if args.workers else None,
    )
    config = read_config(args.model / "config.json")
    model = DualAr(config, args.dropout).to(args.device)
    if args.start is not None:
        restore(model, args.start)
    averaged = copy.deepcopy(model).eval()
    fused = args.device == "cuda"
    optimiser = torch.optim.AdamW(
        split_parameters(model, 0.05), lr=args.rate, betas=(0.9, 0.96), fused=fused
    )
    with (args.out / "train.jsonl").open("w") as log:
        train(model, averaged, optimiser, loader, left_out, easy_share, args, log)


def train(
    model: DualAr,
    averaged: DualAr,
    optimiser: torch.optim.Optimizer,
    loader: DataLoader[Exercise],
    left_out: list[Exercise],
    easy_share: float,
    args: argparse.Namespace,
    log: TextIO,
) -> None:
    """Until the time is up. The rate falls to nothing, as a half cosine over time, not steps."""
    began = time.monotonic()
    checked, best = -math.inf, math.inf
    for step, exercise in enumerate(loader):
        passed = time.monotonic() - began
        done = min(passed / args.seconds, 1.0)
        if passed - checked > args.validate_every or done >= 1.0:
            checked = passed
            losses = validate(averaged, left_out, args.device)
            if losses["token"] + _RESIDUAL_WEIGHT * losses["code"] < best:
                best = losses["token"] + _RESIDUAL_WEIGHT * losses["code"]
                publish(averaged, args.out / "model.safetensors")
            line = {"seconds": round(passed, 1), "step": step} | losses
            print(line, flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
            gap = losses["token_without_text"] - losses["token"]
            if done >= 1.0 or (done > _GIVE_UP_SHARE and gap < _READING_GAP):
                publish(averaged, args.out / "last.safetensors")
                return
        scale = min((step + 1) / _WARM_STEPS, 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimiser.param_groups:
            group["lr"] = args.rate * scale
        model.train()
        with torch.autocast(args.device, torch.bfloat16):
            token_loss, code_loss = find_losses(model, exercise.to(args.device))
            weight = _EARLY_RESIDUAL_WEIGHT if done < easy_share else _RESIDUAL_WEIGHT
            loss = token_loss + weight * code_loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        average(averaged, model, min(0.999, (step + 1) / (step + 21)))
        if step in (0, 20, 100) or step % 1000 == 0:
            print(step, round(passed, 1), token_loss.item(), code_loss.item(), flush=True)


if __name__ == "__main__":
    main()
