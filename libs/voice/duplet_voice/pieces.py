"""Long texts in pieces: each as long as the model speaks well, cut where a reader would breathe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from duplet_voice.phonemes import CLAUSE_ENDS, PUNCTUATION

MOST_PHONEMES: Final = 110
"""Of one piece, spaces and marks included; the model skips phrases of longer ones."""

_SHORT: Final = 60
"""Below it a piece costs: the model speaks a few words less well than a sentence."""
_SHORT_COST: Final = 150.0
_CLAUSE_COST: Final = 30.0
_WORD_COST: Final = 100.0
_INSIDE_COST: Final = 400.0
_WINDOW: Final = 6 * MOST_PHONEMES
"""Phonemes that are known before the first cuts are settled."""
_UNSETTLED: Final = 2
"""Last pieces of a window, which what follows may still change."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word's phonemes with its punctuation, and what a cut after it costs."""

    phonemes: str
    cut_cost: float


def split_pieces(sentences: Iterable[str]) -> Iterator[str]:
    """Phonemes of the pieces, in order, each at most MOST_PHONEMES, as soon as they are settled.

    Joined by spaces they are the sentences' phonemes.
    """
    words: list[Word] = []
    for sentence in sentences:
        words += split_words(sentence)
        if joined_length(words) >= _WINDOW:
            cuts = best_cuts(words)
            for first, end in cuts[:-_UNSETTLED]:
                yield joined(words[first:end])
            words = words[cuts[-_UNSETTLED][0] :]
    for first, end in best_cuts(words):
        yield joined(words[first:end])


def split_words(sentence: str) -> list[Word]:
    """Words of a sentence's phonemes; none is longer than a piece."""
    texts: list[str] = []
    for part in sentence.split():
        if texts and all(symbol in PUNCTUATION for symbol in part):
            # A dash that stands alone ends the words before it.
            texts[-1] += f" {part}"
        else:
            texts.append(part)
    words: list[Word] = []
    for text in texts:
        cost = _cut_cost(text)
        while len(text) > MOST_PHONEMES:
            words.append(Word(text[:_SHORT], _INSIDE_COST))
            text = text[_SHORT:]
        words.append(Word(text, cost))
    if words and words[-1].phonemes[-1] in PUNCTUATION:
        words[-1] = Word(words[-1].phonemes, 0.0)
    return words


def _cut_cost(word: str) -> float:
    """Of a cut after a word within its sentence."""
    end = word.rstrip('"“”() ')[-1:]
    return _CLAUSE_COST if end and end in CLAUSE_ENDS else _WORD_COST


def best_cuts(words: list[Word]) -> list[tuple[int, int]]:
    """The cheapest way to cut: ranges of words, none longer than MOST_PHONEMES."""
    costs = [0.0]
    begins = [0]
    for end in range(1, len(words) + 1):
        length, best, begin = -1, float("inf"), end - 1
        for first in range(end - 1, -1, -1):
            length += 1 + len(words[first].phonemes)
            if length > MOST_PHONEMES:
                break
            cost = costs[first] + length_cost(length)
            if cost < best:
                best, begin = cost, first
        costs.append(best + (words[end - 1].cut_cost if end < len(words) else 0.0))
        begins.append(begin)
    cuts = []
    end = len(words)
    while end:
        cuts.append((begins[end], end))
        end = begins[end]
    return cuts[::-1]


def length_cost(phonemes: int) -> float:
    """What a piece of this length costs."""
    return _SHORT_COST * (max(0, _SHORT - phonemes) / _SHORT) ** 2


def joined(words: list[Word]) -> str:
    """The words' phonemes as one piece."""
    return " ".join(word.phonemes for word in words)


def joined_length(words: list[Word]) -> int:
    """Phonemes of `joined`."""
    return sum(len(word.phonemes) + 1 for word in words) - 1
