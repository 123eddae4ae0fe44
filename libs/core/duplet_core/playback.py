"""A listener's player: it starts when enough rows are there and plays at a steady rate.

A stall is the moment at which the player has played all that was generated. It then waits for
the next rows and goes on from there, so every later lack is a stall of its own.
"""

from __future__ import annotations

AUDIO_ROWS = 9
"""Rows after which audio can start."""

ROWS_PER_SECOND = 21.0
"""Rows that make one second of audio, where the model does not say."""

NS = 1_000_000_000


class Playback:
    """One stream's player. Told of rows as they come; times are ns and never go back."""

    __slots__ = ("_row_ns", "_start_ns", "rows", "stalled_ns", "stalls")

    def __init__(self, rows_per_second: float = ROWS_PER_SECOND) -> None:
        self._row_ns = round(NS / rows_per_second)
        self._start_ns: int | None = None
        self.rows = 0
        self.stalls = 0
        self.stalled_ns = 0

    @property
    def playing(self) -> bool:
        """Audio has started."""
        return self._start_ns is not None

    def add(self, count: int, now: int) -> None:
        """`count` rows are there now."""
        if self._start_ns is None:
            self.rows += count
            if self.rows >= AUDIO_ROWS:
                self._start_ns = now
            return
        lack_ns = now - self._start_ns - self.rows * self._row_ns
        if lack_ns > 0:
            self.stalls += 1
            self.stalled_ns += lack_ns
            self._start_ns += lack_ns
        self.rows += count
