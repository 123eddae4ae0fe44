"""The canary's statistics against values from tables and by hand."""

from __future__ import annotations

import math
import random

import pytest

from duplet_canary.equivalence import (
    INFINITE,
    PairedRates,
    pairs_for_power,
    tost_power,
)
from duplet_canary.student import t_cdf, t_quantile

ARTICLE_PAIRS = 26_259
ARTICLE_DEVIATION = 0.0005 / 1.959964 * math.sqrt(ARTICLE_PAIRS)
"""Of one pair's difference: the published 95 % interval of so many pairs is ± 0.05 points."""


@pytest.mark.parametrize(
    ("share", "degrees", "value"),
    [
        (0.975, 1, 12.7062),
        (0.95, 2, 2.91999),
        (0.975, 5, 2.57058),
        (0.975, 30, 2.04227),
        (0.9995, 30, 3.64596),
        (0.6, 120, 0.253910),
        (0.975, 1e6, 1.95997),
        (0.975, INFINITE, 1.959964),
        (0.025, 10, -2.22814),
    ],
)
def test_quantiles_are_those_of_the_tables(share: float, degrees: float, value: float) -> None:
    assert t_quantile(share, degrees) == pytest.approx(value, rel=2e-5)
    assert t_cdf(value, degrees) == pytest.approx(share, abs=1e-5)


def test_the_distribution_is_symmetric_and_ends_at_one() -> None:
    for degrees in (1, 3, 50, INFINITE):
        assert t_cdf(0, degrees) == pytest.approx(0.5)
        assert t_cdf(math.inf, degrees) == 1
        assert t_cdf(-1.3, degrees) == pytest.approx(1 - t_cdf(1.3, degrees))


@pytest.mark.parametrize("share", [0, 1, -0.1, 2])
def test_there_is_no_quantile_of_everything(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        t_quantile(share, 3)


def test_a_difference_by_hand() -> None:
    """Four utterances of 10: differences 1, 0, -1, 2 errors; mean 0.5 of 10 = 5 points. The rest is
    0.25 + 0.25 + 2.25 + 2.25 = 5; variance 4/3 * 5 / 40² = 0.0041667."""
    rates = PairedRates()
    for cluster, (monolith, unit) in enumerate([(0, 1), (2, 2), (1, 0), (0, 2)]):
        rates.add(cluster, monolith, unit, 10)
    found = rates.difference()
    assert found is not None
    assert found.monolith_rate == pytest.approx(3 / 40)
    assert found.unit_rate == pytest.approx(5 / 40)
    assert found.mean == pytest.approx(0.05)
    assert found.standard_error == pytest.approx(math.sqrt(4 / 3 * 5) / 40)
    low, high = found.interval()
    assert (low + high) / 2 == pytest.approx(0.05)
    assert high - 0.05 == pytest.approx(3.18245 * found.standard_error, rel=1e-5)


def test_pairs_of_one_utterance_count_as_one_observation() -> None:
    """The same four utterances, each heard nine times with the same outcome: no more is known."""
    once, often = PairedRates(), PairedRates()
    for cluster, (monolith, unit) in enumerate([(0, 1), (2, 2), (1, 0), (0, 2)]):
        once.add(cluster, monolith, unit, 10)
        for _ in range(9):
            often.add(cluster, monolith, unit, 10)
    first, second = once.difference(), often.difference()
    assert first is not None and second is not None
    assert second.pairs == 36
    assert second.clusters == 4
    assert second.interval() == pytest.approx(first.interval())


def test_nothing_is_known_from_one_utterance() -> None:
    rates = PairedRates()
    assert rates.difference() is None
    rates.add(7, 0, 3, 10)
    found = rates.difference()
    assert found is not None
    assert found.interval() == (-math.inf, math.inf)
    assert found.power() == 0
    assert not found.is_within()
    assert not found.excludes_zero()


def test_three_hundred_pairs_would_pass_by_luck_one_time_in_nine() -> None:
    power = tost_power(ARTICLE_DEVIATION / math.sqrt(300))
    assert power == pytest.approx(1 / 9, abs=0.01)


def test_a_thousand_pairs_are_enough() -> None:
    assert tost_power(ARTICLE_DEVIATION / math.sqrt(1_000)) > 0.93
    assert tost_power(ARTICLE_DEVIATION / math.sqrt(ARTICLE_PAIRS)) > 0.9999


@pytest.mark.parametrize("power", [0.8, 0.9])
def test_the_pairs_that_are_needed_have_the_power(power: float) -> None:
    needed = pairs_for_power(ARTICLE_DEVIATION, power)
    assert tost_power(ARTICLE_DEVIATION / math.sqrt(needed)) >= power
    assert tost_power(ARTICLE_DEVIATION / math.sqrt(needed - 1)) < power
    assert 700 < needed < 900


def test_a_true_difference_at_the_margin_is_accepted_one_time_in_forty() -> None:
    """The level of each of the two one-sided tests."""
    error = 0.001
    assert tost_power(error, 0.005, true_difference=0.005) == pytest.approx(0.025, abs=1e-4)
    assert tost_power(0, 0.005) == 1
    assert tost_power(0, 0.005, true_difference=0.006) == 0


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """800 experiments of 40 utterances whose true difference is 0: 95 % of the intervals have it.
    The bounds are four standard deviations away."""
    draw = random.Random(5)
    covered = 0
    for _ in range(800):
        rates = PairedRates()
        for cluster in range(40):
            length = draw.randrange(10, 60)
            wrong = [sum(draw.random() < 0.07 for _ in range(length)) for _ in range(2)]
            rates.add(cluster, wrong[0], wrong[1], length)
        found = rates.difference()
        assert found is not None
        low, high = found.interval()
        covered += low <= 0 <= high
    assert 0.92 < covered / 800 < 0.98
