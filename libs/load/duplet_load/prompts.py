"""Prompt rows of a trace's parts, for any model: valid by its spec, and from names alone."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from duplet_load.trace import Arrival
from duplet_pages.spec import ModelSpec

KEPT_PARTS = 512
"""Parts whose rows are kept: popular voices come again and again."""


class PromptMaker:
    """Makes prompts for one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._part = lru_cache(KEPT_PARTS)(self._make_part)

    def prompt(self, arrival: Arrival) -> NDArray[np.int32]:
        """int32 [prompt rows, columns]."""
        return np.concatenate([self._part(name, rows) for name, rows in arrival.parts])

    def _make_part(self, name: str, count: int) -> NDArray[np.int32]:
        spec = self._spec
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        chance = np.random.default_rng(int.from_bytes(digest, "little"))
        rows = np.zeros((count, spec.columns), dtype=np.int32)
        if spec.codebooks == 0:
            rows[:, 0] = _ordinary_ids(chance, count, spec)
            return rows
        sizes = np.array(spec.codebook_sizes)
        sizes[0] = min(sizes[0], spec.semantic_last - spec.semantic_first + 1)
        rows[:, 1:] = chance.integers(sizes, size=(count, spec.codebooks))
        rows[:, 0] = rows[:, 1] + spec.semantic_first
        return rows


def _ordinary_ids(chance: np.random.Generator, count: int, spec: ModelSpec) -> NDArray[np.int64]:
    """Any ids but the stop row's, which has no place in a prompt."""
    ids = chance.integers(spec.vocab - 1, size=count)
    return ids + (ids >= spec.stop_id)
