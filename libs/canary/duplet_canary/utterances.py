"""What the canary says: plain English sentences of three lengths, made from a number.

No digits and no names, so that every voice and every recogniser agrees on what was to be said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import gcd, prod
from pathlib import Path

from duplet_core.errors import InvalidInput, Reason

PER_LENGTH = 500
"""Utterances of each length."""
MOST_CHARACTERS = 120
"""Longest utterance: each is one request, whose text the model was trained to say at once."""

_WHO = (
    *("The baker", "My sister", "An old sailor", "The young teacher", "Our cousin"),
    *("A tall stranger", "The quiet child", "Her doctor", "The farmer", "Nobody else", "His uncle"),
)
_WAITED = (
    *("waited", "arrived", "listened", "smiled", "whispered", "returned", "sang", "slept"),
    *("laughed", "disappeared", "answered", "hesitated", "stayed"),
)
_HOW = (
    *("outside", "again", "at noon", "in silence", "too late", "before us", "alone"),
    *("until dark", "for hours", "with joy", "at once"),
)
_COUNTED = (
    *("counted", "carried", "painted", "found", "opened", "remembered", "borrowed", "repaired"),
    *("followed", "measured", "forgot", "washed", "described"),
)
_WHAT = (
    *("seven letters", "a wooden chair", "the blue window", "three silver coins"),
    *("an empty bottle", "the heavy suitcase", "a yellow umbrella", "the garden gate"),
    *("a pair of gloves", "every single page", "the broken clock", "some fresh bread"),
    *("a map of the city", "the last candle", "two small boats", "the kitchen table"),
    "an honest question",
)
_WHERE = (
    *("behind the station", "near the river", "under the bridge", "before breakfast"),
    *("on Thursday morning", "without a word", "in the garden", "for the third time"),
    *("across the valley", "beside the church", "after the storm"),
)
_WHILE = ("While", "Because", "After", "Although", "Before", "Whenever", "Just as")


class Length(StrEnum):
    """About 4, 9 and 17 words."""

    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


_PARTS: dict[Length, tuple[Sequence[str], ...]] = {
    Length.SHORT: (_WHO, _WAITED, _HOW),
    Length.MEDIUM: (_WHO, _COUNTED, _WHAT, _WHERE),
    Length.LONG: (_WHILE, _WHO, _COUNTED, _WHAT, _WHO, _WAITED, _WHERE),
}


@dataclass(frozen=True, slots=True)
class Utterance:
    """Something to say; its number is the cluster of its pairs."""

    number: int
    text: str
    length: Length


def made_utterances(lengths: Sequence[Length]) -> tuple[Utterance, ...]:
    """`PER_LENGTH` of each length, by turns."""
    made = (_text(length, n) for n in range(PER_LENGTH) for length in lengths)
    return tuple(
        Utterance(number, text, lengths[number % len(lengths)]) for number, text in enumerate(made)
    )


def read_utterances(path: Path) -> tuple[Utterance, ...]:
    """One utterance a line; empty lines are left out.

    Raises:
        InvalidInput: INVALID_REQUEST; the file cannot be read, has none, or a line is too long.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(Reason.INVALID_REQUEST, f"texts: {path}: {error}") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise InvalidInput(Reason.INVALID_REQUEST, f"texts: {path} has no line with a text")
    for text in texts:
        if len(text) > MOST_CHARACTERS:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"texts: {path}: {text[:40]!r}… has {len(text)} characters; an utterance of the "
                f"canary has at most {MOST_CHARACTERS}",
            )
    return tuple(Utterance(n, text, _length_of(text)) for n, text in enumerate(texts))


def digest_of(utterances: Sequence[Utterance]) -> str:
    """Names a set of utterances: 16 hexadecimal digits."""
    said = "\n".join(utterance.text for utterance in utterances)
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def _length_of(text: str) -> Length:
    words = len(text.split())
    if words <= 6:
        return Length.SHORT
    return Length.MEDIUM if words <= 12 else Length.LONG


def _text(length: Length, number: int) -> str:
    parts = _PARTS[length]
    total = prod(len(part) for part in parts)
    words = list(_choose(parts, number * _stride(total) % total))
    if length is Length.LONG:
        words[1], words[4] = words[1][0].lower() + words[1][1:], words[4][0].lower() + words[4][1:]
        words[3] += ","
    return " ".join(words) + "."


def _stride(total: int) -> int:
    """Prime to `total` and near its golden section: neighbours differ in all their parts, and no
    sentence comes twice."""
    stride = int(total * 0.618)
    while gcd(total, stride) != 1:
        stride += 1
    return stride


def _choose(parts: Sequence[Sequence[str]], number: int) -> Iterator[str]:
    """The digits of `number` in the mixed radix of the parts' sizes, as words."""
    for part in parts:
        number, digit = divmod(number, len(part))
        yield part[digit]
