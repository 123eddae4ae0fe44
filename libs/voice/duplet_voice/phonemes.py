"""Text to phonemes: what can be spoken of a text, sentence by sentence."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from duplet_core.errors import InvalidInput, Reason
from duplet_voice.abbreviations import write_out

if TYPE_CHECKING:
    # Loads onnxruntime: half a second, paid when the first text is spoken.
    from hibari.g2p import G2P

MOST_CHARACTERS: Final = 100_000
"""Of one text; about two hours of speech."""

ENDS: Final = ".!?…"
CLAUSE_ENDS: Final = ",;:—"
PUNCTUATION: Final = frozenset(ENDS + CLAUSE_ENDS + '"“”() ˈˌ')
"""Phoneme symbols that are not heard by themselves; stress marks too."""

_SPOKEN_SYMBOLS: Final = frozenset("+=<>~|^`$€£¥₹₩¢°±×÷¬©®™½¼¾²³§µπ→_")  # noqa: RUF001
"""Beside letters, digits and punctuation: symbols that have words, or are in common use and
lose nothing by being passed over."""
_UNHEARD: Final = frozenset({"Mn", "Cf", "Sk", "Zs", "Zl", "Zp"})
"""Marks, joiners and spaces: they belong to what stands beside them and are not named."""
_LONGEST_WORD: Final = 40
_LONGEST_SENTENCE: Final = 300
"""Characters that are read at once; reading takes long where they are no language."""
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD}}}(?=\S)")
_CURRENCIES: Final = "$£€¥₹₩"
_LONG_NUMBER = re.compile(
    rf"(?<![\d.,{_CURRENCIES}])\d{{16,}}(?!\d|,\d)|(?<![\d.,])\d(?:,?\d){{24,}}"
)
"""Read digit by digit: beyond trillions, where no commas or currency say that it is an amount,
and beyond sextillions everywhere."""
_NEGATIVE = re.compile(rf"(?<![-\w.,)])(?:[-−]([{_CURRENCIES}]?)|([{_CURRENCIES}])[-−])(?=\.?\d)")  # noqa: RUF001
"""A sign, not a hyphen or a range: on either side of a currency."""
_MINUS = re.compile(
    rf"[^\S\n]*−[^\S\n]*(?=[(\[]?(?:minus )?[{_CURRENCIES}]?\.?[\d½¼¾])"  # noqa: RUF001
)
"""A minus sign (not a hyphen) and a number: no range, whatever stands before it."""
_BARE_POINT = re.compile(rf"(?<![\w.,{_CURRENCIES}])\.(?=\d)")
"""Of '.5', which would be read as 5."""
_LISTED = re.compile(r"(?<=\d),(?=\d)(?!\d{3}(?!\d))")
"""A comma between numbers that does not stand before three digits: '1,2,3' is not 123."""
_BILLIONS = re.compile(r"(?<=\d)(bn|tn)\b")
_LONG_RUN = re.compile(rf".{{1,{_LONGEST_SENTENCE}}}(?:\s+|$)", re.DOTALL)
_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n\s*")


@dataclass(frozen=True, slots=True)
class Reading:
    """A text without what has no sound."""

    text: str
    """Paragraphs apart by one empty line."""
    unspoken: tuple[str, ...]
    """Characters that were left out, each once, in order: emoji, other scripts, controls."""

    @property
    def notice(self) -> str:
        """What whoever listens must know; empty when all is spoken."""
        if not self.unspoken:
            return ""
        named = ", ".join(map(name_character, self.unspoken[:4]))
        more = f" and {len(self.unspoken) - 4} more" if len(self.unspoken) > 4 else ""
        return f"not spoken: {named}{more}"


def read_text(text: str) -> Reading:
    """Leave out what cannot be spoken.

    Raises:
        InvalidInput: INVALID_REQUEST; the text is too long, or nothing in it can be spoken.
    """
    if len(text) > MOST_CHARACTERS:
        raise InvalidInput(
            Reason.INVALID_REQUEST,
            f"text: {len(text)} characters are more than {MOST_CHARACTERS}; send it in parts",
        )
    unspoken: dict[str, None] = {}
    kept = []
    signed = _NEGATIVE.sub(_say_sign, unicodedata.normalize("NFC", text))
    signed = _MINUS.sub(" minus ", signed)  # behind it, a sign is a word by now
    for character in signed:
        if is_spoken(character):
            kept.append(plain_form(character))
        else:
            # A space, so that the words beside it stay two.
            kept.append("\n" if character == "\n" else " ")
            if unicodedata.category(character) not in _UNHEARD and not character.isspace():
                unspoken[character] = None
    # Brackets with slashes are g2p's own way to write phonemes; a text means neither.
    clean = "".join(kept).replace("](", "] (")
    clean = write_out(clean)
    clean = _LONG_NUMBER.sub(lambda number: " ".join(number[0]), clean)
    clean = _BARE_POINT.sub("0.", clean)
    clean = _LISTED.sub(", ", clean)
    clean = _BILLIONS.sub(lambda unit: " billion" if unit[0] == "bn" else " trillion", clean)
    reading = Reading(_LONG_WORD.sub(r"\g<0> ", clean).strip(), tuple(unspoken))
    if not any(character.isalnum() for character in reading.text):
        shown = repr(text if len(text) <= 40 else text[:37] + "...")
        why = f" ({reading.notice})" if reading.unspoken else ""
        raise InvalidInput(Reason.INVALID_REQUEST, f"text: {shown} has no word to speak{why}")
    return reading


def _say_sign(sign: re.Match[str]) -> str:
    return f"minus {sign[1] or sign[2] or ''}"


def is_spoken(character: str) -> bool:
    """Whether a character of a text may have a sound, or is punctuation that shapes it."""
    if character.isascii():
        return character.isprintable()
    if character in _SPOKEN_SYMBOLS:
        return True
    category = unicodedata.category(character)
    if category[0] == "P":
        return True
    if category[0] not in "LN":
        return False
    # Letters with marks and wide or styled forms count as what they are made of.
    base = unicodedata.normalize("NFKD", character)[0]
    return base.isascii() or unicodedata.name(base, "").startswith("LATIN ")


def plain_form(character: str) -> str:
    """A spoken character as plain text has it: wide, styled and circled ones undone."""
    if character.isascii() or character in _SPOKEN_SYMBOLS:
        return character
    plain = unicodedata.normalize("NFKC", character).replace("\N{FRACTION SLASH}", "/")
    # 'No' and 'Nl' are whole numbers or fractions in one character.
    return f" {plain} " if unicodedata.category(character) in ("No", "Nl") else plain


def name_character(character: str) -> str:
    """A character as a message names it."""
    name = unicodedata.name(character, "")
    code = f"U+{ord(character):04X}"
    return f"{character} ({name})" if name else code


class Speller:
    """Turns text into phonemes, one symbol a character. Loads its tables at the first use."""

    def __init__(self) -> None:
        self._g2p: G2P | None = None

    def sentences(self, reading: Reading) -> Iterator[str]:
        """Phonemes of each sentence, as it is asked for; sentences without a sound are left out.

        Every one ends with punctuation, but for parts of endless sentences.
        """
        from hibari.tts import Hibari

        for paragraph in _PARAGRAPHS.split(reading.text):
            # Lines of a paragraph are wrapped text, not sentences.
            line = " ".join(paragraph.split())
            for sentence in Hibari.split_sentences(line):
                runs = _LONG_RUN.findall(sentence)
                for number, run in enumerate(runs, 1):
                    phonemes = self.phonemes(run)
                    if all(symbol in PUNCTUATION for symbol in phonemes):
                        continue
                    ends = number < len(runs) or phonemes[-1] in PUNCTUATION
                    yield phonemes if ends else phonemes + "."

    def phonemes(self, text: str) -> str:
        """Phonemes of one sentence; numbers, abbreviations and unknown words are read out."""
        if self._g2p is None:
            from hibari.g2p import G2P

            self._g2p = G2P()
        return str(self._g2p(text))
