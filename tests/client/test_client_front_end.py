"""Text front ends: good prompts, shared voices, the same on every machine."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_client.front_end import TinyFrontEnd, front_end, rows_from_text
from duplet_core.errors import InvalidInput, Reason
from duplet_pages.prompt import check_prompt
from duplet_pages.spec import ModelSpec

TINY = ModelSpec(
    name="tiny",
    fingerprint="0",
    codebooks=10,
    vocab=1024,
    codebook_sizes=(256, *(64,) * 9),
    semantic_first=512,
    semantic_last=767,
    stop_id=259,
    page_rows=16,
    longest_sequence=4096,
    default_max_rows=256,
    layers=3,
    kv_heads=2,
    head_dim=16,
    dtype="float32",
    kv_hash="xxh3-128",
    rows_per_second=21.5,
)

VOICE_DIGEST = "90ca2d78785acb26ffb7cdd6b22feab2b6977043be8cff240da4d4ebb7bc856b"
"""SHA-256 of the prompt for voice 'anna' and no text: a voice never changes."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(texts.filter(str.strip), texts, st.integers(0, 80))
@settings(deadline=None)
def test_prompts_are_good(text: str, voice: str, voice_rows: int) -> None:
    rows = rows_from_text(TINY, text, voice, voice_rows)
    assert rows.shape == (voice_rows + len(text.encode()) + 3, 11)
    assert check_prompt(rows.astype("<i4").tobytes(), 11, TINY) == len(rows)


def test_voice_comes_first_and_text_after_it() -> None:
    hello, bye = (rows_from_text(TINY, text, "anna") for text in ("hello", "bye"))
    assert (hello[:66] == bye[:66]).all()
    assert hello[0, 0] == 256
    assert hello[65, 0] == 257
    assert bytes(hello[66:-1, 0].tolist()) == b"hello"
    assert hello[-1, 0] == 258
    other = rows_from_text(TINY, "hello", "bert")
    assert (hello[1:65] != other[1:65]).any()
    assert (hello[65:] == other[65:]).all()


def test_a_voice_is_the_same_on_every_machine() -> None:
    rows = TinyFrontEnd(TINY).rows("", "anna")
    assert rows.dtype == np.int32
    assert hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest() == VOICE_DIGEST


def test_it_says_that_it_is_not_speech() -> None:
    made = front_end(TINY)
    assert made is not None
    assert "not speech" in made.notice


def test_a_model_without_front_end_refuses_text() -> None:
    spec = replace(TINY, name="other")
    assert front_end(spec) is None
    with pytest.raises(InvalidInput, match="model other has no text front end") as caught:
        rows_from_text(spec, "hello", "anna")
    assert caught.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize("changed", [{"codebooks": 0, "codebook_sizes": ()}, {"semantic_first": 9}])
def test_a_tiny_without_room_for_text_is_refused(changed: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=r"^model: tiny has"):
        rows_from_text(replace(TINY, **changed), "hello", "anna")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "  ", "\n\t"])
def test_a_text_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^text: '.*' says nothing$"):
        rows_from_text(TINY, text, "anna")


def test_faults_of_the_caller_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"^voice_rows: -1"):
        rows_from_text(TINY, "hello", "anna", -1)
    with pytest.raises(InvalidInput, match=r"^text: .*surrogates"):
        rows_from_text(TINY, "\ud800", "anna")


WREN = replace(TINY, name="wren", vocab=1280, codebook_sizes=(1024,) * 10, semantic_first=256)
WREN = replace(WREN, semantic_last=1279, stop_id=1, longest_sequence=1024, default_max_rows=400)


def test_the_speaking_models_prompts_are_good_and_share_their_voice() -> None:
    hello, bye = (rows_from_text(WREN, text, "amber") for text in ("Hello there.", "Good night."))
    assert check_prompt(hello.astype("<i4").tobytes(), 11, WREN) == len(hello)
    shared = int(np.flatnonzero(hello[:, 0] == 3)[0]) + 1
    assert shared > 16 and (hello[:shared] == bye[:shared]).all()
    made = front_end(WREN)
    assert made is not None and made.notice == ""


def test_a_long_text_is_for_say() -> None:
    with pytest.raises(InvalidInput, match="duplet say"):
        rows_from_text(WREN, "The train leaves in ten minutes from platform two. " * 12, "amber")


def test_without_the_voices_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duplet_voice.front_end", None)
    front_end.cache_clear()
    with pytest.raises(InvalidInput, match="install duplet-voice"):
        rows_from_text(WREN, "hello", "amber")
    assert front_end(TINY) is not None
