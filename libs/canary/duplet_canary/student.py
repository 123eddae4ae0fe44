"""Student's t distribution, for intervals from few clusters."""

from __future__ import annotations

import math

_TINY = 1e-300
_PRECISION = 1e-15
_MOST_TERMS = 500


def t_cdf(x: float, degrees: float) -> float:
    """P(T <= x) for Student's t with `degrees` > 0 degrees of freedom; infinity: the normal."""
    if math.isinf(degrees):
        return 0.5 * math.erfc(-x / math.sqrt(2))
    if math.isinf(x):
        return float(x > 0)
    tail = 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + x * x))
    return 1 - tail if x > 0 else tail


def t_quantile(share: float, degrees: float) -> float:
    """The x with `t_cdf(x, degrees)` = `share`, which lies strictly between 0 and 1."""
    if not 0 < share < 1:
        raise ValueError(f"share: {share} is not between 0 and 1")
    high = 1.0
    while t_cdf(high, degrees) < max(share, 1 - share):
        high *= 2
    low = -high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_cdf(middle, degrees) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _continued_fraction(a, b, x) / a
    return 1 - front * _continued_fraction(b, a, 1 - x) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Of I_x(a, b), by Lentz's method; converges quickly for x < (a + 1) / (a + b + 2)."""
    c, d = 1.0, _away_from_zero(1 - (a + b) * x / (a + 1))
    d = 1 / d
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= d * c
        if abs(d * c - 1) < _PRECISION:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
