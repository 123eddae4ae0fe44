"""Two phoneme alphabets in one, and what the recogniser makes of clean speech."""

# ruff: noqa: RUF001
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplet_canary.phonemes import edit_distance, fold_heard, fold_reference
from duplet_canary.recognisers import (
    PhonemeRecogniser,
    RecogniserName,
    describe_recogniser,
    make_recogniser,
    words_of,
)
from duplet_canary.utterances import (
    MOST_CHARACTERS,
    PER_LENGTH,
    Length,
    made_utterances,
    read_utterances,
)
from duplet_core.errors import InvalidInput

SYMBOLS = st.lists(st.sampled_from("abcd"), max_size=12)


@pytest.mark.parametrize(
    ("of_text", "heard"),
    [
        ("ðə ʤˈʌʤ mˈɛʒəɹd.", "ð i d͡ʒ ʌ d͡ʒ m ɛ ʒ ɝ d"),
        ("ðə tɹˈAn lˈivz tˈu.", "ð i t ɹ eɪ n l i v z t oʊ"),
        ("wˌI wʊd ju bˈYl", "w aɪ w ʊ d j u b ɔɪ l"),
        ("bˈɛTəɹ, nˈW!", "b ɛ t ɚ n aʊ"),
        ("ɐn ˈOpᵊn ɡˈAt", "æ n oʊ p ə n g eɪ t"),
        ("kˈWntᵻd", "k aʊ n t ɪ d"),
    ],
)
def test_both_alphabets_fold_into_one(of_text: str, heard: str) -> None:
    assert fold_reference(of_text) == fold_heard(heard.split())


def test_what_differs_stays_different() -> None:
    assert fold_heard(["p", "ɪ", "n"]) != fold_heard(["b", "ɪ", "n"])
    assert fold_heard(["b", "i", "t"]) != fold_heard(["b", "ɪ", "t"])
    assert fold_reference("kˈæt") != fold_reference("kˈʌt")


@given(SYMBOLS, SYMBOLS)
def test_edit_distance_is_the_plain_definition(a: list[str], b: list[str]) -> None:
    assert edit_distance(a, b) == _by_definition(tuple(a), tuple(b))


def _by_definition(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    known: dict[tuple[int, int], int] = {}

    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        if (i, j) not in known:
            known[i, j] = min(
                distance(i - 1, j) + 1,
                distance(i, j - 1) + 1,
                distance(i - 1, j - 1) + (a[i - 1] != b[j - 1]),
            )
        return known[i, j]

    return distance(len(a), len(b))


def test_the_teachers_own_speech_is_recognised() -> None:
    """The scale's zero: what is wrong here is the recogniser's and the alphabets' fault."""
    from hibari import Hibari

    teacher, recogniser = Hibari(), PhonemeRecogniser()
    wrong = length = 0
    for utterance in made_utterances((Length.MEDIUM, Length.LONG))[:14]:
        reference = recogniser.reference(utterance.text)
        samples = np.asarray(teacher(utterance.text, seed=utterance.number), np.float32)
        wrong += edit_distance(recogniser.hear(samples, teacher.sample_rate), reference)
        length += len(reference)
    assert length > 400
    assert wrong / length < 0.06


def test_silence_is_heard_as_nothing() -> None:
    recogniser = PhonemeRecogniser()
    heard = recogniser.hear(np.zeros(16_000, np.float32), 22_050)
    assert len(heard) < 3


def test_a_recogniser_that_is_not_installed_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hama", None)
    with pytest.raises(InvalidInput, match=r"pip install 'duplet-canary\[phonemes\]'"):
        make_recogniser(RecogniserName.PHONEMES)
    monkeypatch.setitem(sys.modules, "faster_whisper", None)
    with pytest.raises(InvalidInput, match=r"pip install 'duplet-canary\[whisper\]'"):
        make_recogniser(RecogniserName.WHISPER)


def test_the_recogniser_is_named_with_its_version() -> None:
    assert describe_recogniser(RecogniserName.PHONEMES).startswith("hama 1.")
    assert describe_recogniser(RecogniserName.NONE) == "none"


def test_words_have_no_case_and_no_punctuation() -> None:
    assert words_of(" It’s late, Mr. BAKER! ") == ("it's", "late", "mr", "baker")


def test_every_utterance_is_another_and_fits_one_request() -> None:
    made = made_utterances(tuple(Length))
    assert len({utterance.text for utterance in made}) == len(made) == 3 * PER_LENGTH
    assert [utterance.number for utterance in made] == list(range(len(made)))
    assert max(len(utterance.text) for utterance in made) <= MOST_CHARACTERS
    for length, words in (
        (Length.SHORT, (3, 6)),
        (Length.MEDIUM, (6, 14)),
        (Length.LONG, (11, 20)),
    ):
        counts = [len(u.text.split()) for u in made if u.length is length]
        assert words[0] <= min(counts) and max(counts) <= words[1]
        assert len(counts) == PER_LENGTH


def test_neighbours_differ_in_all_their_parts() -> None:
    made = made_utterances((Length.MEDIUM,))
    ends = {utterance.text.split()[-1] for utterance in made[:20]}
    begins = {utterance.text.split()[1] for utterance in made[:20]}
    assert len(ends) > 5 and len(begins) > 5


def test_own_utterances_are_read(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    path.write_text("One two three.\n\n  A sentence of eight words is about medium.  \n")
    first, second = read_utterances(path)
    assert (first.number, first.text, first.length) == (0, "One two three.", Length.SHORT)
    assert (second.number, second.length) == (1, Length.MEDIUM)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"\n \n", "no line"), (b"a" * 121, "121 characters"), (b"\xff\xfe", "texts: ")],
)
def test_bad_files_of_utterances_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "texts"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=told):
        read_utterances(path)
