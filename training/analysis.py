"""Recordings as features.

What a frame's 44 numbers mean stands in `duplet_voice.features`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from duplet_voice.features import (
    CEPSTRA,
    FFT,
    FRAME,
    HOP,
    LOG_F0,
    SAMPLE_RATE,
    VOICED,
    warped_frequencies,
)

_LEAST_POWER = 1e-8
"""Below it is silence; its level would only waste codes."""
_SILENT_DB = -58.0
"""Frames below it, before the first and after the last loud one, are cut off."""
_LEAD_FRAMES, _TRAIL_FRAMES = 6, 14
_UNVOICED_DB = -1.0
"""A frame whose lower band is as noisy as this has no pitch."""
_DEFAULT_F0_HZ = 150.0
_SPLIT_BIN = 4000 * FFT // SAMPLE_RATE
"""First bin of the upper band of aperiodicity."""

Array = NDArray[np.float32]


@cache
def envelope_matrix() -> NDArray[np.float64]:
    """[40, bins]: mel-cepstra to log amplitudes."""
    return np.cos(np.outer(np.arange(CEPSTRA), warped_frequencies()))


@cache
def cepstrum_matrix() -> NDArray[np.float64]:
    """[bins, 40]: log amplitudes to mel-cepstra, least squares on the warped axis."""
    basis = envelope_matrix()
    weighted = basis * np.gradient(warped_frequencies())
    return np.asarray(np.linalg.solve(weighted @ basis.T, weighted).T)


def analyse(samples: NDArray[np.float64], f0: NDArray[np.float64]) -> Array:
    """Features of a recording, float32 [frames, 44].

    Args:
        samples: [n] at 22,050 Hz, in [-1, 1].
        f0: Hz at each hop, [n // 256 + 1]; 0 where there is no pitch.
    """
    import pyworld

    times = np.arange(len(f0)) * HOP / SAMPLE_RATE
    power = pyworld.cheaptrick(samples, f0, times, SAMPLE_RATE, fft_size=FFT)
    noise = pyworld.d4c(samples, f0, times, SAMPLE_RATE, fft_size=FFT)
    noise_db = 20.0 * np.log10(np.maximum(noise, 1e-3))
    bands = np.stack((noise_db[:, :_SPLIT_BIN].mean(1), noise_db[:, _SPLIT_BIN:].mean(1)), axis=1)
    voiced = (f0 > 0) & (bands[:, 0] < _UNVOICED_DB)
    frames = np.empty((len(f0), FRAME), np.float32)
    frames[:, :CEPSTRA] = 0.5 * np.log(np.maximum(power, _LEAST_POWER)) @ cepstrum_matrix()
    frames[:, CEPSTRA:LOG_F0] = bands
    frames[:, LOG_F0] = _fill_pitch(f0, voiced)
    frames[:, VOICED] = voiced
    return _cut_silence(frames, power.mean(axis=1))


def _fill_pitch(f0: NDArray[np.float64], voiced: NDArray[np.bool_]) -> NDArray[np.float64]:
    """ln f0 [frames], with straight lines through unvoiced parts."""
    known = np.flatnonzero(voiced)
    if not len(known):
        return np.full(len(f0), np.log(_DEFAULT_F0_HZ))
    return np.interp(np.arange(len(f0)), known, np.log(f0[known]))


def _cut_silence(frames: Array, power: NDArray[np.float64]) -> Array:
    """The loud frames with fixed margins of silence; nothing where all is silent."""
    loud = np.flatnonzero(10.0 * np.log10(power + 1e-12) > _SILENT_DB)
    if not len(loud):
        return frames[:0]
    first, last = loud[0] - _LEAD_FRAMES, loud[-1] + 1 + _TRAIL_FRAMES
    places = np.clip(np.arange(first, last), 0, len(frames) - 1)
    return frames[places]
