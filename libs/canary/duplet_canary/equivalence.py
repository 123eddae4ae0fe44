"""The paired difference of two error rates, and whether it is small enough not to matter.

Rates are errors per unit of reference (phonemes or words) over all pairs, so that a long
utterance counts for more than a short one. The difference is unit minus monolith; its standard
error treats the pairs of one utterance as one observation (cluster), for what is hard to
recognise there is hard again. Intervals are Student's t with one degree of freedom less than
there are clusters.

The equivalence test (TOST) accepts when the 95 % interval lies inside the margin: each of its two
one-sided tests has a level of 2.5 %. Its power is the chance to accept two sides that are truly
alike, given how much the pairs scatter. Below it, acceptance would be luck and refusal no news.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from duplet_canary.student import t_cdf, t_quantile

MARGIN = 0.005
"""Half a point: differences of this size and smaller do not matter."""
CONFIDENCE = 0.95
INFINITE = math.inf


@dataclass(frozen=True, slots=True)
class Difference:
    """Unit's error rate minus monolith's. Rates and differences are shares, not percent."""

    monolith_rate: float
    unit_rate: float
    standard_error: float
    pairs: int
    clusters: int

    @property
    def mean(self) -> float:
        return self.unit_rate - self.monolith_rate

    @property
    def degrees(self) -> int:
        """Degrees of freedom of its t interval."""
        return self.clusters - 1

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Low and high end; everything where one cluster says nothing about the scatter."""
        if self.degrees < 1:
            return -INFINITE, INFINITE
        half = t_quantile((1 + confidence) / 2, self.degrees) * self.standard_error
        return self.mean - half, self.mean + half

    def excludes_zero(self, confidence: float = CONFIDENCE) -> bool:
        low, high = self.interval(confidence)
        return low > 0 or high < 0

    def is_within(self, margin: float = MARGIN) -> bool:
        """Whether the equivalence test accepts."""
        low, high = self.interval()
        return -margin < low and high < margin

    def power(self, margin: float = MARGIN) -> float:
        """Of the equivalence test at the observed scatter; 0 where that is not known."""
        if self.degrees < 1:
            return 0.0
        return tost_power(self.standard_error, margin, self.degrees)

    def pairs_needed(self, power: float, margin: float = MARGIN) -> int:
        """Pairs for so much power at the observed scatter; 0 where that is not known."""
        if self.degrees < 1:
            return 0
        deviation = self.standard_error * math.sqrt(self.pairs)
        return pairs_for_power(deviation, power, margin)


@dataclass(slots=True)
class PairedRates:
    """Sums from which a Difference follows; grows with the number of utterances, not of pairs."""

    pairs: int = 0
    monolith_errors: int = 0
    unit_errors: int = 0
    length: int = 0
    _clusters: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(errors of the unit minus errors of the monolith, length), by utterance."""

    def add(self, cluster: int, monolith_errors: int, unit_errors: int, length: int) -> None:
        """One pair; `length` > 0 in units of reference."""
        self.pairs += 1
        self.monolith_errors += monolith_errors
        self.unit_errors += unit_errors
        self.length += length
        difference, total = self._clusters.get(cluster, (0, 0))
        self._clusters[cluster] = (difference + unit_errors - monolith_errors, total + length)

    def difference(self) -> Difference | None:
        """None before the first pair."""
        if not self.pairs:
            return None
        mean = (self.unit_errors - self.monolith_errors) / self.length
        count = len(self._clusters)
        rest = sum((d - mean * n) ** 2 for d, n in self._clusters.values())
        scale = count / (count - 1) if count > 1 else 0.0
        return Difference(
            monolith_rate=self.monolith_errors / self.length,
            unit_rate=self.unit_errors / self.length,
            standard_error=math.sqrt(scale * rest) / self.length,
            pairs=self.pairs,
            clusters=count,
        )


def tost_power(
    standard_error: float,
    margin: float = MARGIN,
    degrees: float = INFINITE,
    true_difference: float = 0.0,
) -> float:
    """Chance that the 95 % interval of a difference lies inside ± `margin`.

    `standard_error`, `margin`, `true_difference`: in the same unit. `degrees`: of freedom;
    infinite: the normal approximation.
    """
    if standard_error == 0:
        return float(abs(true_difference) < margin)
    critical = t_quantile((1 + CONFIDENCE) / 2, degrees)
    above = t_cdf((margin + true_difference) / standard_error - critical, degrees)
    below = t_cdf((margin - true_difference) / standard_error - critical, degrees)
    return max(0.0, above + below - 1)


def pairs_for_power(deviation: float, power: float, margin: float = MARGIN) -> int:
    """Fewest pairs for so much power between two sides that are alike.

    `deviation`: standard deviation of one pair's difference. Normal approximation, which is
    exact enough from 30 pairs on.
    """
    critical = t_quantile((1 + CONFIDENCE) / 2, INFINITE)
    reach = t_quantile((1 + power) / 2, INFINITE)
    return max(2, math.ceil(((critical + reach) * deviation / margin) ** 2))
