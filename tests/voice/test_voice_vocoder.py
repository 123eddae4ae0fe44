"""The vocoder: the same samples in any chunks, within bounds, at the pitch it is told."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_voice.features import (
    CEPSTRA,
    HOP,
    ROW_SAMPLES,
    SAMPLE_RATE,
    VOICED,
    band_weights,
    split_rows,
)
from duplet_voice.vocoder import GAIN, HELD, Vocoder, pcm16
from duplet_voice.voices import listen
from tests.voice.voice_parts import speech_features


def whole(features: np.ndarray, gain: float = GAIN, noise_seed: int = 0) -> np.ndarray:
    vocoder = Vocoder(gain=gain, noise_seed=noise_seed)
    return np.concatenate([vocoder.push(features), vocoder.flush()])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 14),
    cuts=st.lists(st.integers(0, 14), max_size=6),
    f0_hz=st.sampled_from([45.0, 70.0, 111.1, 233.3, 390.0, 900.0]),
    seed=st.integers(0, 1000),
)
def test_chunks_give_the_bits_of_the_whole(
    rows: int, cuts: list[int], f0_hz: float, seed: int
) -> None:
    features = speech_features(rows, f0_hz, seed)
    vocoder = Vocoder()
    borders = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    parts = [vocoder.push(features[first:end]) for first, end in pairwise(borders)]
    parts.append(vocoder.flush())
    assert np.array_equal(np.concatenate(parts), whole(features))


def test_every_row_has_its_samples_and_the_last_ones_come_with_flush() -> None:
    vocoder = Vocoder()
    features = speech_features(5)
    assert len(vocoder.push(features[:0])) == 0
    assert len(vocoder.push(features[:1])) == ROW_SAMPLES - HELD
    assert len(vocoder.push(features[1:5])) == 4 * ROW_SAMPLES
    assert len(vocoder.flush()) == HELD
    assert len(vocoder.flush()) == 0


def test_frames_may_come_as_frames() -> None:
    features = speech_features(3)
    assert np.array_equal(whole(features), whole(split_rows(features)))


def test_after_its_end_another_utterance_begins_in_silence() -> None:
    vocoder = Vocoder()
    features = speech_features(4)
    vocoder.push(features)
    vocoder.flush()
    split_rows(features)[:, 0] = -30.0
    assert np.abs(vocoder.push(features)).max() < 1e-6


def test_nothing_pushed_is_nothing_heard() -> None:
    assert len(Vocoder().flush()) == 0


@pytest.mark.parametrize("level", [-20.0, -5.0, 0.0, 5.0, 1e4])
def test_no_level_leaves_the_range_of_a_sample(level: float) -> None:
    features = speech_features(6)
    split_rows(features)[:, 0] = level
    samples = whole(features)
    assert np.isfinite(samples).all()
    assert np.abs(samples).max() <= 1.0
    loud = np.abs(samples) > 1e-3
    # A sample that wrapped around would have the other sign.
    assert np.array_equal(np.sign(pcm16(samples))[loud], np.sign(samples)[loud])


def test_what_is_below_the_knee_is_not_bent() -> None:
    features = speech_features(6)
    split_rows(features)[:, 0] = -9.0
    assert np.array_equal(whole(features, gain=2.0), 2.0 * whole(features, gain=1.0))


@pytest.mark.parametrize("f0_hz", [80.0, 123.4, 200.0, 320.0])
def test_the_pitch_is_the_one_of_the_features(f0_hz: float) -> None:
    features = speech_features(30, f0_hz)
    split_rows(features)[:, VOICED] = 1.0
    assert listen(whole(features)).f0_hz == pytest.approx(f0_hz, rel=0.03)


def test_unvoiced_speech_has_no_pitch_and_the_same_level() -> None:
    features = speech_features(30)
    levels = []
    for voiced in (0.0, 1.0):
        split_rows(features)[:, VOICED] = voiced
        levels.append(np.sqrt(np.mean(whole(features)[HOP:] ** 2)))
    # The envelope is the power whatever the source; 1.5 dB for the high-pass and the taper.
    assert abs(20 * np.log10(levels[0] / levels[1])) < 1.5


def test_a_mark_in_the_envelope_is_where_the_spectrum_has_it() -> None:
    """Level and shape: an envelope that is flat at -40 dB sounds at -40 dB."""
    features = np.zeros((40, 4 * 44), np.float32)
    frames = split_rows(features)
    frames[:, 0] = np.log(0.01)
    frames[:, CEPSTRA : CEPSTRA + 2] = -60.0
    frames[:, CEPSTRA + 2] = np.log(150.0)
    samples = whole(features, gain=1.0)[4 * HOP :]
    spectrum = np.abs(np.fft.rfft(samples)) ** 2 / len(samples)
    for low, high in ((1000, 2000), (4000, 6000), (8000, 9500)):
        band = slice(low * len(samples) // SAMPLE_RATE, high * len(samples) // SAMPLE_RATE)
        assert 10 * np.log10(spectrum[band].mean()) == pytest.approx(-40.0, abs=1.0)


def test_two_bands_give_back_the_curve_they_were_taken_of() -> None:
    hz = np.linspace(0.0, SAMPLE_RATE / 2, 513)
    curve = np.interp(hz, (0, 3000, 6000, SAMPLE_RATE / 2), (-60.0, -21.0, -4.5, 0.0))
    split = 4000 * 1024 // SAMPLE_RATE
    bands = np.array([curve[:split].mean(), curve[split:].mean(), 1.0])
    assert bands @ band_weights() == pytest.approx(curve, abs=1e-9)


def test_noise_goes_on_through_pieces_and_differs_by_seed() -> None:
    features = speech_features(4)
    split_rows(features)[:, VOICED] = 0.0
    assert not np.array_equal(whole(features), whole(features, noise_seed=1))
    assert np.array_equal(whole(features), whole(features))
