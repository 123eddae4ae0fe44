"""Prompts of the built-in model: their layout, their pieces, and what is refused."""

# ruff: noqa: RUF001 (phonemes look like letters)
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duplet_core.errors import InvalidInput, Reason
from duplet_pages.spec import ModelSpec
from duplet_voice.front_end import GENERATE, TEXT_BEGINS, VOICE_BEGINS, VoiceFrontEnd
from tests.voice.voice_parts import FIRST

LONG = "The rain had begun at noon and it fell on the roofs of the whole town until the night. " * 3


def test_a_prompt_is_the_voice_then_the_text(spec: ModelSpec, model: Path) -> None:
    front_end = VoiceFrontEnd(spec, model)
    rows = front_end.rows("Yes.", "amber")
    reference = front_end.voices["amber"].rows
    text = len(rows) - len(reference) - 3
    assert rows.dtype == np.int32 and rows.shape[1] == spec.columns
    assert rows[0].tolist() == [VOICE_BEGINS] + [0] * 10
    assert np.array_equal(rows[1 : 1 + len(reference)], reference)
    assert rows[1 + len(reference), 0] == TEXT_BEGINS
    assert rows[-1].tolist() == [GENERATE] + [0] * 10
    assert text == len("jˈɛs.")
    ids = json.loads((model / "phonemes.json").read_text())
    assert rows[-1 - text : -1, 0].tolist() == [ids[symbol] for symbol in "jˈɛs."]
    assert not rows[-1 - text :, 1:].any()


def test_texts_of_a_voice_share_everything_before_the_text(spec: ModelSpec, model: Path) -> None:
    front_end = VoiceFrontEnd(spec, model)
    shared = len(front_end.voices["cedar"].rows) + 2
    first, second = (front_end.rows(text, "cedar") for text in ("Good morning.", "Twelve cats."))
    assert np.array_equal(first[:shared], second[:shared])
    other = front_end.rows("Good morning.", "amber")
    assert not np.array_equal(first[:shared], other[:shared])


def test_a_long_text_is_several_pieces_with_the_same_voice(spec: ModelSpec, model: Path) -> None:
    front_end = VoiceFrontEnd(spec, model)
    pieces = list(front_end.pieces(LONG, "amber"))
    shared = len(front_end.voices["amber"].rows) + 2
    assert len(pieces) >= 3
    for piece in pieces:
        assert np.array_equal(piece.prompt[:shared], pieces[0].prompt[:shared])
        assert len(piece.phonemes) < piece.max_rows <= spec.default_max_rows
    with pytest.raises(InvalidInput, match="duplet say"):
        front_end.rows(LONG, "amber")


def test_the_model_bounds_the_rows_of_a_piece(spec: ModelSpec, model: Path) -> None:
    front_end = VoiceFrontEnd(replace(spec, default_max_rows=50), model)
    assert front_end.max_rows("a" * 110) == 50


def test_an_unknown_voice_is_named_with_those_that_exist(spec: ModelSpec, model: Path) -> None:
    with pytest.raises(InvalidInput, match="'ada' is none of amber, cedar") as caught:
        VoiceFrontEnd(spec, model).pieces("Yes.", "ada")
    assert caught.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize("text", ["", "?!", "😀", "Привет", "a" * (1 << 20)])
def test_a_bad_text_is_refused_at_once(spec: ModelSpec, model: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match="text: "):
        VoiceFrontEnd(spec, model).pieces(text, "amber")


def test_files_of_another_model_are_refused(spec: ModelSpec, model: Path) -> None:
    with pytest.raises(InvalidInput, match="integers"):
        VoiceFrontEnd(replace(spec, codebooks=3), model)
    (model / "phonemes.json").write_text(json.dumps({"a": FIRST}))
    with pytest.raises(InvalidInput, match="phoneme 'a' has id 256"):
        VoiceFrontEnd(spec, model)


@pytest.mark.parametrize("name", ["phonemes.json", "voices.json", "voices.safetensors"])
def test_a_missing_or_broken_file_is_named(spec: ModelSpec, model: Path, name: str) -> None:
    (model / name).write_text("[]")
    with pytest.raises(InvalidInput, match=str(model)):
        VoiceFrontEnd(spec, model)
    (model / name).unlink()
    with pytest.raises(InvalidInput, match=str(model)):
        VoiceFrontEnd(spec, model)
