"""What the tests of the voice share."""

from __future__ import annotations

import numpy as np

from duplet_voice.features import CEPSTRA, LOG_F0, ROW, STACK, VOICED, split_rows

BOOKS, ENTRIES = 10, 1024
FIRST = 256
"""The first semantic id."""


def speech_features(rows: int, f0_hz: float = 150.0, seed: int = 0) -> np.ndarray:
    """Voiced and unvoiced rows in turn, float32 [rows, ROW]: a tilted envelope that moves."""
    random = np.random.default_rng(seed)
    made = np.zeros((rows, ROW), np.float32)
    frames = split_rows(made)
    frames[:, 0] = -5.0
    frames[:, 1] = 0.8
    frames[:, 2:CEPSTRA] = random.normal(0, 0.05, (len(frames), CEPSTRA - 2))
    frames[:, CEPSTRA:LOG_F0] = (-25.0, -8.0)
    frames[:, LOG_F0] = np.log(f0_hz) + 0.1 * np.sin(np.arange(len(frames)) / 9)
    frames[:, VOICED] = np.arange(len(frames)) // (3 * STACK) % 4 != 3
    return made
