"""Abbreviations whose period ends no sentence: written out before a text is cut at its periods."""

from __future__ import annotations

import re
from typing import Final

_BEFORE_NUMBERS: Final = {
    "no": "number",
    "nos": "numbers",
    "nr": "number",
    "vol": "volume",
    "vols": "volumes",
    "ch": "chapter",
    "chap": "chapter",
    "sec": "section",
    "p": "page",
    "pp": "pages",
    "pt": "part",
    "para": "paragraph",
    "fig": "figure",
    "figs": "figures",
    "eq": "equation",
    "op": "opus",
    "ver": "version",
    "ref": "reference",
    "ext": "extension",
    "tel": "telephone",
    "apt": "apartment",
    "rm": "room",
    "bldg": "building",
    "approx": "approximately",
    "est": "established",
    "ca": "circa",
    "Art": "article",
    "Ex": "example",
    "Jan": "January",
    "Feb": "February",
    "Mar": "March",
    "Apr": "April",
    "Jun": "June",
    "Jul": "July",
    "Aug": "August",
    "Sep": "September",
    "Sept": "September",
    "Oct": "October",
    "Nov": "November",
    "Dec": "December",
}
"""Only where a number follows; in lower case and capitalised, but for those that are words or
names: 'art. 5', 'mar. 5'."""
_ALWAYS: Final = {
    "vs": "versus",
    "cf": "compare",
    "viz": "namely",
    "e.g": "for example",
    "i.e": "that is",
    "Messrs": "Messieurs",
    "Mme": "Madame",
    "Mlle": "Mademoiselle",
}
"""What follows these belongs to them, whatever it is."""


def _alternatives(words: dict[str, str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_COUNTED = _BEFORE_NUMBERS | {
    short.capitalize(): long.capitalize()
    for short, long in _BEFORE_NUMBERS.items()
    if short.islower()
}
_COUNTED_PATTERN = re.compile(
    # One Roman digit alone may be the word 'I'.
    rf"(?<![\w.])({_alternatives(_COUNTED)})\.\s*(?=\d|(?<=\s)[IVXLC]{{2,}}\b)"
)
_ALWAYS_PATTERN = re.compile(rf"(?<![\w.])({_alternatives(_ALWAYS)})\.(?=\s+\S)")


def write_out(text: str) -> str:
    """The text with such abbreviations as words: 'No. 5' is 'Number 5'."""
    text = _COUNTED_PATTERN.sub(lambda short: f"{_COUNTED[short[1]]} ", text)
    return _ALWAYS_PATTERN.sub(lambda short: _ALWAYS[short[1]], text)
