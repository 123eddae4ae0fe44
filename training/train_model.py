"""Train the model for a set time; keep the averaged weights that do best on recordings left out."""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.dual_ar import DualAr, read_config
from training.examples import GENERATE, SEMANTIC_FIRST, Batch, Corpus, Drawer, draw_batches

_HELD_EVERY = 50
"""One recording of so many is left out, for validation."""
_VALIDATION_BATCHES = 16
_WARM_STEPS = 200
_RESIDUAL_WEIGHT, _EARLY_RESIDUAL_WEIGHT = 1.0, 0.3
_EASY_SHARE = 0.4
"""Of the time, at its beginning, in which the model has only to learn to read."""
_GIVE_UP_SHARE, _READING_GAP = 0.55, 0.15
"""A model that does not read by then is not going to."""
_SOME_PHONEME = 59
_CODE_ROWS = 1024
"""Rows of a step that the codebook transformer learns from."""
HEAD_GAIN = 16.0
"""The residual books' head is published multiplied by this. A draw at temperature T is then one at
T / 16, as good as the most probable code, with no sampling option of its own."""


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches drawn by each worker with a seed of its own."""

    def __init__(
        self, corpus: Corpus, recordings: np.ndarray, batch_rows: int, easy_seconds: float
    ) -> None:
        self._corpus, self._recordings, self._batch_rows = corpus, recordings, batch_rows
        self._easy_until = time.monotonic() + easy_seconds

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        seed = 1000 + (worker.id if worker else 0)
        drawer = Drawer(self._corpus, self._recordings, seed, noisy=True)

        def is_easy() -> bool:
            return time.monotonic() < self._easy_until

        for batch in draw_batches(drawer, self._batch_rows, seed, is_easy):
            yield as_tensors(batch)


def as_tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows and targets, int16."""
    return torch.from_numpy(batch.rows), torch.from_numpy(batch.targets)


def find_losses(model: DualAr, rows: Tensor, targets: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the token and of the residual codes of at most `most` rows."""
    hidden = model.hidden(rows)
    learnt = targets[..., 0] >= 0
    hidden, wanted = hidden[learnt], targets[learnt]
    token_loss = functional.cross_entropy(model.token_logits(hidden).float(), wanted[:, 0])
    coded = (wanted[:, 0] < model.entries).nonzero()[:, 0]
    if len(coded) > most:
        coded = coded[torch.randperm(len(coded), device=coded.device)[:most]]
    logits = model.code_logits(hidden[coded], wanted[coded])
    code_loss = functional.cross_entropy(logits.flatten(0, 1).float(), wanted[coded, 1:].flatten())
    return token_loss, code_loss


@torch.no_grad()
def validate(model: DualAr, batches: list[tuple[Tensor, Tensor]], device: str) -> dict[str, float]:
    """Mean losses over batches that are drawn once; also that of the token where every phoneme
    reads the same: the difference says whether the model has learnt to read."""
    model.eval()
    losses = []
    for rows, targets in batches:
        rows, targets = rows.to(device).long(), targets.to(device).long()
        text = (rows[..., :1] > GENERATE) & (rows[..., :1] < SEMANTIC_FIRST)
        with torch.autocast(device, torch.bfloat16):
            pair = find_losses(model, rows, targets, 1 << 30)
            deaf = find_losses(model, rows.masked_fill(text, _SOME_PHONEME), targets, 1)
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
    parser.add_argument("--codes", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="with config.json, phonemes.json")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--start", type=Path, help="published weights to go on from")
    parser.add_argument("--batch-rows", type=int, default=6_144)
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--validate-every", type=float, default=15.0, help="seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    symbols = json.loads((args.model / "phonemes.json").read_text())
    corpus = Corpus.read(args.codes, symbols)
    held = np.arange(len(corpus.phonemes)) % _HELD_EVERY == 0
    drawer = Drawer(corpus, np.flatnonzero(held), seed=1, noisy=False)
    drawn = draw_batches(drawer, args.batch_rows, seed=1)
    held_batches = [as_tensors(next(drawn)) for _ in range(_VALIDATION_BATCHES)]
    loader = DataLoader(
        Batches(corpus, np.flatnonzero(~held), args.batch_rows, _EASY_SHARE * args.seconds),
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
    train(model, averaged, optimiser, loader, held_batches, args)


def train(
    model: DualAr,
    averaged: DualAr,
    optimiser: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, Tensor]],
    held_batches: list[tuple[Tensor, Tensor]],
    args: argparse.Namespace,
) -> None:
    """Until the time is up. The rate falls as a half cosine over time, not over steps."""
    began = time.monotonic()
    checked, best = 0.0, math.inf
    log = (args.out / "train.jsonl").open("w")
    for step, (rows, targets) in enumerate(loader):
        passed = time.monotonic() - began
        done = min(passed / args.seconds, 1.0)
        if passed - checked > args.validate_every or done >= 1.0:
            checked = passed
            losses = validate(averaged, held_batches, args.device)
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
        scale = min((step + 1) / _WARM_STEPS, 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimiser.param_groups:
            group["lr"] = args.rate * scale
        model.train()
        rows = rows.to(args.device, non_blocking=True).long()
        targets = targets.to(args.device, non_blocking=True).long()
        with torch.autocast(args.device, torch.bfloat16):
            token_loss, code_loss = find_losses(model, rows, targets, _CODE_ROWS)
            weight = _EARLY_RESIDUAL_WEIGHT if done < _EASY_SHARE else _RESIDUAL_WEIGHT
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
