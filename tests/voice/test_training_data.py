"""What training/ holds that is pure: quantiser, other speakers, texts, examples."""

# ruff: noqa: RUF001 (phonemes look like letters)
from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import duplet_models
from duplet_core.errors import InvalidInput
from duplet_voice.features import FRAME, LOG_F0, ROW, VOICED
from training.examples import (
    GENERATE,
    TEXT_BEGINS,
    VOICE_BEGINS,
    Corpus,
    Drawer,
    Lesson,
    make_batch,
)
from training.make_codes import choose_voices, write_codes
from training.quantiser import decode, encode, fit_books, pack_codes, unpack_codes
from training.speak import split_phonemes
from training.speakers import SPEAKERS, Speaker, place_rows, take_rows
from training.texts import build_texts, is_held_out, is_plain
from training.train_model import Exercise, find_lesson

MOST_BYTES = 40_000_000


def frames_of(count: int) -> torch.Tensor:
    frames = np.random.default_rng(1).standard_normal((count, FRAME)).astype(np.float32)
    frames[:, VOICED] = frames[:, VOICED] > 0
    return torch.from_numpy(frames)


def test_more_books_leave_less_over() -> None:
    rows = torch.randn(600, 12, generator=torch.Generator().manual_seed(2))
    books = fit_books(rows, books=4, entries=16, rounds=4, seed=1)
    codes = encode(rows, books)
    errors = [
        float((rows - decode(codes[:, :used], books[:used])).square().mean())
        for used in (1, 2, 3, 4)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.75 * errors[0] < 0.75
    # Every code is the nearest entry of its book to what the ones before it left.
    rest = rows - decode(codes[:, :2], books[:2])
    assert torch.equal(codes[:, 2], torch.cdist(rest, books[2]).argmin(dim=1))
    assert len(set(codes[:, 0].tolist())) == 16


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
def test_codes_come_back_from_ten_bits(rows: int) -> None:
    codes = np.random.default_rng(rows).integers(0, 1024, (rows, 10))
    packed = pack_codes(codes)
    assert len(packed) == -(-rows * 10 // 4) * 5
    assert (unpack_codes(packed, rows, 10) == codes).all()


def test_the_teacher_is_itself_and_others_are_not() -> None:
    frames = frames_of(23)
    places = torch.from_numpy(place_rows(23, 1.0, 2))
    same = take_rows(frames, places, Speaker("itself"))
    assert same.shape == (5, ROW)
    torch.testing.assert_close(same.reshape(-1, FRAME), frames[2:22], rtol=1e-4, atol=1e-4)
    other = take_rows(frames, places, Speaker("lower", formants=0.86, f0=0.5)).reshape(-1, FRAME)
    torch.testing.assert_close(other[:, LOG_F0], frames[2:22, LOG_F0] - np.log(2.0))
    assert not torch.allclose(other[:, 1:40], frames[2:22, 1:40], atol=0.1)


def test_another_tempo_stays_inside_the_recording() -> None:
    for tempo in (0.8, 1.0, 1.3):
        places = place_rows(50, tempo, 3)
        assert len(places) % 4 == 0
        assert places.max() <= 49
        assert abs(len(places) - 50 / tempo) <= 7
    assert len(place_rows(0, 1.0, 2)) == 0


def test_long_phonemes_are_cut_where_they_pause() -> None:
    pieces = split_phonemes("ðə kˈæt sˈæt, ænd slˈɛpt. " * 12, longest=60)
    assert all(0 < len(piece) <= 60 for piece in pieces)
    assert all(piece[-1] in ",." for piece in pieces)
    assert " ".join(pieces) == ("ðə kˈæt sˈæt, ænd slˈɛpt. " * 12).strip()


def test_held_out_texts_are_never_trained_on() -> None:
    prose = [f"The {a} cat sat on the {b} mat again." for a in "abcdefgh" for b in "stuvwxyz"]
    trained = build_texts(300, 1, False, prose, prose, ["zebra", "anvil"])
    held = build_texts(40, 2, True, prose, prose, ["zebra", "anvil"])
    assert {t["kind"] for t in trained} == {"prose", "verse", "made", "salad", "short"}
    assert Counter(t["kind"] for t in held)["salad"] == 0
    assert not {t["text"] for t in held if t["kind"] != "short"} & {t["text"] for t in trained}
    assert is_held_out("Yes, indeed!") == is_held_out("yes indeed")
    assert build_texts(300, 1, False, prose, prose, ["zebra", "anvil"]) == trained


def test_no_sentence_is_drawn_twice_while_others_wait() -> None:
    prose = [f"The {a} {b} sat." for a in "abcdefgh" for b in "rstuvwxyz"]
    verses = [f"And the {a} {b} rose." for a in "abcdefgh" for b in "rstuvwxyz"]
    first = build_texts(60, 1, False, prose, verses, ["zebra"])
    second = build_texts(
        60, 2, False, prose, verses, ["zebra"], frozenset(t["text"] for t in first)
    )
    sentences = [t["text"] for t in first + second if t["kind"] in ("prose", "verse")]
    assert len(sentences) > 40
    assert len(set(sentences)) == len(sentences)


def test_plain_sentences_have_no_names_or_numbers() -> None:
    common = {"the", "cat", "i", "sat", "down"}
    assert is_plain("The cat sat down.", common)
    assert is_plain("The cat I sat down.", common)
    assert not is_plain("The Cat sat down.", common)
    assert not is_plain("The 2 cat sat down.", common)
    assert not is_plain("The dog sat down.", common)


def make_corpus() -> Corpus:
    """Twelve recordings in two voices; a row's first code says voice and recording."""
    rng = np.random.default_rng(3)
    codes, firsts = [], []
    for voice in range(2):
        lengths = rng.integers(20, 40, 12)
        rows = rng.integers(0, 1024, (int(lengths.sum()), 10)).astype(np.int16)
        rows[:, 0] = np.repeat(np.arange(12) + 100 * voice, lengths)
        codes.append(rows)
        firsts.append(np.concatenate(([0], np.cumsum(lengths))))
    phonemes = [np.full(3, 20 + r, np.int16) for r in range(12)]
    return Corpus(phonemes, codes, firsts, np.arange(12), space=16)


def test_recordings_of_several_files_stand_one_after_the_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    paths, parts = [], []
    for number, texts in enumerate((["a", "ab"], ["b", "ba", "abb"])):
        counts = rng.integers(1, 9, (2, len(texts)))
        codes = rng.integers(0, 1024, (int(counts.sum()), 10))
        path = tmp_path / f"{number}.npz"
        write_codes(path, codes, counts, texts)
        paths.append(path)
        rows = iter(np.split(codes, np.cumsum(counts.ravel())[:-1]))
        parts.append([[next(rows) for _ in texts] for _ in counts])
    corpus = Corpus.read(paths, {"a": 7, "b": 8, " ": 9})
    assert [p.tolist() for p in corpus.phonemes] == [[7], [7, 8], [8], [8, 7], [7, 8, 8]]
    assert corpus.places.tolist() == [0, 1, 0, 1, 2]
    for voice in range(2):
        recordings = parts[0][voice] + parts[1][voice]
        for number, codes in enumerate(recordings):
            assert (corpus.rows_of(voice, number) == codes).all()


@pytest.mark.parametrize(
    ("counts", "texts", "told"),
    [
        ([[2, 1], [1, 1]], ["a"], "rows of 2 recordings and 1 texts"),
        ([[2, 0], [1, 0]], ["a", "a"], "no voice says recording 1"),
        ([[], []], [], "no recordings"),
        ([[2], [1], [1]], ["a"], "3 voices, .*good.npz has 2"),
        ([[2], [1]], ["z"], r"symbols \['z'\] are not in"),
    ],
)
def test_codes_that_fit_nothing_are_named(
    tmp_path: Path, counts: list[list[int]], texts: list[str], told: str
) -> None:
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    write_codes(good, np.zeros((3, 10), np.int64), np.array([[2], [1]]), ["a"])
    rows = np.array(counts, np.int64)
    write_codes(bad, np.zeros((int(rows.sum()), 10), np.int64), rows, texts)
    with pytest.raises(ValueError, match=rf"bad\.npz: {told}"):
        Corpus.read([good, bad], {"a": 7, " ": 9})


def test_codes_that_end_early_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    write_codes(path, np.zeros((2, 10), np.int64), np.array([[2], [1]]), ["a"])
    with pytest.raises(ValueError, match="25 bytes of codes, its rows make 40"):
        Corpus.read([path], {"a": 7, " ": 9})


def test_voices_beside_a_file_are_those_that_it_lacks(tmp_path: Path) -> None:
    first = choose_voices(np.random.default_rng(1), 40, 2, None)
    assert first.shape == (4, 40)
    assert (first.sum(axis=0) == 2).all()
    assert first.sum(axis=1).min() > 5
    write_codes(tmp_path / "c.npz", np.zeros((80, 10), np.int64), first * 1, ["a"] * 40)
    for each in (1, 2, 4):
        second = choose_voices(np.random.default_rng(2), 40, each, tmp_path / "c.npz")
        assert not (first & second).any()
        assert (second.sum(axis=0) == min(each, 2)).all()
    with pytest.raises(ValueError, match="40 recordings, the shards have 39"):
        choose_voices(np.random.default_rng(2), 39, 2, tmp_path / "c.npz")


def test_an_example_says_its_own_text_in_its_own_voice() -> None:
    corpus = make_corpus()
    drawer = Drawer(corpus, np.arange(12), seed=4, lesson=Lesson(noise=0.0))
    joined = with_reference = 0
    for _ in range(60):
        example = drawer.draw()
        ids = example.rows[:, 0].tolist()
        assert ids[0] == VOICE_BEGINS
        assert ids[example.generate] == GENERATE
        begins = ids.index(TEXT_BEGINS)
        text = [i - 20 for i in ids[begins + 1 : example.generate] if i != 16]
        said = example.codes[:, 0] % 100
        assert list(dict.fromkeys(said.tolist())) == list(dict.fromkeys(text))
        reference = example.rows[1:begins, 1]
        assert not set((reference % 100).tolist()) & set(text)
        assert len({*(reference // 100).tolist(), *(example.codes[:, 0] // 100).tolist()}) == 1
        assert (example.rows[example.generate + 1 :, 1:] == example.codes).all()
        joined += len(set(text)) > 1
        with_reference += len(reference) > 0
    assert joined > 5
    assert 40 < with_reference < 60


def test_a_batch_learns_the_next_row_and_then_stop() -> None:
    drawer = Drawer(make_corpus(), np.arange(12), seed=5, lesson=Lesson(noise=0.0))
    examples = [drawer.draw() for _ in range(3)]
    batch = make_batch(examples)
    for place, example in enumerate(examples):
        end = example.generate + len(example.codes)
        assert (batch.targets[place, example.generate : end] == example.codes).all()
        assert batch.targets[place, end, 0] == 1024
        assert (batch.targets[place, : example.generate] == -1).all()
        assert (batch.targets[place, end + 1 :] == -1).all()


def test_noise_is_in_what_is_read_never_in_what_is_learnt() -> None:
    corpus = make_corpus()
    drawer = Drawer(corpus, np.arange(12), seed=6, lesson=Lesson())
    damaged = 0
    for _ in range(random.Random(1).randint(30, 40)):
        example = drawer.draw()
        read = example.rows[example.generate + 1 :, 1:]
        damaged += int((read != example.codes).any())
        assert len(set((example.codes[:, 0] // 100).tolist())) == 1
    assert damaged > 20


def test_the_built_in_model_is_whole_and_small() -> None:
    directory = duplet_models.directory("wren")
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert {"LICENSES.md", "codec.safetensors", "model.safetensors", "voices.json"} <= set(files)
    assert sum(files.values()) <= MOST_BYTES
    with pytest.raises(InvalidInput, match="wren"):
        duplet_models.directory("robin")
    assert set(SPEAKERS) == {"amber", "cedar", "slate", "robin"}


def test_short_recordings_are_drawn_oftener() -> None:
    corpus = make_corpus()
    phonemes = [np.full(3 if r < 6 else 60, 20 + r, np.int16) for r in range(12)]
    drawer = Drawer(
        replace(corpus, phonemes=phonemes), np.arange(12), seed=7, lesson=Lesson(easy=True)
    )
    said = [int(drawer.draw().codes[0, 0]) % 100 for _ in range(600)]
    assert set(said) == set(range(12))
    assert 1.5 < sum(r < 6 for r in said) / sum(r >= 6 for r in said) < 2.6


def test_easy_lessons_come_first_and_noise_goes_last() -> None:
    lessons = [find_lesson(done / 100, easy_share=0.4) for done in range(101)]
    assert [lesson.easy for lesson in lessons] == [done < 40 for done in range(101)]
    noises = [lesson.noise for lesson in lessons]
    assert noises == sorted(noises, reverse=True)
    assert noises[0] == noises[50] == 1.0
    assert 0.0 < noises[-1] < 0.5
    assert not find_lesson(0.0, easy_share=0.0).easy


def test_less_noise_damages_less() -> None:
    def damage(noise: float) -> float:
        drawer = Drawer(make_corpus(), np.arange(12), seed=8, lesson=Lesson(noise=noise))
        examples = [drawer.draw() for _ in range(40)]
        return float(np.mean([(e.rows[e.generate + 1 :, 1:] != e.codes).mean() for e in examples]))

    assert damage(0.0) == 0.0
    assert 0.0 < damage(0.2) < 0.5 * damage(1.0)


def test_an_exercise_learns_what_its_batch_says() -> None:
    drawer = Drawer(make_corpus(), np.arange(12), seed=9, lesson=Lesson())
    batch = make_batch([drawer.draw() for _ in range(4)])
    exercise = Exercise.make(batch, np.random.default_rng(1), most=20)
    learnt = batch.targets[batch.targets[..., 0] >= 0]
    assert (exercise.wanted.numpy() == learnt).all()
    flat = batch.targets.reshape(-1, 10)
    assert (flat[exercise.places.numpy()] == learnt).all()
    coded = exercise.wanted[exercise.coded]
    assert len(set(exercise.coded.tolist())) == 20
    assert int(coded[:, 0].max()) < 1024
    assert int(coded.min()) >= 0
