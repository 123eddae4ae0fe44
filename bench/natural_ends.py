"""Do streams end alike with overlap and without? `python -m bench.natural_ends`, on one GPU.

The built-in model `tiny`, whose streams end by themselves, in the monolith's loops with all slots
full: `--ends` streams that drew the stop row with overlap, as many without, from other seeds.
Were a step's rows read late, dropped or counted twice, lengths would be off by one and the share
of streams that reach the limit would differ.

Lengths are compared by the test of Kolmogorov and Smirnov, reasons by chi-square with one degree
of freedom; each gives how likely a difference as large is among equals.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.results import Report
from duplet_core.engine import ChunkDone, FromEngine, Shutdown, Start, StepDone, Stopped, ToEngine
from duplet_core.errors import require
from duplet_core.messages import Sampling
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.gpu_start import GpuLoop
from duplet_engine.tiny import TINY, tiny_weights
from duplet_pages.engine_config import EngineConfig

SLOTS = 256
PAGE_ROWS = 16
MOST_ROWS = 256
PROMPT_ROWS = range(20, 60)
STREAM_PAGES = -(-(PROMPT_ROWS[-1] + MOST_ROWS) // PAGE_ROWS)
LEAST_CHANCE = 0.01
"""Of a difference as large among equals; below it the two are told apart."""


@dataclass(slots=True)
class _Live:
    """A stream from its prompt's Start to its stream's Stopped."""

    number: int
    pages: tuple[int, ...]
    prompt_rows: int
    rows: int = 1


class Streams:
    """The I/O process of a monolith that keeps all slots full. Counts how streams end."""

    def __init__(self, ends: int, first_seed: int) -> None:
        """Goes on until `ends` streams have drawn the stop row."""
        self._ends = ends
        self._first_seed = first_seed
        self._waiting: list[ToEngine] = []
        self._live: dict[int, _Live] = {}
        self._next = 0
        self.lengths: list[int] = []
        """Of streams that drew the stop row."""
        self.limited = 0
        """Streams that reached the limit."""
        for slot in range(SLOTS):
            pages = range(slot * STREAM_PAGES, (slot + 1) * STREAM_PAGES)
            self._begin(tuple(pages))

    def poll(self) -> list[ToEngine]:
        """What the engine is asked next."""
        if len(self.lengths) >= self._ends:
            return [Shutdown()]
        waiting, self._waiting = self._waiting, []
        return waiting

    def wait(self) -> list[ToEngine]:
        """The same: with a stream live, something always waits."""
        messages = self.poll()
        require(bool(messages), "the engine waits and no prompt does")
        return messages

    def send(self, message: FromEngine, fds: Sequence[int] = ()) -> None:
        """Take what the engine says."""
        require(not fds, "only Ready brings descriptors")
        if isinstance(message, ChunkDone):
            if message.first_row is not None:
                self._go_on(message.seq, message.first_row, message.stopped)
        elif isinstance(message, StepDone):
            for seq in message.seqs:
                self._live[seq].rows += 1
            for seq, stopped in message.ends:
                self._count(self._live[seq], stopped)
        else:
            require(isinstance(message, Stopped), f"{message}")
            assert isinstance(message, Stopped)
            self._begin(self._live.pop(message.seq).pages)

    def _begin(self, pages: tuple[int, ...]) -> None:
        """A prompt in pages that nothing names any more."""
        number, self._next = self._next, self._next + 1
        chance = np.random.default_rng((self._first_seed, number))
        prompt = np.zeros((int(chance.choice(PROMPT_ROWS)), TINY.columns), "<i4")
        prompt[:, 0] = chance.integers(0, 256, len(prompt))
        live = _Live(number, pages, len(prompt))
        self._live[2 * number] = live
        start = Start(2 * number, pages, prompt.tobytes(), 0, 0, self._sampling(number))
        self._waiting.append(start)

    def _go_on(self, seq: int, first_row: bytes, stopped: bool) -> None:
        live = self._live.pop(seq)
        if stopped:
            live.rows = 0
            self._count(live, stopped)
            self._begin(live.pages)
            return
        self._live[seq + 1] = live
        sampling = self._sampling(live.number)
        rows = live.prompt_rows
        self._waiting.append(Start(seq + 1, live.pages, first_row, rows, MOST_ROWS, sampling))

    def _count(self, live: _Live, stopped: bool) -> None:
        if stopped:
            self.lengths.append(live.rows)
        else:
            self.limited += 1

    def _sampling(self, number: int) -> Sampling:
        return Sampling(self._first_seed + number, 0.8, 0.8, 30, 10)


def smirnov_chance(a: Sequence[int], b: Sequence[int]) -> float:
    """How likely two samples of one distribution differ as much as `a` and `b`. Cautious where
    values are equal, as lengths are: the true chance is then smaller or the same."""
    values = np.union1d(a, b)
    cumulative = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (a, b)]
    distance = float(np.abs(cumulative[0] - cumulative[1]).max())
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0
    signs = ((k, 1.0 if k % 2 else -1.0) for k in range(1, 101))
    return min(1.0, 2 * sum(sign * math.exp(-2 * (k * scaled) ** 2) for k, sign in signs))


def chi_square_chance(a: tuple[int, int], b: tuple[int, int]) -> float:
    """How likely two samples of one distribution over two outcomes differ as much."""
    table = np.array((a, b), float)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    if not expected.all():
        return 1.0
    return math.erfc(math.sqrt(float(((table - expected) ** 2 / expected).sum()) / 2))


def run(overlap: bool, ends: int, first_seed: int) -> Streams:
    """All streams of one variant."""
    weights = {name: tensor.cuda() for name, tensor in tiny_weights().items()}
    config = EngineConfig(
        "monolith",
        device="cuda",
        model=TINY.name,
        pool_pages=SLOTS * STREAM_PAGES,
        page_rows=PAGE_ROWS,
        slots=SLOTS,
        chunk_rows=512,
        overlap=overlap,
    )
    engine = GpuEngine(config, TINY, weights)
    streams = Streams(ends, first_seed)
    GpuLoop(engine)(streams)
    engine.close()
    return streams


def measure(report: Report, ends: int) -> None:
    """Both variants and how they differ."""
    found: dict[bool, Streams] = {}
    for overlap, first_seed in ((True, 1), (False, 1 << 40)):
        began = time.perf_counter()
        found[overlap] = run(overlap, ends, first_seed)
        name = "overlap" if overlap else "normal"
        streams = found[overlap]
        report.add(f"{name}_natural_ends", len(streams.lengths), "streams", f">= {ends}")
        report.add(f"{name}_limit_ends", streams.limited, "streams")
        report.add(f"{name}_mean_rows", float(np.mean(streams.lengths)), "rows")
        report.add(f"{name}_took_s", time.perf_counter() - began, "s")
        print(f"{name}: {len(streams.lengths)} drew the stop row", flush=True)
    on, off = found[True], found[False]
    reasons = [(len(s.lengths), s.limited) for s in (on, off)]
    budget = f">= {LEAST_CHANCE}"
    report.add("lengths_smirnov_chance", smirnov_chance(on.lengths, off.lengths), "ratio", budget)
    report.add("reasons_chi_square_chance", chi_square_chance(*reasons), "ratio", budget)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ends", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    report = Report("natural_ends", f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    try:
        measure(report, options.ends)
    finally:
        report.save()
    print(report.table())


if __name__ == "__main__":
    main()
