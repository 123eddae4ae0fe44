"""Features to samples, as they come: a source-filter vocoder.

The source of voiced speech is a train of pulses at fractional samples, its phase running from frame
to frame; each pulse is answered by the minimum-phase response of the envelope at its instant. The
noise is white, cut into windowed frames that overlap by half, each filtered by its frame's
envelope. With mel-cepstra c and the all-pass frequency w~, the minimum-phase response is

    H(w) = exp(sum_m c_m exp(-j m w~))

so one product with a fixed matrix gives ln|H| and the phase of all pulses and frames of a row.

The same samples come whole or in any chunks, bit for bit, because the work is always done one
codec row at a time: products, transforms and sums never see more or fewer rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from duplet_voice.features import (
    BINS,
    CEPSTRA,
    FFT,
    FRAME,
    HOP,
    LOG_F0,
    ROW_SAMPLES,
    SAMPLE_RATE,
    STACK,
    VOICED,
    band_weights,
    split_rows,
    warped_frequencies,
)

Samples = NDArray[np.float32]

HELD: Final = HOP + 32
"""Samples that wait for the next row: pulses up to it are not known yet, and a pulse's response
begins up to `_EARLY` samples before it."""

GAIN: Final = 1.6
"""Of the built-in voices: their peaks come to about 0.7 of full scale."""

_EARLY: Final = 32
_LOWEST_HZ: Final = 40.0
_HIGHEST_HZ: Final = 800.0
_KNEE: Final = 0.7
_DC_POLE: Final = 0.99
"""Of the high-pass against the pulses' mean: 35 Hz."""
_TAPER_BINS: Final = 24
"""Below half the sample rate the pulses fade out, so that a fractional sample rings less."""


@dataclass(frozen=True, slots=True)
class _Tables:
    """What is the same for every row; float32, read only."""

    log_basis: NDArray[np.float32]
    """[CEPSTRA + 1, BINS]; the last row is the high-pass."""
    phase_basis: NDArray[np.float32]
    """[CEPSTRA + 2, BINS]; then the high-pass, then one sample's delay."""
    bands: NDArray[np.float32]
    """[BANDS + 1, BINS], ln of power."""
    taper: NDArray[np.float32]
    """[BINS]."""
    window: NDArray[np.float32]
    """[2 * HOP]; shifted by HOP it adds up to 1."""


@cache
def _tables() -> _Tables:
    w = np.linspace(0.0, np.pi, BINS)
    angles = np.outer(np.arange(CEPSTRA), warped_frequencies())
    z = np.exp(-1j * w)
    # Its zero at 0 Hz has no logarithm; -60 dB there.
    high_pass = np.log((1.0 - z + 1e-3 * (w == 0)) / (1.0 - _DC_POLE * z) * (1 + _DC_POLE) / 2)
    taper = np.ones(BINS)
    taper[-_TAPER_BINS:] = 0.5 + 0.5 * np.cos(np.pi * np.arange(1, _TAPER_BINS + 1) / _TAPER_BINS)
    return _Tables(
        log_basis=np.vstack([np.cos(angles), high_pass.real]).astype(np.float32),
        phase_basis=np.vstack([-np.sin(angles), high_pass.imag, -w]).astype(np.float32),
        bands=(band_weights() * (np.log(10.0) / 10.0)).astype(np.float32),
        taper=taper.astype(np.float32),
        window=(0.5 - 0.5 * np.cos(np.pi * np.arange(2 * HOP) / HOP)).astype(np.float32),
    )


class Vocoder:
    """One stream of speech. Owns all its buffers; what it returns is the caller's."""

    def __init__(self, *, gain: float = GAIN, noise_seed: int = 0) -> None:
        self._gain = np.float32(gain)
        self._bits = np.random.PCG64(noise_seed)
        """Read in order, a row's noise at a time: sample n's noise depends on n alone."""
        self._noise = np.zeros(HOP, np.float32)
        """The source's last HOP samples, which the next row's first frame overlaps."""
        self._sums = np.zeros(ROW_SAMPLES + FFT, np.float32)
        """Overlapping responses; index 0 is the first sample that was not given out."""
        self._last_frame: NDArray[np.float32] | None = None
        self._phase = 0.0
        """Periods since a pulse, [0, 1)."""

    def push(self, rows: NDArray[np.float32]) -> Samples:
        """The samples that these codec rows make final.

        Args:
            rows: float32 [rows, ROW], or frames [rows * STACK, FRAME]; see `features`.

        Returns:
            float32 within (-1, 1), 22,050 a second: ROW_SAMPLES a row, HELD of them a row later
            (the first push gives so many fewer, `flush` gives them).
        """
        frames = split_rows(np.ascontiguousarray(rows, dtype=np.float32))
        blocks = frames.reshape(-1, STACK, FRAME)
        return np.concatenate([np.empty(0, np.float32), *map(self._speak, blocks)])

    def flush(self) -> Samples:
        """The last HELD samples, faded out; nothing where no row was pushed. What is pushed after
        it is another utterance."""
        if self._last_frame is None:
            return np.empty(0, np.float32)
        fade = np.linspace(1.0, 0.0, HELD, dtype=np.float32)
        samples = self._limited(self._sums[:HELD] * fade)
        self._last_frame = None
        self._sums[:] = 0.0
        return samples

    def _speak(self, frames: NDArray[np.float32]) -> Samples:
        """One row, frames [STACK, FRAME]: the samples that it makes final."""
        first = self._last_frame is None
        before = frames[:1] if self._last_frame is None else self._last_frame
        known = np.concatenate([before, frames])
        self._last_frame = known[-1:].copy()
        self._add_pulses(known)
        self._add_noise(frames)
        # Before the first frame's centre there are HOP samples of nobody's speech.
        skipped = HOP + _EARLY if first else 0
        samples = self._limited(self._sums[skipped:ROW_SAMPLES])
        self._sums[:-ROW_SAMPLES] = self._sums[ROW_SAMPLES:]
        self._sums[-ROW_SAMPLES:] = 0.0
        return samples

    def _find_pulses(
        self, known: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Voiced pulses between the first and the last of the known frames: where they are, in
        samples from the first frame's centre, and how many samples their periods have."""
        f0 = np.exp(known[:, LOG_F0].astype(np.float64)).clip(_LOWEST_HZ, _HIGHEST_HZ)
        share = np.arange(HOP) / HOP
        step = (f0[:-1, None] + np.diff(f0)[:, None] * share).ravel() / SAMPLE_RATE
        phase = self._phase + np.cumsum(step)
        self._phase = float(phase[-1] % 1.0)
        whole = np.floor(phase)
        index = np.flatnonzero(np.diff(whole, prepend=0.0))
        at = index + 1.0 - (phase[index] - whole[index]) / step[index]
        nearest = np.minimum((at / HOP + 0.5).astype(np.intp), STACK)
        voiced = known[nearest, VOICED] > 0.5
        return at[voiced], 1.0 / step[index[voiced]]

    def _add_pulses(self, known: NDArray[np.float32]) -> None:
        """Add the responses of the pulses between the known frames, [STACK + 1, FRAME]."""
        at, period = self._find_pulses(known)
        if not len(at):
            return
        left = np.minimum((at / HOP).astype(np.intp), STACK - 1)
        weight = (at / HOP - left).astype(np.float32)[:, None]
        envelopes = known[left] * (1 - weight) + known[left + 1] * weight
        place = np.floor(at)
        tables = _tables()
        spectra = _responses(envelopes, (at - place + _EARLY).astype(np.float32), tables)
        tonal = np.sqrt(1.0 - _noise_power(envelopes, tables))
        # A pulse has the power of its whole period.
        spectra *= tonal * np.sqrt(period).astype(np.float32)[:, None] * tables.taper
        answers = np.fft.irfft(spectra, FFT, axis=1)
        for first, answer in zip(place.astype(int), answers, strict=True):
            self._sums[first : first + FFT] += answer

    def _add_noise(self, frames: NDArray[np.float32]) -> None:
        """Add the noise of a row's frames, [STACK, FRAME]: all of the unvoiced ones' sound."""
        tables = _tables()
        spectra = _responses(frames, np.full(STACK, _EARLY, np.float32), tables)
        share = np.sqrt(_noise_power(frames, tables))
        voiced = frames[:, VOICED, None] > 0.5
        spectra *= self._noise_spectra(tables) * np.where(voiced, share, np.float32(1.0))
        answers = np.fft.irfft(spectra, FFT, axis=1)
        for frame, answer in enumerate(answers):
            self._sums[frame * HOP : frame * HOP + FFT] += answer

    def _noise_spectra(self, tables: _Tables) -> NDArray[np.complex64]:
        """Spectra of the row's windowed noise frames, [STACK, BINS]."""
        words = self._bits.random_raw(ROW_SAMPLES // 4).view(np.uint16)
        # Evenly spread with variance 1; filtered, nobody hears that it is not Gaussian.
        fresh = (words.astype(np.float32) - 32767.5) * np.float32(12**0.5 / 65536)
        source = np.concatenate([self._noise, fresh])
        self._noise = source[-HOP:]
        cut = np.lib.stride_tricks.sliding_window_view(source, 2 * HOP)[::HOP]
        return np.asarray(np.fft.rfft(cut * tables.window, FFT, axis=1), np.complex64)

    def _limited(self, samples: Samples) -> Samples:
        """Times the gain; what is louder than the knee is bent so that it never reaches 1."""
        samples = samples * self._gain
        loud = np.abs(samples)
        if loud.max(initial=0.0) <= _KNEE:
            return samples
        room = np.float32(1.0 - _KNEE)
        bent = _KNEE + room * np.tanh((loud - np.float32(_KNEE)) / room)
        return np.where(loud > _KNEE, np.copysign(bent, samples), samples)


def _responses(
    envelopes: NDArray[np.float32], delays: NDArray[np.float32], tables: _Tables
) -> NDArray[np.complex64]:
    """Minimum-phase responses, complex64 [n, BINS], delayed by so many samples each."""
    ones = np.ones((len(envelopes), 1), np.float32)
    cepstra = np.concatenate([envelopes[:, :CEPSTRA], ones, delays[:, None]], axis=1)
    amplitude = np.exp(np.minimum(cepstra[:, :-1] @ tables.log_basis, np.float32(10.0)))
    phase = cepstra @ tables.phase_basis
    spectra = np.empty(phase.shape, np.complex64)
    np.multiply(amplitude, np.cos(phase), out=spectra.real)
    np.multiply(amplitude, np.sin(phase), out=spectra.imag)
    return spectra


def _noise_power(envelopes: NDArray[np.float32], tables: _Tables) -> NDArray[np.float32]:
    """The noise's share of a voiced frame's power, float32 [n, BINS], within [0, 1]."""
    ones = np.ones((len(envelopes), 1), np.float32)
    bands = np.minimum(envelopes[:, CEPSTRA:LOG_F0], np.float32(0.0))
    power: NDArray[np.float32] = np.exp(np.concatenate([bands, ones], axis=1) @ tables.bands)
    return np.minimum(power, np.float32(1.0))


def pcm16(samples: Samples) -> NDArray[np.int16]:
    """Samples within (-1, 1) as 16-bit integers."""
    return np.asarray(np.rint(samples * np.float32(32767.0)), dtype="<i2")
