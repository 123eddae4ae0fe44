"""What the teacher reads: fortunes, Bible verses, made-up announcements, words and word salads.

Everything is drawn with a seed. Held-out texts are told by a hash of their letters, so that the
same sentence is never both read for training and used for evaluation, whatever its source.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_SPEAKABLE = re.compile(r"[A-Za-z0-9 ,.;:'\"!?$%&-]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"']?\s+(?=[A-Z\"'])")
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_HELD_OUT_EVERY = 40
_SHARES = {"prose": 0.40, "verse": 0.12, "made": 0.16, "salad": 0.08, "short": 0.24}

_PHRASES: dict[str, list[str]] = json.loads(Path(__file__).with_name("phrases.json").read_text())
"""Replies, templates, and what fills them."""


def is_held_out(text: str) -> bool:
    """Whether a text belongs to evaluation only."""
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    return zlib.crc32(letters.encode()) % _HELD_OUT_EVERY == 0


def split_sentences(text: str) -> Iterator[str]:
    """Speakable sentences of a paragraph, from 4 words to 40."""
    for sentence in _SENTENCE_END.split(" ".join(text.split())):
        words = sentence.split()
        plain = _SPEAKABLE.fullmatch(sentence) and sentence[0].isupper()
        if (
            plain
            and 4 <= len(words) <= 40
            and not sentence.isupper()
            and sentence.count('"') % 2 == 0
        ):
            yield sentence


def read_fortunes(directory: Path) -> list[str]:
    """Sentences of the `fortunes` packages' files."""
    found: list[str] = []
    for path in sorted(directory.iterdir()):
        if path.suffix or path.name == "ascii-art":
            continue
        for fortune in path.read_text("utf-8", "ignore").split("\n%\n"):
            found.extend(split_sentences(fortune.split("\n\t\t--")[0]))
    return sorted(set(found))


def read_verses(program: Path, data: Path) -> list[str]:
    """Sentences of the King James Bible, by `bible-kjv`'s own program."""
    command = [str(program), "-p", str(data), "-f", "Gen1:1-Rev22:21"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[str] = []
    for line in listed.splitlines():
        found.extend(split_sentences(line.partition(" ")[2]))
    return sorted(set(found))


def make_sentence(rng: random.Random) -> str:
    """An announcement with names, numbers, times and dates."""
    things = rng.sample(_PHRASES["things"], 3)
    names = rng.sample(_PHRASES["names"], 2)
    return rng.choice(_PHRASES["templates"]).format(
        thing=things[0],
        thing2=things[1],
        thing3=things[2],
        name=names[0],
        name2=names[1],
        place=rng.choice(_PHRASES["places"]),
        month=rng.choice(_PHRASES["months"]),
        o=rng.choice(_PHRASES["ordinals"]),
        n=rng.choice((rng.randint(11, 99), rng.randint(100, 9999))),
        s=rng.randint(2, 20),
        h=rng.randint(1, 12),
        m=rng.randint(1, 59),
        d=rng.randint(1, 28),
        y=rng.randint(1700, 2040),
    )


def make_salad(rng: random.Random, words: list[str]) -> str:
    """Words in no order: phonemes beside one another that prose never puts there."""
    drawn = [rng.choice(words) for _ in range(rng.randint(4, 12))]
    return f"{' '.join(drawn).capitalize()}{rng.choice('.,!?.')}"


def make_short(rng: random.Random, words: list[str]) -> str:
    """One to three words."""
    if rng.random() < 0.35:
        return rng.choice(_PHRASES["replies"])
    drawn = [rng.choice(words) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    return f"{' '.join(drawn).capitalize()}{rng.choice(('.', '.', '.', '', ',', '!', '?'))}"


def is_plain(sentence: str, common: set[str]) -> bool:
    """Whether a sentence has no names, numbers or rare words: what a recogniser was taught too."""
    words = sentence.split()
    inner = [word for word in words[1:] if word[0].isupper() and word.strip(".,'") != "I"]
    return (
        not inner
        and all(word.lower() in common for word in _WORD.findall(sentence))
        and not re.search(r"[0-9$%&]", sentence)
    )


def cut_part(rng: random.Random, sentence: str) -> str:
    """Sometimes only a part of a sentence, as texts are cut when they are long."""
    words = sentence.split()
    if len(words) < 8 or rng.random() > 0.15:
        return sentence
    first = rng.randint(0, len(words) - 5)
    return " ".join(words[first : rng.randint(first + 4, len(words))])


def deal(rng: random.Random, sentences: list[str]) -> Iterator[str]:
    """Sentences in random order, none twice before all have been there."""
    while sentences:
        yield from rng.sample(sentences, len(sentences))


def build_texts(
    count: int,
    seed: int,
    held_out: bool,
    fortunes: list[str],
    verses: list[str],
    dictionary: list[str],
    known: frozenset[str] = frozenset(),
) -> list[dict[str, str]]:
    """Texts in random order, each with its kind; no sentence that is known already."""
    rng = random.Random(seed)
    spoken = Counter(w.lower() for s in fortunes for w in _WORD.findall(s))
    common = [word for word, times in spoken.items() if times >= 3]
    # Rare words teach spelling; held-out ones would test the recogniser's vocabulary.
    words = common if held_out else common * 4 + dictionary
    shares = _SHARES | {"salad": 0.0} if held_out else _SHARES
    if held_out:
        plain = set(common)
        fortunes = [sentence for sentence in fortunes if is_plain(sentence, plain)]

    def cut(rng: random.Random, sentence: str) -> str:
        return sentence if held_out else cut_part(rng, sentence)

    def draw(sentences: list[str]) -> Iterator[str]:
        new = [sentence for sentence in sentences if sentence not in known]
        # What is held out is drawn as it always was, so that figures can be compared.
        return iter(lambda: rng.choice(new), "") if held_out else deal(rng, new)

    prose, verse = draw(fortunes), draw(verses)
    sources = {
        "prose": lambda: cut(rng, next(prose)),
        "verse": lambda: cut(rng, next(verse)),
        "made": lambda: make_sentence(rng),
        "salad": lambda: make_salad(rng, words),
        "short": lambda: make_short(rng, words),
    }
    texts: list[dict[str, str]] = []
    while len(texts) < count:
        kind = rng.choices(list(shares), weights=list(shares.values()))[0]
        text = sources[kind]()
        # The few replies are read for training always: there are no others.
        if is_held_out(text) == held_out or (
            kind == "short" and not held_out and text in _PHRASES["replies"]
        ):
            texts.append({"kind": kind, "text": text})
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--debian", type=Path, required=True, help="where packages were unpacked")
    parser.add_argument("--count", type=int, default=14_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--beside", type=Path, help="texts whose sentences are not drawn again")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    fortunes = read_fortunes(args.debian / "usr/share/games/fortunes")
    verses = read_verses(args.debian / "usr/bin/bible", args.debian / "usr/lib")
    listed = (args.debian / "usr/share/dict/american-english").read_text("utf-8").split()
    dictionary = [word for word in listed if word.isascii() and word.isalpha() and len(word) > 2]
    known = args.beside.read_text().splitlines() if args.beside else []
    texts = build_texts(
        args.count,
        args.seed,
        args.held_out,
        fortunes,
        verses,
        dictionary,
        frozenset(json.loads(line)["text"] for line in known),
    )
    args.out.write_text("".join(json.dumps(text) + "\n" for text in texts))
    print(f"{len(texts)} texts of {len(fortunes)} fortunes' and {len(verses)} verses' sentences")


if __name__ == "__main__":
    main()
