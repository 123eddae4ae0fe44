"""Training examples: a voice's rows, phonemes, and the rows that say them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.quantiser import unpack_codes

STOP, VOICE_BEGINS, TEXT_BEGINS, GENERATE, SEMANTIC_FIRST = 1, 2, 3, 4, 256
BOOKS, ENTRIES = 10, 1024
_REFERENCE_ROWS, _EASY_REFERENCE_ROWS = (50, 125), (16, 49)
_REFERENCE_SHARE, _EASY_REFERENCE_SHARE = 0.9, 0.5
_JOIN_SHARE = 0.3
_LONGEST_ROWS, _LONGEST_PHONEMES = 400, 290
_NOISE_ROWS, _MOST_NOISE, _NOISE_CODES = 0.08, 0.5, 0.02
_MUCH_NOISE_SHARE = 0.4
_SHORT_PHONEMES, _SHORT_WEIGHT = 25, 2.0
"""A few words are as many draws as a sentence and a fifth of its rows: they are drawn oftener."""
_POOL = 768
"""Examples that are drawn at once and sorted by length into batches."""

Rows = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Every recording in every voice."""

    phonemes: list[NDArray[np.int16]]
    """Token ids of each recording."""
    codes: list[Rows]
    """Of each voice, [rows, 10], recordings one after the other."""
    firsts: list[NDArray[np.int64]]
    """Of each voice: where each recording's rows begin, and the end of the last."""
    places: NDArray[np.int64]
    """Of each recording, its number in its file."""
    space: int
    """Token id of what stands between joined texts."""

    @staticmethod
    def read(paths: Sequence[Path], symbols: dict[str, int]) -> Corpus:
        """Files of `make_codes`, recordings one after the other; `symbols` as `phonemes.json` has
        them.

        Raises:
            ValueError: a file holds nothing that is said, says other symbols, has other voices
                than the first, or does not fit in itself.
        """
        texts: list[str] = []
        counts: list[NDArray[np.int64]] = []
        voices = []
        for path in paths:
            with np.load(path) as file:
                rows, said = file["rows"], json.loads(str(file["phonemes"]))
                packed = file["packed"]
            _check_codes(path, rows, said, packed, symbols)
            if counts and len(rows) != len(counts[0]):
                raise ValueError(f"{path}: {len(rows)} voices, {paths[0]} has {len(counts[0])}")
            counts.append(rows)
            texts += said
            whole = unpack_codes(packed, int(rows.sum()), BOOKS)
            voices.append(np.split(whole, np.cumsum(rows.sum(axis=1))[:-1]))
        return Corpus(
            phonemes=[np.array([symbols[c] for c in text], np.int16) for text in texts],
            codes=[np.concatenate(parts) for parts in zip(*voices, strict=True)],
            firsts=[
                np.concatenate(([0], np.cumsum(voice))) for voice in np.concatenate(counts, axis=1)
            ],
            places=np.concatenate([np.arange(part.shape[1]) for part in counts]),
            space=symbols[" "],
        )

    def rows_of(self, voice: int, recording: int) -> Rows:
        """Codes [rows, 10]."""
        first, end = self.firsts[voice][recording : recording + 2]
        return self.codes[voice][first:end]


def _check_codes(
    path: Path,
    rows: NDArray[np.int64],
    said: list[str],
    packed: NDArray[np.uint8],
    symbols: dict[str, int],
) -> None:
    """Refuse a file of codes whose parts are not of each other: texts would go to other speech."""
    if len(said) != rows.shape[1]:
        raise ValueError(f"{path}: rows of {rows.shape[1]} recordings and {len(said)} texts")
    if not rows.any(axis=0).all():
        silent = int(np.flatnonzero(~rows.any(axis=0))[0])
        raise ValueError(f"{path}: no voice says recording {silent}")
    if not len(said):
        raise ValueError(f"{path}: no recordings")
    wanted = -(-int(rows.sum()) * BOOKS // 4) * 5
    if len(packed) != wanted:
        raise ValueError(f"{path}: {len(packed)} bytes of codes, its rows make {wanted}")
    if unknown := sorted({*"".join(said)} - symbols.keys()):
        raise ValueError(f"{path}: symbols {unknown} are not in phonemes.json")


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with what follows it."""

    rows: Rows
    """[length, 11], what the model reads; noise included."""
    generate: int
    """Position of the row from which on the next row is to be learnt."""
    codes: Rows
    """[n, 10], the rows to be learnt; stop follows them."""


def id_rows(ids: NDArray[np.int16]) -> Rows:
    """Rows of plain ids, [n, 11]."""
    rows = np.zeros((len(ids), 1 + BOOKS), np.int16)
    rows[:, 0] = ids
    return rows


def code_rows(codes: Rows) -> Rows:
    """Semantic rows, [n, 11]."""
    return np.concatenate((codes[:, :1] + SEMANTIC_FIRST, codes), axis=1)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is drawn at one time of the training."""

    easy: bool = False
    """Single recordings with little before them: by these a model learns to read."""
    noise: float = 1.0
    """How much of the full noise there is in what the model reads of its own past, 0 to 1."""


class Drawer:
    """Draws examples of some recordings. Owns its random numbers."""

    def __init__(
        self, corpus: Corpus, recordings: NDArray[np.int64], seed: int, lesson: Lesson
    ) -> None:
        self._corpus = corpus
        self._recordings = recordings
        self._rng = np.random.default_rng(seed)
        self.lesson = lesson
        lengths = np.array([len(corpus.phonemes[r]) for r in recordings])
        weights = np.where(lengths <= _SHORT_PHONEMES, _SHORT_WEIGHT, 1.0)
        self._ends = np.cumsum(weights / weights.sum())

    def draw(self) -> Example:
        """One example of a random recording and voice, sometimes with others joined to it."""
        rng, corpus = self._rng, self._corpus
        place = int(np.searchsorted(self._ends[:-1], rng.random(), side="right"))
        chosen = [int(self._recordings[place])]
        voices = [v for v in range(len(corpus.codes)) if len(corpus.rows_of(v, chosen[0]))]
        voice = int(rng.choice(voices))
        joins = not self.lesson.easy and rng.random() < _JOIN_SHARE
        wanted = int(rng.integers(2, 5)) if joins else 1
        for _ in range(wanted - 1):
            joined = [*chosen, int(rng.choice(self._recordings))]
            lengths = [len(corpus.rows_of(voice, recording)) for recording in joined]
            symbols = sum(len(corpus.phonemes[recording]) + 1 for recording in joined)
            if lengths[-1] and sum(lengths) <= _LONGEST_ROWS and symbols <= _LONGEST_PHONEMES:
                chosen = joined
        codes = np.concatenate([corpus.rows_of(voice, recording) for recording in chosen])
        space = np.array([corpus.space], np.int16)
        text = np.concatenate([part for r in chosen for part in (corpus.phonemes[r], space)])[:-1]
        noise = self._draw_noise()
        prompt = (
            id_rows(np.array([VOICE_BEGINS], np.int16)),
            code_rows(self._damage(self._reference(voice, chosen), voice, min(noise, 0.1))),
            id_rows(np.concatenate(([TEXT_BEGINS], text, [GENERATE])).astype(np.int16)),
        )
        said = code_rows(self._damage(codes, voice, noise))
        generate = sum(map(len, prompt)) - 1
        return Example(np.concatenate((*prompt, said)), generate, codes)

    def _draw_noise(self) -> float:
        """Share of wrong rows. Mostly a little, as at inference; sometimes so much that nothing
        but the text says what comes next, without which a model learns to babble."""
        share = self.lesson.noise
        much = self._rng.random() < _MUCH_NOISE_SHARE * share
        return float(self._rng.uniform(0.1, _MOST_NOISE)) if much else _NOISE_ROWS * share

    def _reference(self, voice: int, chosen: list[int]) -> Rows:
        """Rows of the voice that are not those of the chosen recordings; sometimes none."""
        rng, corpus = self._rng, self._corpus
        rows = _EASY_REFERENCE_ROWS if self.lesson.easy else _REFERENCE_ROWS
        share = _EASY_REFERENCE_SHARE if self.lesson.easy else _REFERENCE_SHARE
        count = int(rng.integers(*rows)) if rng.random() < share else 0
        firsts = corpus.firsts[voice]
        for _ in range(20):
            first = int(rng.integers(len(corpus.codes[voice]) - count))
            if all(first + count <= firsts[r] or first >= firsts[r + 1] for r in chosen):
                return corpus.codes[voice][first : first + count]
        return corpus.codes[voice][:0]

    def _damage(self, codes: Rows, voice: int, noise: float) -> Rows:
        """What the model reads of its own past at inference is never quite right either."""
        if not noise or not len(codes):
            return codes
        rng = self._rng
        damaged = codes.copy()
        wrong = np.flatnonzero(rng.random(len(codes)) < noise)
        every = self._corpus.codes[voice]
        damaged[wrong] = every[rng.integers(len(every), size=len(wrong))]
        places = rng.random(codes.shape) < _NOISE_CODES * self.lesson.noise
        damaged[places] = rng.integers(0, ENTRIES, int(places.sum()))
        return damaged


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples of like length, padded at their ends."""

    rows: Rows
    """[batch, length, 11]"""
    targets: Rows
    """[batch, length, 10]: the codes of the next row; stop is 1,024 in book 0; -1 where nothing
    is learnt."""


def make_batch(examples: list[Example]) -> Batch:
    """Pad to the longest of them, rounded up to 32."""
    length = -(-max(len(e.rows) for e in examples) // 32) * 32
    rows = np.zeros((len(examples), length, 1 + BOOKS), np.int16)
    targets = np.full((len(examples), length, BOOKS), -1, np.int16)
    for place, example in enumerate(examples):
        rows[place, : len(example.rows)] = example.rows
        end = example.generate + len(example.codes)
        targets[place, example.generate : end] = example.codes
        targets[place, end, 0] = ENTRIES
    return Batch(rows, targets)


def draw_batches(
    drawer: Drawer, batch_rows: int, seed: int, lesson: Callable[[], Lesson] | None = None
) -> Iterator[Batch]:
    """Batches of about `batch_rows` rows each, for ever, by the lesson of the time."""
    rng = np.random.default_rng(seed)
    while True:
        if lesson is not None:
            drawer.lesson = lesson()
        pool = sorted((drawer.draw() for _ in range(_POOL)), key=lambda e: len(e.rows))
        groups: list[list[Example]] = [[]]
        for example in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(example.rows) > batch_rows:
                groups.append([])
            groups[-1].append(example)
        for place in rng.permutation(len(groups)):
            yield make_batch(groups[place])
