"""What one client measured: of each request, and of the gaps between all rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

GAP_RESOLUTION = 1.02
"""Gaps are counted in classes that grow by this factor: percentiles are right within 2 %."""


@dataclass(slots=True)
class Record:
    """One request as its client saw it; seconds on the client's clock."""

    number: int
    """In the trace."""
    prompt_rows: int
    at_s: float
    """When it was due; in a closed loop, when it was sent."""
    lag_s: float = 0.0
    """How much later than due it was sent: the generator's fault."""
    outcome: str = ""
    """STOP, LENGTH, or the reason of a failure."""
    ttft_s: float | None = None
    ttfa_s: float | None = None
    rows: int = 0
    rows_per_second: float | None = None
    longest_gap_s: float = 0.0
    stalls: int = 0
    stalled_s: float = 0.0
    cached_rows: int = 0
    took_s: float = 0.0
    timeline: dict[str, Any] | None = None

    @property
    def well(self) -> bool:
        return self.outcome in ("STOP", "LENGTH")

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Gaps:
    """Times between rows, counted in classes."""

    classes: Counter[int] = field(default_factory=Counter)

    def add(self, gap_s: float) -> None:
        self.classes[math.floor(math.log(max(gap_s, 1e-6), GAP_RESOLUTION))] += 1

    def merge(self, other: dict[str, int]) -> None:
        """Add another's classes, as JSON has them."""
        self.classes.update({int(key): count for key, count in other.items()})

    def quantile(self, share: float) -> float | None:
        """Seconds; the upper border of the class; None when there are none."""
        left = math.ceil(share * self.classes.total())
        for key in sorted(self.classes):
            left -= self.classes[key]
            if left <= 0:
                return float(GAP_RESOLUTION ** (key + 1))
        return None
