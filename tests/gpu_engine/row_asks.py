"""Requests for models that take only rows, of random rows behind a few shared voices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duplet_pages.spec import ModelSpec
from tests.equality import asks

VOICES = 4


def random_rows(spec: ModelSpec, seed: int, count: int) -> np.ndarray:
    """Semantic rows, int32 [count, columns]."""
    chance = np.random.default_rng(seed)
    sizes = [min(size, spec.vocab) for size in spec.codebook_sizes]
    rows = np.empty((count, spec.columns), np.int32)
    rows[:, 1:] = chance.integers(0, sizes, (count, spec.codebooks))
    rows[:, 0] = spec.semantic_first + rows[:, 1]
    return rows


@dataclass(frozen=True, slots=True)
class RowAsk(asks.Ask):
    """As `asks.Ask`, for any model with codebooks."""

    def prompt(self, spec: ModelSpec) -> np.ndarray:
        """int32 [rows, columns]; 330 to 1,500 rows, the greater part of them a voice's."""
        voice = random_rows(spec, self.number % VOICES, (300, 520, 800, 1300)[self.number % VOICES])
        own = random_rows(spec, 1000 + self.number, 30 + 17 * self.number % 170)
        return np.concatenate((voice, own))
