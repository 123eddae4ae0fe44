"""The built-in voices: their reference rows, and how to tell by ear who speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from duplet_core.errors import InvalidInput, Reason
from duplet_models import directory
from duplet_voice.features import BINS, FFT, HOP, SAMPLE_RATE, warped_frequencies

_LOWEST_HZ: Final = 60.0
_HIGHEST_HZ: Final = 400.0
_WINDOW: Final = np.hanning(FFT + 1)[:-1]
_VOICED_ABOVE: Final = 0.6
"""Autocorrelation at the period, of 1, from which a frame has a pitch."""
_QUIET_DB: Final = -30.0
"""Against the loudest frame: what is quieter is not listened to."""
_COMPARED: Final = 12
"""Of the cepstra: the first ones are the tract's shape, later ones follow the pitch."""
_PITCH_SPREAD: Final = 0.12
"""One unit of distance in ln f0: a speaker's median differs by about so much between sentences."""
_SPECTRUM_SPREAD_DB: Final = 0.8
"""One unit of distance of the spectra."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What identifies a speaker in some speech."""

    f0_hz: float
    """Median over voiced frames."""
    spectrum_db: NDArray[np.float64]
    """Mean log spectrum of voiced frames as mel-cepstra 1.. in dB, [_COMPARED]; its level, the
    cepstrum 0, is left out."""

    def distance(self, other: Heard) -> float:
        """0 for the same; about 1 between two sentences of one speaker."""
        pitch = np.log(self.f0_hz / other.f0_hz) / _PITCH_SPREAD
        spectrum = np.sqrt(np.mean((self.spectrum_db - other.spectrum_db) ** 2))
        return float(np.hypot(pitch, spectrum / _SPECTRUM_SPREAD_DB))


@dataclass(frozen=True, slots=True, eq=False)
class VoiceEntry:
    """One voice."""

    name: str
    description: str
    heard: Heard
    rows: NDArray[np.int32]
    """Its reference, [rows, columns], every row semantic."""


class Voices:
    """The voices of one model, by name."""

    def __init__(self, entries: Mapping[str, VoiceEntry]) -> None:
        self._entries = dict(entries)

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the model's files; the first is the default."""
        return tuple(self._entries)

    def __getitem__(self, name: str) -> VoiceEntry:
        """
        Raises:
            InvalidInput: INVALID_REQUEST; no voice has this name.
        """
        try:
            return self._entries[name]
        except KeyError as error:
            raise InvalidInput(
                Reason.INVALID_REQUEST, f"voice: {name!r} is none of {', '.join(self.names)}"
            ) from error

    def describe(self) -> list[tuple[str, str]]:
        """Name and description of each."""
        return [(name, entry.description) for name, entry in self._entries.items()]

    def identify(self, samples: NDArray[np.float32]) -> str:
        """Whose speech this is: the nearest voice by pitch and spectrum.

        Args:
            samples: at 22,050 Hz, within (-1, 1); a second or more is wise.

        Raises:
            InvalidInput: INVALID_REQUEST; there is no voiced speech in it.
        """
        distances = self.distances(samples)
        return min(distances, key=distances.__getitem__)

    def distances(self, samples: NDArray[np.float32]) -> dict[str, float]:
        """How far the speech is from each voice; see `Heard.distance`."""
        heard = listen(samples)
        return {name: heard.distance(entry.heard) for name, entry in self._entries.items()}


def listen(samples: NDArray[np.float32]) -> Heard:
    """Pitch and spectrum of some speech at 22,050 Hz, as `Heard` has them.

    Raises:
        InvalidInput: INVALID_REQUEST; there is no voiced speech in it.
    """
    if len(samples) < FFT:
        raise InvalidInput(Reason.INVALID_REQUEST, f"samples: {len(samples)} are too few to hear")
    frames = np.lib.stride_tricks.sliding_window_view(samples, FFT)[::HOP] * _WINDOW
    loudness = (frames**2).mean(axis=1)
    frames = frames[loudness > max(1e-8, loudness.max() * 10 ** (_QUIET_DB / 10))]
    power = np.abs(np.fft.rfft(frames, 2 * FFT, axis=1)) ** 2
    pitch, periodicity = _pitches(power)
    voiced = periodicity > _VOICED_ABOVE
    if not voiced.any():
        raise InvalidInput(Reason.INVALID_REQUEST, "samples: there is no voiced speech in them")
    log_power = 10.0 * np.log10(power[voiced, ::2] + 1e-12)
    cepstra = log_power.mean(axis=0) @ _cepstrum_matrix()
    return Heard(float(np.median(pitch[voiced])), cepstra[1:])


def _pitches(power: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Hz and periodicity within [0, 1] of frames' power spectra [frames, FFT + 1]."""
    lags = np.fft.irfft(power, axis=1)[:, :FFT]
    window = np.fft.irfft(np.abs(np.fft.rfft(_WINDOW, 2 * FFT)) ** 2)[:FFT]
    shortest, longest = int(SAMPLE_RATE / _HIGHEST_HZ), int(SAMPLE_RATE / _LOWEST_HZ)
    scale = (window[shortest:longest] / window[0]) * np.maximum(lags[:, :1], 1e-20)
    correlation = lags[:, shortest:longest] / scale
    # The first lag that is nearly the best, so that a period is not taken for two.
    best = np.argmax(correlation > 0.9 * correlation.max(axis=1, keepdims=True), axis=1)
    window_after = np.arange(shortest // 2)
    near = np.minimum(best[:, None] + window_after, correlation.shape[1] - 1)
    peak = near[np.arange(len(best)), np.take_along_axis(correlation, near, axis=1).argmax(axis=1)]
    return SAMPLE_RATE / (peak + shortest), correlation[np.arange(len(peak)), peak]


def _cepstrum_matrix() -> NDArray[np.float64]:
    """[BINS, 1 + _COMPARED]: dB at the bins to mel-cepstra, least squares on the warped axis."""
    warped = warped_frequencies()
    basis = np.cos(np.outer(warped, np.arange(1 + _COMPARED)))
    weighted = np.gradient(warped)[:, None] * basis
    return np.asarray(np.linalg.solve(basis.T @ weighted, weighted.T).T).reshape(BINS, -1)


def load_voices(model: Path | None = None) -> Voices:
    """The voices of a model's directory; without one, the built-in model's.

    Raises:
        InvalidInput: INVALID_REQUEST; a file is missing or holds something else.
    """
    model = model if model is not None else directory("wren")
    path = model / "voices.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        rows = load_file(model / "voices.safetensors")
        entries = {
            name: VoiceEntry(
                name,
                str(fact["description"]),
                # 20 log10 of a cosine series is the same series in dB.
                Heard(float(fact["f0_hz"]), np.array(fact["spectrum_db"][:_COMPARED], np.float64)),
                rows[name],
            )
            for name, fact in facts.items()
        }
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(Reason.INVALID_REQUEST, f"voices: {path}: {error!r}") from error
    return Voices(entries)
