"""Acoustic features of a frame, as WORLD analyses speech and as the vocoder speaks it.

A frame is 44 numbers and is centred at sample `HOP * k`:

    0..39   mel-cepstra c_m:  ln|H(w)| = sum_m c_m cos(m * warped(w)),  WARP = 0.455
    40..41  aperiodicity in dB (<= 0): its mean below 4 kHz, and from there up
    42      ln of f0 in Hz, interpolated through unvoiced parts
    43      1 where voiced, else 0

|H|^2 is WORLD's spectral envelope: the power of the speech, were its source white with variance 1.
Four frames, one after the other, are one row of the codec.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE: Final = 22_050
HOP: Final = 256
"""Samples from frame to frame."""
FFT: Final = 1024
"""Samples of a transform; also pyworld's `fft_size` at this rate."""
BINS: Final = FFT // 2 + 1
WARP: Final = 0.455
"""Of the all-pass that bends frequencies as hearing does, at this rate."""
CEPSTRA: Final = 40
BANDS: Final = 2
LOG_F0: Final = CEPSTRA + BANDS
VOICED: Final = LOG_F0 + 1
FRAME: Final = VOICED + 1
STACK: Final = 4
"""Frames of a codec row."""
ROW: Final = STACK * FRAME
ROW_SAMPLES: Final = STACK * HOP
ROWS_PER_SECOND: Final = SAMPLE_RATE / ROW_SAMPLES

_SPLIT_BIN: Final = 4000 * FFT // SAMPLE_RATE
"""First bin of the upper band."""
_KNOTS_HZ: Final = (0.0, 3000.0, 6000.0, SAMPLE_RATE / 2)
"""WORLD's aperiodicity is linear in dB between these: -60, two values of its own, and 0."""
_LOWEST_DB: Final = -60.0


@cache
def warped_frequencies() -> NDArray[np.float64]:
    """Each bin's frequency after the all-pass, radians [BINS], from 0 to pi."""
    w = np.linspace(0.0, np.pi, BINS)
    return w + 2.0 * np.arctan2(WARP * np.sin(w), 1.0 - WARP * np.cos(w))


@cache
def band_weights() -> NDArray[np.float64]:
    """[BANDS + 1, BINS]: the two bands' dB and a last 1, to the dB at every bin.

    WORLD's curve has two free values, so its two means give it back as it was.
    """
    hz = np.linspace(0.0, SAMPLE_RATE / 2, BINS)
    knots = np.stack([np.interp(hz, _KNOTS_HZ, knot) for knot in np.eye(len(_KNOTS_HZ))])
    means = np.stack([knots[:, :_SPLIT_BIN].mean(1), knots[:, _SPLIT_BIN:].mean(1)], axis=1)
    free = np.linalg.solve(means[1:3], knots[1:3])
    fixed = _LOWEST_DB * (knots[0] - means[0] @ free)
    return np.vstack([free, fixed])


def split_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Frames [rows * STACK, FRAME] of codec rows [rows, ROW]; no copy where memory allows it."""
    return rows.reshape(-1, FRAME)
