"""A model's files made up on the spot: codec tables and voices of random numbers."""

# ruff: noqa: RUF001 (phonemes look like letters)
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from duplet_pages.spec import ModelSpec, SamplingDefaults
from duplet_voice.features import ROW
from tests.voice.voice_parts import BOOKS, ENTRIES, FIRST, speech_features


@pytest.fixture
def spec() -> ModelSpec:
    """Of a model shaped like the built-in one."""
    return ModelSpec(
        name="wren",
        fingerprint="0" * 32,
        codebooks=BOOKS,
        vocab=FIRST + ENTRIES,
        codebook_sizes=(ENTRIES,) * BOOKS,
        semantic_first=FIRST,
        semantic_last=FIRST + ENTRIES - 1,
        stop_id=1,
        page_rows=16,
        longest_sequence=1024,
        default_max_rows=400,
        layers=6,
        kv_heads=2,
        head_dim=64,
        dtype="float32",
        kv_hash="xxh3-128",
        rows_per_second=21.53,
        sampling=SamplingDefaults(),
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as `duplet_models` has it, without weights."""
    random = np.random.default_rng(1)
    books = random.normal(0, 0.3, (BOOKS, ENTRIES, ROW)) / np.arange(1, BOOKS + 1)[:, None, None]
    features = speech_features(40)
    save_file(
        {
            "codebooks": books.astype(np.float16),
            "mean": features.mean(axis=0),
            "scale": features.std(axis=0) + 0.01,
        },
        tmp_path / "codec.safetensors",
    )
    rows = {}
    for name in ("amber", "cedar"):
        codes = random.integers(0, ENTRIES, (20, BOOKS)).astype(np.int32)
        rows[name] = np.concatenate([codes[:, :1] + FIRST, codes], axis=1)
    save_file(rows, tmp_path / "voices.safetensors")
    facts = {
        name: {"description": f"{name}'s voice", "f0_hz": f0_hz, "spectrum_db": [tilt] + [0.0] * 39}
        for name, f0_hz, tilt in (("amber", 200.0, 7.0), ("cedar", 110.0, 7.0))
    }
    (tmp_path / "voices.json").write_text(json.dumps(facts))
    symbols = ' .,!?;:—…"()“”ˈˌ' + "abdefhijklmnoprstuvwxyzAIOQSTWYæðŋɐɑɔəɛɜɡɪɹɾʃʊʌʒʔʤʧθᵊᵻ"
    ids = {symbol: 16 + place for place, symbol in enumerate(symbols)}
    (tmp_path / "phonemes.json").write_text(json.dumps(ids))
    return tmp_path
