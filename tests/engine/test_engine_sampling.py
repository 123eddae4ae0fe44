"""Sampling against a plain rendering of its rules."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from duplet_core.errors import InvalidInput
from duplet_engine.sampling import (
    LONGEST_WINDOW,
    NEAREST,
    Draws,
    as_int64,
    check_sampling,
    draw,
    draw_entry,
    draw_token,
    noise_by_column,
    pack_sampling,
    pad_entries,
)
from tests.engine.company import PLAIN, all_noise, table

U64 = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
    return x ^ (x >> 31)


def plain_noise(seed: int, position: int, column: int, entry: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix((mix(seed & U64) + (position + 1) * golden) & U64)
    key = mix((key + (column + 1) * golden) & U64)
    bits = mix((key + (entry + 1) * golden) & U64)
    return -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))


def plain_draw(
    logits: list[float], temperature: float, top_p: float, top_k: int, noise: list[float]
) -> int:
    order = sorted(range(len(logits)), key=lambda entry: (-logits[entry], entry))
    if temperature == 0:
        return order[0]
    total = sum(math.exp(x - logits[order[0]]) for x in logits)
    best, best_score, cumulative = order[0], -math.inf, 0.0
    for rank, entry in enumerate(order):
        cumulative += math.exp(logits[entry] - logits[order[0]]) / total
        if rank > 0 and ((top_k and rank >= top_k) or cumulative > top_p):
            break
        score = logits[entry] / temperature + noise[entry]
        if score > best_score:
            best, best_score = entry, score
    return best


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 12345678901234567890])
def test_noise_is_the_hash_of_seed_position_column_entry(seed: int) -> None:
    seeds = torch.tensor([as_int64(seed)] * 2)
    noise = all_noise(seeds, torch.tensor([0, 4095]), torch.tensor([0, 3, 11]), 70)
    for row, position in enumerate((0, 4095)):
        for place, column in enumerate((0, 3, 11)):
            for entry in (0, 1, 69):
                expected = plain_noise(seed, position, column, entry)
                assert noise[row, place, entry].item() == pytest.approx(expected, rel=1e-12)


def test_noise_differs_wherever_one_argument_does_and_is_gumbel() -> None:
    seeds, positions = torch.arange(40) // 20, torch.arange(40) % 20
    noise = all_noise(seeds, positions, torch.arange(12), 64)
    assert len(set(noise.flatten().tolist())) == noise.numel()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.06)


def test_draws_are_the_plain_ones() -> None:
    rng = np.random.default_rng(7)
    rows = 400
    logits = torch.from_numpy(rng.standard_normal((rows, 64)).astype(np.float32) * 2)
    logits[:, 50:] = float("-inf")
    logits[::3, 5:9] = 1.0  # ties
    temperature = torch.from_numpy(rng.choice([0.0, 0.3, 0.8, 1.0, 2.5], rows))
    top_p = torch.from_numpy(rng.choice([1e-6, 0.3, 0.8, 0.95, 1.0], rows))
    top_k = torch.from_numpy(rng.choice([0, 1, 2, 30, 64], rows))
    noise = all_noise(torch.arange(rows), torch.arange(rows), torch.tensor([0]), 64)[:, 0]
    drawn = draw(logits, temperature, top_p, top_k, table(noise)).tolist()
    expected = [
        plain_draw(
            logits[i, :50].double().tolist(),
            temperature[i].item(),
            top_p[i].item(),
            int(top_k[i]),
            noise[i].tolist(),
        )
        for i in range(rows)
    ]
    assert drawn == expected
    assert len(set(drawn)) > 30


def test_frequencies_follow_the_probabilities() -> None:
    rows = 20_000
    logits = torch.full((rows, 64), float("-inf"))
    logits[:, :4] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    noise = all_noise(torch.arange(rows), torch.zeros(rows).long(), torch.tensor([0]), 64)
    one = torch.ones(rows, dtype=torch.float64)
    drawn = draw(logits, one, one, torch.zeros(rows).long(), table(noise[:, 0]))
    shares = (drawn.bincount(minlength=4) / rows).tolist()
    assert shares == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.01)


def test_rows_without_a_choice_draw_as_the_others_do() -> None:
    """From flat logits to those whose first entry fills top_p alone, and its border between."""
    rng = np.random.default_rng(11)
    rows, column = 600, 4
    logits = torch.from_numpy(rng.standard_normal((rows, 64)).astype(np.float32))
    logits *= torch.from_numpy(rng.choice([0.5, 2.0, 8.0, 16.0], (rows, 1)).astype(np.float32))
    # Two entries that share all: the first has just about top_p.
    logits[:50] = float("-inf")
    logits[:50, 7], logits[:50, 9] = 0.0, math.log(1 / 0.9 - 1)
    logits[:50, 9] += torch.linspace(-1e-5, 1e-5, 50)
    draws = pack_sampling([replace(PLAIN, seed=i, top_p=0.9) for i in range(rows)], [5] * rows)
    draws.temperature[::7] = 0.0
    noise = all_noise(draws.seed, draws.position, torch.tensor([column]), 64)[:, 0]
    whole = draw(logits, draws.temperature, draws.top_p, draws.top_k, table(noise))
    assert torch.equal(draw_entry(logits, draws, noise_by_column(draws, column + 1)[column]), whole)
    assert (whole != logits.argmax(-1)).any()


@pytest.mark.parametrize("decimals", [0, 1, 4])
def test_the_nearest_entries_draw_as_all_do(decimals: int) -> None:
    """Many entries: few are kept, many are, and equal ones lie on the border of the nearest."""
    rng = np.random.default_rng(decimals)
    rows, entries = 300, 8 * NEAREST
    logits = rng.standard_normal((rows, entries)) * rng.choice([0.3, 1.0, 4.0], (rows, 1))
    logits = torch.from_numpy(logits.round(decimals).astype(np.float32))
    logits[::5, NEAREST // 2 :] = float("-inf")  # fewer than the nearest are there
    logits[::7] = logits[::7, :1]  # all are equal
    temperature = torch.from_numpy(rng.choice([0.0, 1e-6, 0.5, 1.0, 2.0], rows))
    top_p = torch.from_numpy(rng.choice([1e-9, 0.3, 0.8, 0.95, 1.0], rows))
    some = [0, 1, 2, NEAREST - 1, NEAREST, NEAREST + 1, entries - 1, entries]
    top_k = torch.from_numpy(rng.choice(some, rows))
    noise = all_noise(torch.arange(rows), torch.arange(rows), torch.tensor([0]), entries)[:, 0]
    drawn = draw(logits, temperature, top_p, top_k, table(noise)).tolist()
    for i in range(rows):
        settings = temperature[i].item(), top_p[i].item(), int(top_k[i])
        assert drawn[i] == plain_draw(logits[i].double().tolist(), *settings, noise[i].tolist())


@pytest.mark.parametrize("decimals", [0, 1, 4])
@pytest.mark.parametrize("entries", [320, 4160])
def test_draws_do_not_depend_on_the_batch(entries: int, decimals: int) -> None:
    """Nor on whether a neighbour's draw needs all entries ranked."""
    rng = np.random.default_rng(entries + decimals)
    rows = 40
    logits = torch.from_numpy(rng.standard_normal((rows, entries)).round(decimals)).float()
    logits[::3] *= 8
    draws = pack_sampling([replace(PLAIN, seed=i) for i in range(rows)], list(range(rows)))
    draws.temperature.copy_(torch.from_numpy(rng.choice([0.0, 1e-6, 0.8, 2.0], rows)))
    draws.top_p.copy_(torch.from_numpy(rng.choice([1e-9, 0.9, 1.0], rows)))
    draws.top_k.copy_(torch.from_numpy(rng.choice([0, 1, NEAREST, entries], rows)))

    def draw_some(first: int, end: int) -> torch.Tensor:
        some = Draws(*(getattr(draws, part.name)[first:end] for part in fields(Draws)))
        return draw_entry(logits[first:end], some, noise_by_column(some, 1)[0])

    whole = draw_some(0, rows)
    for count in (1, 3, 8, 39):
        for first in range(0, rows, count):
            assert torch.equal(draw_some(first, first + count), whole[first : first + count])


def test_a_repeated_token_is_drawn_again() -> None:
    """Rows: repeated; repeated but older than the window; repeated stop; greedy; not repeated."""
    kinds = [PLAIN, PLAIN, PLAIN, replace(PLAIN, temperature=0.0), PLAIN]
    draws = pack_sampling(kinds, [9] * 5)
    stop = 63
    logits = torch.zeros(5, 64)
    favourite = [7, 7, stop, 7, 7]
    logits[range(5), favourite] = 30.0
    noise, redraw = torch.zeros(5, 64).double(), torch.zeros(5, 64).double()
    recent = torch.full((5, LONGEST_WINDOW), -1)
    recent[0, -10] = 7
    recent[1, -11] = 7
    recent[2, -1] = stop
    recent[3, -1] = 7
    recent[4, -1] = 8
    # A second draw that can be told apart: it sees a flatter head through its own noise.
    redraw[:, 20] = 100.0
    logits[:, 20], logits[:, 21] = 29.0, 28.9  # kept at top-p 0.9, dropped at 0.8
    drawn = draw_token(logits, draws, recent, stop, table(noise), table(redraw))
    assert drawn.tolist() == [20, 7, stop, 7, 7]


def test_window_zero_switches_the_second_draw_off() -> None:
    draws = pack_sampling([replace(PLAIN, repetition_window=0)], [1])
    logits = torch.zeros(1, 64)
    logits[0, 7] = 30.0
    recent = torch.full((1, LONGEST_WINDOW), 7)
    zeros = torch.zeros(1, 64).double()
    redraw = zeros.clone()
    redraw[0, 3] = 1e3
    assert draw_token(logits, draws, recent, 63, table(zeros), table(redraw)).tolist() == [7]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("repetition_window", -1),
        ("repetition_window", LONGEST_WINDOW + 1),
    ],
)
def test_bad_sampling_is_named(field: str, value: float) -> None:
    check_sampling(PLAIN)
    with pytest.raises(InvalidInput, match=rf"sampling\.{field} is {value!r}"):
        check_sampling(replace(PLAIN, **{field: value}))  # type: ignore[arg-type]


def test_entries_are_padded_to_whole_tiles() -> None:
    assert [pad_entries(n) for n in (1, 64, 65, 257)] == [64, 64, 128, 320]
