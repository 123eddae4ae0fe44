from __future__ import annotations

import numpy as np

from bench.natural_ends import LEAST_CHANCE, chi_square_chance, smirnov_chance


def lengths(seed: int, shift: int = 0) -> list[int]:
    """As streams of one stop probability have them."""
    drawn = np.random.default_rng(seed).geometric(1 / 80, 20_000)
    return [int(length) + shift for length in drawn]


def test_equal_lengths_are_taken_for_equal_and_a_shift_of_two_rows_is_seen() -> None:
    chances = [smirnov_chance(lengths(seed), lengths(100 + seed)) for seed in range(8)]
    assert min(chances) > LEAST_CHANCE
    assert max(chances) > 0.3
    assert smirnov_chance(lengths(1), lengths(2, shift=2)) < LEAST_CHANCE
    assert smirnov_chance([1, 2, 3], [1, 2, 3]) == 1.0


def test_chi_square_is_as_tables_have_it() -> None:
    # 3.841 is the 5 % point of one degree of freedom.
    a, b = (100, 100), (119, 80)
    chance = chi_square_chance(a, b)
    assert 0.045 < chance < 0.055
    assert chi_square_chance((20_000, 500), (20_000, 500)) == 1.0
    assert chi_square_chance((20_000, 500), (20_000, 620)) < LEAST_CHANCE
    assert chi_square_chance((20, 0), (30, 0)) == 1.0
