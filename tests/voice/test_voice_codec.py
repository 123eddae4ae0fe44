"""Codes to features: the sum of the books' entries, row by row, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from duplet_core.errors import InvalidInput, Reason
from duplet_pages.spec import ModelSpec
from duplet_voice.codec import Codec, load_codec
from duplet_voice.features import ROW, ROW_SAMPLES
from duplet_voice.speech import Speech, speak_rows
from tests.voice.voice_parts import BOOKS, ENTRIES, FIRST


def test_features_are_the_scaled_sum_of_the_entries(model: Path) -> None:
    tables = load_file(model / "codec.safetensors")
    codes = np.arange(BOOKS)[None, :] * 7 + np.array([[0], [3]])
    expected = tables["mean"] + tables["scale"] * sum(
        tables["codebooks"][book, codes[:, book]].astype(np.float64) for book in range(BOOKS)
    )
    assert load_codec(model).features(codes) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_row_has_the_same_bits_alone(model: Path) -> None:
    codec = load_codec(model)
    codes = np.random.default_rng(0).integers(0, ENTRIES, (7, BOOKS))
    alone = np.concatenate([codec.features(codes[row : row + 1]) for row in range(7)])
    assert np.array_equal(codec.features(codes), alone)


@pytest.mark.parametrize("code", [-1, ENTRIES])
def test_a_code_without_an_entry_is_named(model: Path, code: int) -> None:
    codes = np.zeros((3, BOOKS), np.int32)
    codes[2, 4] = code
    with pytest.raises(InvalidInput, match=rf"row 2 book 4 has {code}") as caught:
        load_codec(model).features(codes)
    assert caught.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize("shape", [(3,), (3, BOOKS + 1), (0, 3)])
def test_codes_of_another_shape_are_refused(model: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="codes: shape"):
        load_codec(model).features(np.zeros(shape, np.int32))


def test_tables_of_another_shape_are_refused() -> None:
    books, row = np.zeros((2, 4, ROW)), np.ones(ROW)
    with pytest.raises(InvalidInput, match="codebooks"):
        Codec(np.zeros((2, 4, ROW - 1)), row, row)
    with pytest.raises(InvalidInput, match="scale"):
        Codec(books, row, np.ones(ROW + 1))


def test_a_codec_that_is_not_there_or_is_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "codec.safetensors"
    with pytest.raises(InvalidInput, match="codec"):
        load_codec(tmp_path)
    path.write_bytes(b"not tensors")
    with pytest.raises(InvalidInput, match="codec"):
        load_codec(tmp_path)
    save_file({"mean": np.zeros(ROW, np.float32)}, path)
    with pytest.raises(InvalidInput, match="codebooks"):
        load_codec(tmp_path)


def speech_rows(count: int) -> np.ndarray:
    codes = np.random.default_rng(3).integers(0, ENTRIES, (count, BOOKS)).astype(np.int32)
    return np.concatenate([codes[:, :1] + FIRST, codes], axis=1)


def test_rows_become_samples_and_the_stop_row_has_none(model: Path, spec: ModelSpec) -> None:
    codec, rows = load_codec(model), speech_rows(6)
    stop = np.zeros((1, 1 + BOOKS), np.int32)
    stop[0, 0] = spec.stop_id
    samples = speak_rows(spec, codec, np.concatenate([rows, stop]))
    assert len(samples) == 6 * ROW_SAMPLES
    speech = Speech(spec, codec)
    one_by_one = [speech.push(row[None]) for row in (*rows, stop[0])]
    assert np.array_equal(samples, np.concatenate([*one_by_one, speech.flush()]))


def test_a_row_that_is_no_speech_is_named(model: Path, spec: ModelSpec) -> None:
    rows = speech_rows(3)
    rows[1, 0] = 20
    with pytest.raises(InvalidInput, match="row 1 has id 20"):
        Speech(spec, load_codec(model)).push(rows)
