"""When things happened, seen from the client; all times are ns of its monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from duplet_core.playback import AUDIO_ROWS
from duplet_core.timeline import BESIDE, BESIDE_SPANS, CUT, NETWORK, POINTS, SEGMENTS, SERVICES

_NS = 1e9


class StreamTiming:
    """Times of one stream's rows; filled while the stream is read."""

    def __init__(self) -> None:
        self.sent_ns: int | None = None
        self.first_row_ns: int | None = None
        self.audio_ns: int | None = None
        self.last_row_ns: int | None = None
        self.finished_ns: int | None = None
        self.ended_ns: int | None = None
        """When the stream was over for the reader: finished, failed or left."""
        self.rows = 0
        self._rows_in_first_message = 0

    def note_rows(self, count: int, now_ns: int) -> None:
        """A message with `count` rows was read."""
        if self.first_row_ns is None:
            self.first_row_ns = now_ns
            self._rows_in_first_message = count
        self.rows += count
        self.last_row_ns = now_ns
        if self.audio_ns is None and self.rows >= AUDIO_ROWS:
            self.audio_ns = now_ns

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first row; None before it."""
        return self._since_sent(self.first_row_ns)

    @property
    def ttfa_s(self) -> float | None:
        """Seconds from sending to the row at which audio can start; None before it."""
        return self._since_sent(self.audio_ns)

    @property
    def rows_per_second(self) -> float | None:
        """Rate from the first to the last row; None while there is no time between them.

        Rows of the first message came together, so they count as the start.
        """
        if self.first_row_ns is None or self.last_row_ns is None:
            return None
        span_ns = self.last_row_ns - self.first_row_ns
        if span_ns <= 0:
            return None
        return (self.rows - self._rows_in_first_message) * _NS / span_ns

    def _since_sent(self, at_ns: int | None) -> float | None:
        if at_ns is None or self.sent_ns is None:
            return None
        return (at_ns - self.sent_ns) / _NS


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a request's way."""

    name: str
    """One of `duplet_core.timeline.SEGMENTS`, its `CUT`, or its `NETWORK`."""
    duration_ns: int

    @property
    def service(self) -> str:
        """Whose time it is."""
        return SERVICES[SEGMENTS.index(self.name)] if self.name in SEGMENTS else "client"


@dataclass(frozen=True, slots=True)
class Beside:
    """A span that overlaps the segments and is not part of their sum."""

    name: str
    service: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A request's points: the unit's between the client's two."""

    client_sent_ns: int
    unit_points: tuple[tuple[str, int], ...]
    """(name, ns of the unit's clock) in the order of `duplet_core.timeline.POINTS`."""
    client_finished_ns: int
    finished: bool = True
    """It ended well. Of others only what was told is known, and their last segment is CUT."""
    beside_points: tuple[tuple[str, int], ...] = ()
    """(name, ns) of `duplet_core.timeline.BESIDE`, as far as known."""
    step_gaps_ns: tuple[int, ...] = ()
    """From each decode step's end to the next; the first step ended at `first_step`."""

    @property
    def total_ns(self) -> int:
        """What the client measured."""
        return self.client_finished_ns - self.client_sent_ns

    @property
    def shares_clock(self) -> bool:
        """The unit's times lie between the client's: client and unit read one clock.

        Two machines' clocks count from their starts, hours apart.
        """
        if not self.unit_points:
            return False
        first_ns, last_ns = self.unit_points[0][1], self.unit_points[-1][1]
        return self.client_sent_ns <= first_ns and last_ns <= self.client_finished_ns

    @property
    def points(self) -> tuple[tuple[str, int], ...]:
        """All points, the client's included where it shares the unit's clock."""
        if not self.shares_clock:
            return self.unit_points
        return (
            (POINTS[0], self.client_sent_ns),
            *self.unit_points,
            (POINTS[-1], self.client_finished_ns),
        )

    def segments(self) -> tuple[Segment, ...]:
        """Segments in order; their sum is `total_ns`, exactly.

        A segment is named after the point at which it ends, so it includes what lies before it
        where points are missing. A client with another clock gets one segment 'network'.
        """
        points = self.points
        found = [
            Segment(self._ending_at(name, i), at_ns - points[i][1])
            for i, (name, at_ns) in enumerate(points[1:])
        ]
        if not self.shares_clock:
            rest_ns = self.total_ns - sum(segment.duration_ns for segment in found)
            found.append(Segment(NETWORK if self.unit_points else CUT, rest_ns))
        return tuple(found)

    def _ending_at(self, name: str, before: int) -> str:
        """Name of the segment from the point numbered `before` to `name`."""
        index = POINTS.index(name)
        cut = not self.finished and self.points[before][0] != POINTS[index - 1]
        return CUT if cut else SEGMENTS[index - 1]

    def to_fields(self) -> dict[str, Any]:
        """As JSON has it; times are ns."""
        return {
            "client_sent_ns": self.client_sent_ns,
            "unit_points": [list(point) for point in self.unit_points],
            "client_finished_ns": self.client_finished_ns,
            "finished": self.finished,
            "beside_points": [list(point) for point in self.beside_points],
            "step_gaps_ns": list(self.step_gaps_ns),
        }

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> Timeline:
        """Read `to_fields`.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        points, beside = (
            tuple((str(name), int(at_ns)) for name, at_ns in fields[key])
            for key in ("unit_points", "beside_points")
        )
        return Timeline(
            *(int(fields["client_sent_ns"]), points, int(fields["client_finished_ns"])),
            *(bool(fields["finished"]), beside, tuple(map(int, fields["step_gaps_ns"]))),
        )

    def beside(self) -> tuple[Beside, ...]:
        """What happened at the same time, as far as both ends are known."""
        at_ns = dict((*self.unit_points, *self.beside_points))
        return tuple(
            Beside(name, service, at_ns[first], at_ns[last])
            for name, first, last, service in BESIDE_SPANS
            if first in at_ns and last in at_ns
        )


def make_timeline(
    client_sent_ns: int,
    unit_points: list[tuple[str, int]],
    client_finished_ns: int,
    *,
    finished: bool = True,
    step_gaps_ns: tuple[int, ...] = (),
) -> Timeline:
    """Order the unit's points; names that this client does not know are left out."""
    told = dict(unit_points)
    chain = tuple((name, told[name]) for name in POINTS[1:-1] if name in told)
    beside = tuple((name, told[name]) for name in BESIDE if name in told)
    return Timeline(client_sent_ns, chain, client_finished_ns, finished, beside, step_gaps_ns)
