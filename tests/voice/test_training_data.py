"""What training/ holds that is pure: quantiser, other speakers, texts, examples."""

# ruff: noqa: RUF001 (phonemes look like letters)
from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

import duplet_models
from duplet_core.errors import InvalidInput
from duplet_voice.features import FRAME, LOG_F0, ROW, VOICED
from training.examples import GENERATE, TEXT_BEGINS, VOICE_BEGINS, Corpus, Drawer, make_batch
from training.quantiser import decode, encode, fit_books, pack_codes, unpack_codes
from training.speak import split_phonemes
from training.speakers import SPEAKERS, Speaker, place_rows, take_rows
from training.texts import build_texts, is_held_out, is_plain

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
    return Corpus(phonemes, codes, firsts, space=16)


def test_an_example_says_its_own_text_in_its_own_voice() -> None:
    corpus = make_corpus()
    drawer = Drawer(corpus, np.arange(12), seed=4, noisy=False)
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
    drawer = Drawer(make_corpus(), np.arange(12), seed=5, noisy=False)
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
    drawer = Drawer(corpus, np.arange(12), seed=6, noisy=True)
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
