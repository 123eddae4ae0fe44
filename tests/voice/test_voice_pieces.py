"""How long texts are cut: nothing lost, no piece too long, cuts where a reader would breathe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_voice.pieces import (
    MOST_PHONEMES,
    best_cuts,
    joined,
    length_cost,
    split_pieces,
    split_words,
)

WORDS = st.text("abcdefgh", min_size=1, max_size=14)
CLAUSES = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)
SENTENCES = st.builds(
    lambda clauses, end: ", ".join(clauses) + end,
    st.lists(CLAUSES, min_size=1, max_size=6),
    st.sampled_from([".", "!", "?"]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(SENTENCES, max_size=40))
def test_nothing_is_lost_and_nothing_is_too_long(sentences: list[str]) -> None:
    pieces = list(split_pieces(sentences))
    assert " ".join(pieces) == " ".join(sentences)
    assert all(0 < len(piece) <= MOST_PHONEMES for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.lists(SENTENCES, min_size=1, max_size=6))
def test_the_cuts_are_the_cheapest(sentences: list[str]) -> None:
    """Against trying, from the end, every place of the last cut."""
    words = list(chain.from_iterable(split_words(sentence) for sentence in sentences))

    def cost_of(cuts: list[tuple[int, int]]) -> float:
        lengths = sum(length_cost(len(joined(words[first:end]))) for first, end in cuts)
        return lengths + sum(words[end - 1].cut_cost for _, end in cuts[:-1])

    best = [0.0]
    for end in range(1, len(words) + 1):
        best.append(
            min(
                best[first]
                + (words[first - 1].cut_cost if first else 0.0)
                + length_cost(len(joined(words[first:end])))
                for first in range(end)
                if len(joined(words[first:end])) <= MOST_PHONEMES
            )
        )
    assert cost_of(best_cuts(words)) == pytest.approx(best[-1])


def test_a_short_text_is_one_piece() -> None:
    assert list(split_pieces(["jes.", "no.", "hi ðɛɹ."])) == ["jes. no. hi ðɛɹ."]


def test_cuts_fall_between_sentences_first() -> None:
    sentence = "a" * 10 + " " + "b" * 10 + ", " + "c" * 20 + " " + "d" * 20 + "."
    assert list(split_pieces([sentence] * 3)) == [sentence] * 3


def test_a_long_sentence_is_cut_at_a_clause() -> None:
    clause = " ".join(["abcde"] * 11) + ","
    assert list(split_pieces([f"{clause} {clause[:-1]}."])) == [clause, clause[:-1] + "."]


def test_a_sentence_without_clauses_is_cut_in_balance() -> None:
    """Twenty words that need two pieces: no piece is a word or two."""
    words = " ".join(["abcde"] * 20) + "."
    pieces = list(split_pieces([words]))
    assert len(pieces) == 2
    assert min(map(len, pieces)) >= 50


def test_no_word_is_left_alone_at_the_end() -> None:
    """A last word that does not fit takes others with it."""
    words = " ".join(["abcde"] * 18) + " abcdefgh."
    assert len(words) > MOST_PHONEMES
    assert min(len(piece.split()) for piece in split_pieces([words])) >= 5


def test_a_dash_stays_with_the_words_before_it() -> None:
    clause = " ".join(["abcde"] * 12)
    assert list(split_pieces([f"{clause} — {clause}."])) == [f"{clause} —", f"{clause}."]


def test_an_endless_word_is_cut() -> None:
    pieces = list(split_pieces(["a" * 1000]))
    assert "".join(pieces).replace(" ", "") == "a" * 1000
    assert max(map(len, pieces)) <= MOST_PHONEMES


def test_first_pieces_are_known_before_the_text_has_been_read() -> None:
    read = 0

    def sentences() -> Iterator[str]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield "abcde " * 15 + "."

    pieces = split_pieces(sentences())
    next(pieces)
    assert read < 12
