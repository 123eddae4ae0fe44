"""Requests, and ways to run them on engines without processes between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from duplet_core.engine import FromEngine, Shutdown, Start, ToEngine
from duplet_core.messages import Sampling
from duplet_engine.engine import Engine
from duplet_engine.sampling import Noise, gumbel_noise, noise_keys
from duplet_engine.sequences import open_prefill
from duplet_engine.tiny import TINY
from duplet_memory.digest import page_digests

PLAIN = Sampling(seed=1, temperature=0.8, top_p=0.8, top_k=30, repetition_window=10)


def random_prompt(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Text ids and semantic rows in a random mix, int32 [rows, columns]."""
    prompt = np.zeros((rows, TINY.columns), dtype="<i4")
    prompt[:, 0] = rng.integers(0, 256, rows)
    semantic = rng.random(rows) < 0.6
    count = int(semantic.sum())
    codes = rng.integers(0, 64, (count, TINY.codebooks))
    codes[:, 0] = rng.integers(0, 256, count)
    prompt[semantic, 0] = TINY.semantic_first + codes[:, 0]
    prompt[semantic, 1:] = codes
    return prompt


@dataclass(frozen=True)
class Request:
    prompt: np.ndarray
    sampling: Sampling

    @property
    def rows(self) -> int:
        return len(self.prompt)

    def prefill(self, seq: int, pages: Sequence[int], start_row: int = 0) -> Start:
        return Start(seq, tuple(pages), self.prompt.tobytes(), start_row, 0, self.sampling)

    def decode(self, seq: int, pages: Sequence[int], first: torch.Tensor, max_rows: int) -> Start:
        return Start(seq, tuple(pages), pack(first), self.rows, max_rows, self.sampling)


def pack(row: torch.Tensor) -> bytes:
    return row.numpy().astype("<i4").tobytes()


def make_requests(rng: np.random.Generator, lengths: Sequence[int]) -> list[Request]:
    """Requests of these lengths, with every kind of sampling among them."""
    kinds = [(0.8, 0.8, 30, 10), (1.0, 1.0, 0, 0), (0.0, 1.0, 0, 10), (1.3, 0.95, 0, 128)]
    return [
        Request(
            random_prompt(rng, length),
            Sampling(int(rng.integers(0, 2**62)), *kinds[index % len(kinds)]),
        )
        for index, length in enumerate(lengths)
    ]


def run_prefill_alone(
    engine: Engine, request: Request, pages: Sequence[int], start_row: int = 0
) -> torch.Tensor:
    """All chunks of one prompt; the first output row."""
    c = engine.config
    start = request.prefill(0, pages, start_row)
    sequence = open_prefill(TINY, start, c.page_rows, c.pool_pages)
    while (row := engine.prefill_chunk(sequence)) is None:
        pass
    return row


def run_alone(
    engine: Engine, request: Request, pages: Sequence[int], steps: int, start_row: int = 0
) -> tuple[tuple[bytes, ...], list[list[int]]]:
    """Digests of the prompt's KV and `1 + steps` rows; goes on after a stop row."""
    first = run_prefill_alone(engine, request, pages, start_row)
    page_rows = engine.config.page_rows
    used = list(pages)[: -(-request.rows // page_rows)]
    digests = page_digests(engine.pool, used, request.rows)
    batch = engine.new_batch()
    batch.join(request.decode(0, pages, first, steps + 1))
    rows = [first.tolist()]
    for _ in range(steps):
        drawn, broken = engine.decode_step(batch)
        assert not broken.any()
        rows.append(drawn[0].tolist())
    return digests, rows


def run_together(
    engine: Engine,
    requests: Sequence[Request],
    pages: Sequence[Sequence[int]],
    joins: Sequence[int],
    steps: int,
) -> list[list[list[int]]]:
    """`1 + steps` rows of each request, all in one batch; request i joins at step `joins[i]`
    and leaves when it has its rows. Goes on after stop rows."""
    firsts = [run_prefill_alone(engine, r, p) for r, p in zip(requests, pages, strict=True)]
    rows = [[first.tolist()] for first in firsts]
    batch = engine.new_batch()
    for step in range(max(joins) + steps):
        for seq, request in enumerate(requests):
            if joins[seq] == step:
                batch.join(request.decode(seq, pages[seq], firsts[seq], steps + 1))
        seqs = batch.seqs
        drawn, broken = engine.decode_step(batch)
        assert not broken.any()
        for seq, row in zip(seqs, drawn.tolist(), strict=True):
            rows[seq].append(row)
            if len(rows[seq]) == steps + 1:
                batch.leave(seq)
    return rows


class FakeLink:
    """A link whose messages were written beforehand; the loop ends where they do."""

    def __init__(self) -> None:
        self.inbox: list[list[ToEngine]] = []
        self.sent: list[FromEngine] = []

    def poll(self) -> list[ToEngine]:
        return self.inbox.pop(0) if self.inbox else []

    def wait(self) -> list[ToEngine]:
        while self.inbox:
            if messages := self.inbox.pop(0):
                return messages
        return [Shutdown()]

    def send(self, message: FromEngine, fds: Sequence[int] = ()) -> None:
        assert not fds
        self.sent.append(message)


def table(noise: torch.Tensor) -> Noise:
    """Noise that is known for every entry, [m, entries]."""
    return lambda entries: noise.gather(1, entries)


def all_noise(
    seed: torch.Tensor, position: torch.Tensor, columns: torch.Tensor, entries: int
) -> torch.Tensor:
    """A row's noise in some columns for every entry, [m, columns, entries]."""
    return gumbel_noise(noise_keys(seed, position, columns)[:, :, None], torch.arange(entries))


class MadeUpBatch:
    """A GPU's batch that counts its streams' rows and computes nothing."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        """How many each seq had."""

    @property
    def seqs(self) -> tuple[int, ...]:
        return tuple(self.rows)

    def join(self, start: Start) -> None:
        self.rows[start.seq] = 0

    def leave(self, seq: int) -> None:
        del self.rows[seq]
