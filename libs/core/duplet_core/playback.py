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

    __slots__ = ("_row_ns", "empty_ns", "rows", "stalled_ns", "stalls")

    def __init__(self, rows_per_second: float = ROWS_PER_SECOND) -> None:
        self._row_ns = round(NS / rows_per_second)
        self.empty_ns = -1
        """When all that is there will have been played; negative: audio has not started."""
        self.rows = 0
        self.stalls = 0
        self.stalled_ns = 0

    @property
    def playing(self) -> bool:
        """Audio has started."""
        return self.empty_ns >= 0

    def add(self, count: int, now: int) -> None:
        """`count` rows are there now."""
        self.rows += count
        if now <= self.empty_ns:
            self.empty_ns += count * self._row_ns
        elif self.empty_ns >= 0:
            self.stalls += 1
            self.stalled_ns += now - self.empty_ns
            self.empty_ns = now + count * self._row_ns
        elif self.rows >= AUDIO_ROWS:
            self.empty_ns = now + self.rows * self._row_ns
