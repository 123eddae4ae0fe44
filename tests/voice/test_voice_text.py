"""Text to phonemes: what is read out, what is left out and named, what is refused."""

# ruff: noqa: RUF001 (phonemes look like letters)
from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_core.errors import InvalidInput, Reason
from duplet_voice.phonemes import MOST_CHARACTERS, PUNCTUATION, Speller, read_text
from duplet_voice.pieces import MOST_PHONEMES, split_pieces

SPELLER = Speller()


def phonemes(text: str) -> str:
    return " ".join(SPELLER.sentences(read_text(text)))


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("There are 12 of them.", "There are twelve of them."),
        ("It costs $3.50.", "It costs three dollars and fifty cents."),
        ("Dr. Smith is here.", "Doctor Smith is here."),
        ("She ran 5 km.", "She ran five kilometers."),
        ("They met at 7:05.", "They met at seven oh five."),
        ("Cats & dogs.", "Cats and dogs."),
        ("１２ ｃａｔｓ.", "twelve cats."),
        ("𝐡𝐞𝐥𝐥𝐨", "hello."),
        ("I saw ③ cats", "I saw three cats."),
        ("wrapped\nlines", "wrapped lines."),
        ("a\u200bb", "a b."),
        ("ﬁne", "fine."),
    ],
)
def test_it_is_read_as_a_reader_would(written: str, spoken: str) -> None:
    assert phonemes(written) == phonemes(spoken)


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("See No. 5 on the list.", "See number five on the list."),
        ("No. 7 is out.", "Number seven is out."),
        ("no.5", "number five"),
        ("Nos. 3 and 4", "Numbers three and four"),
        ("It is in Vol. 2, ch. 7, p. 12.", "It is in volume two, chapter seven, page twelve."),
        ("See pp. 12 and 15.", "See pages twelve and fifteen."),
        ("Fig. 3 and Sec. 4 show it.", "Figure three and section four show it."),
        ("Op. 27 No. 2", "Opus twenty seven number two"),
        ("Read vol. III.", "Read volume three."),
        ("Jan. 5 and Sept. 3", "January fifth and September third"),
        ("approx. 5 km", "approximately five kilometers"),
        ("Apt. 4, Rm. 12", "Apartment four, room twelve"),
        ("Rome vs. Carthage", "Rome versus Carthage"),
        ("Big towns, e.g. London.", "Big towns, for example London."),
        (
            "Dr. Smith and Prof. Lee met Capt. Low.",
            "Doctor Smith and Professor Lee met Captain Low.",
        ),
        ("St. Paul lives in Main St. now.", "Saint Paul lives in Main Street now."),
        ("Mr. Hill is here.", "Mister Hill is here."),
    ],
)
def test_an_abbreviation_ends_no_sentence(written: str, spoken: str) -> None:
    assert len(list(SPELLER.sentences(read_text(written)))) == 1
    assert phonemes(written) == phonemes(spoken)


@pytest.mark.parametrize(
    "text",
    [
        "No. I will not.",
        "He said no. She left.",
        "Ten apples. Five pears.",
        "He studied art. 5 years later he came.",
        "She works for Acme Inc. He does not.",
        "This is the end. 5 people left.",
        "Chapter XII. Nothing happens.",
    ],
)
def test_a_word_before_a_period_ends_its_sentence(text: str) -> None:
    assert len(list(SPELLER.sentences(read_text(text)))) == 2


def sounds(text: str) -> str:
    """Without stress, which 'point' has as a word and not within a number."""
    return phonemes(text).replace("ˈ", "")


SCALES = ("thousand", "million", "billion", "trillion", "quadrillion")


@pytest.mark.parametrize("scale", range(len(SCALES)))
@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("{}", "{}"),
        ("-{}", "minus {}"),
        ("−{}", "minus {}"),
        ("{}.5", "{} point five"),
        ("${}", "{} dollars"),
        ("${}.25", "{} dollars and twenty five cents"),
        ("-${}", "minus {} dollars"),
        ("$-{}", "minus {} dollars"),
        ("−€{}", "minus {} euros"),
        ("£{}", "{} pounds"),
        ("¥{}", "{} yen"),
    ],
)
def test_amounts_of_every_scale_are_numbers(written: str, spoken: str, scale: int) -> None:
    for first, word in (("1", "one"), ("27", "twenty seven"), ("900", "nine hundred")):
        number, words = first + ",000" * (scale + 1), f"{word} {SCALES[scale]}"
        assert sounds(f"It is {written.format(number)}.") == sounds(
            f"It is {spoken.format(words)}."
        )


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("1000000000000", "one trillion"),
        (
            "$1,234,567,890,123",
            "one trillion two hundred thirty four billion five hundred sixty seven million "
            "eight hundred ninety thousand one hundred twenty three dollars",
        ),
        ("$-5 and -$5", "minus five dollars and minus five dollars"),
        ("3.14159265358979323846", "three point " + " ".join("14159265358979323846")),
        ("Card 1234567890123456, please", f"Card {' '.join('1234567890123456')}, please"),
        ("1,2,3", "one, two, three"),
        ("5-3", "five to three"),
        ("It is 5 − 3", "It is five minus three"),
        ("5−3", "five minus three"),
        ("5 −3", "five minus three"),
        ("10\u202f−\u202f0.5", "ten minus zero point five"),
        ("2% − 1%", "two percent minus one percent"),
        ("€5 − €3", "five euros minus three euros"),
        ("n − 1", "n minus one"),
        ("10 − −3 and 10 − (−3)", "ten minus minus three and ten minus (minus three)"),
        ("½ − ¼", "one half minus one quarter"),
        ("It was −3, −.5", "It was minus three, minus zero point five"),
        (".5 and (.25)", "zero point five and (zero point two five)"),
        ("$.50", "fifty cents"),
        ("x = -3 and x = −3", "x equals minus three and x equals minus three"),
        ("9" * 50, " ".join("9" * 50)),
    ],
)
def test_other_numbers_keep_their_own_reading(written: str, spoken: str) -> None:
    assert sounds(written) == sounds(spoken)
    assert read_text(written).unspoken == ()


@pytest.mark.parametrize("text", ["red − green", "one −\n\n3 left"])
def test_a_minus_sign_without_a_number_is_told(text: str) -> None:
    assert read_text(text).unspoken == ("−",)


def test_an_unknown_word_is_spelled_by_its_letters() -> None:
    assert set(phonemes("Brillgard.")) & set("bɹɪlɡɑd")


def test_every_sentence_ends_with_punctuation() -> None:
    assert list(SPELLER.sentences(read_text("Chapter one\n\nIt rained. Why?"))) == [
        phonemes("Chapter one."),
        phonemes("It rained."),
        phonemes("Why?"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "\n\n",
        "...",
        "?!",
        "—",
        "'",
        "😀",
        "👨‍👩‍👧",
        "Привет",
        "你好",
        "مرحبا",
        "\0\1",
        "\ud800",
        "٣",
    ],
)
def test_what_has_no_word_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"text: .* has no word to speak") as caught:
        read_text(text)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert len(caught.value.detail) < 300


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hello 😀", "GRINNING FACE"),
        ("hello мир", "CYRILLIC SMALL LETTER EM"),
        ("hel\x07lo", "U+0007"),
        ("hello\ud800", "U+D800"),
    ],
)
def test_what_is_left_out_is_named(text: str, named: str) -> None:
    reading = read_text(text)
    assert named in reading.notice
    assert phonemes(text)


def test_many_that_are_left_out_are_counted() -> None:
    notice = read_text("hello абвгдежз").notice
    assert notice.endswith("and 4 more")


def test_plain_text_needs_no_notice() -> None:
    assert read_text("Naïve café: “yes” — 20 °C, ½ of it…\n\nZero-width\u200b joiner.").notice == ""


def test_the_limit_is_named() -> None:
    read_text("a" * MOST_CHARACTERS)
    for length in (MOST_CHARACTERS + 1, 1 << 20):
        with pytest.raises(InvalidInput, match=f"{length} characters are more than"):
            read_text("a" * length)


def test_markup_of_phonemes_is_text() -> None:
    assert "ʒʒʒ" not in phonemes("say [x](/ʒʒʒ/) now")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_spoken_or_refused(text: str) -> None:
    try:
        reading = read_text(text)
    except InvalidInput:
        return
    for piece in split_pieces(SPELLER.sentences(reading)):
        assert 0 < len(piece) <= MOST_PHONEMES
        assert not set(piece) <= PUNCTUATION


NUMBERS = st.from_regex(r"\A[-+$£€#]?[0-9][0-9.,:/'-]{0,12}(st|th|km|%|°C|pm| |s|k|M)?\Z")


@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=4), st.sampled_from(["", " ", ", ", "-"]))
def test_any_number_is_spoken(numbers: list[str], between: str) -> None:
    assert phonemes(between.join(numbers))


@pytest.mark.parametrize("text", ["9" * 500, "1," * 200, "x" * 500, "(" * 300 + "a", "Mr. " * 200])
def test_endless_words_are_spoken_in_pieces(text: str) -> None:
    pieces = list(split_pieces(SPELLER.sentences(read_text(text))))
    assert pieces
    assert max(map(len, pieces)) <= MOST_PHONEMES


def test_a_long_sentence_stays_one_for_who_cuts_it() -> None:
    """It is read in parts, which is no reason to end it there."""
    parts = list(SPELLER.sentences(read_text("the old man and the sea " * 30)))
    assert len(parts) > 1
    assert [part[-1] in PUNCTUATION for part in parts] == [False] * (len(parts) - 1) + [True]


def test_nothing_heavy_is_loaded_before_the_first_text() -> None:
    program = (
        "import sys, duplet_voice.front_end, duplet_voice.speech\n"
        "print([name for name in ('hibari', 'onnxruntime', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("It costs $1.5bn.", "It costs $1.5 billion."),
        ("Pages 1,2,3 and 14,15.", "Pages 1, 2, 3 and 14, 15."),
        ("1,234,567.89 and 12,000", "1,234,567.89 and 12,000"),
    ],
)
def test_numbers_keep_what_they_mean(text: str, read: str) -> None:
    assert read_text(text).text == read
