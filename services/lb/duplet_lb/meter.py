"""lb's metrics of streams: what listeners get, as seen where rows leave the unit.

Rows pass here one by one, so what is done for each is counted in fractions of a microsecond.
"""

from __future__ import annotations

from itertools import pairwise

from duplet_core.errors import Reason
from duplet_core.messages import Finished
from duplet_core.playback import AUDIO_ROWS, NS, ROWS_PER_SECOND, Playback
from duplet_core.timeline import CUT, SEGMENTS
from duplet_lb.times import CallTimes
from duplet_runtime.metrics import Metrics

FIRST_S = (0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)
GAP_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.0238, 0.03, 0.04, 0.0476, 0.06, 0.1, 0.2, 0.5, 1.0, 5.0)
RATES = (5.0, 10.0, 21.0, 30.0, 35.0, 42.0, 45.0, 50.0, 60.0, 80.0, 100.0, 200.0, 500.0)
SEGMENT_S = (
    *(1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)
OUTCOMES = ("STOP", "LENGTH", *Reason)


class StreamMeter:
    """One stream's rows on their way through lb; `Meters.note_row` writes it."""

    __slots__ = ("first_ns", "last_ns", "playback")

    def __init__(self, meters: Meters) -> None:
        self.playback = Playback(meters.rows_per_second)
        self.first_ns = 0
        self.last_ns = 0

    @property
    def rows(self) -> int:
        return self.playback.rows

    @property
    def stalled(self) -> bool:
        """Its listener has heard a gap."""
        return self.playback.stalls > 0

    @property
    def rows_per_second(self) -> float:
        """From the first row to the last; 0 while there is no time between them."""
        span_ns = self.last_ns - self.first_ns
        return (self.rows - 1) * NS / span_ns if span_ns > 0 else 0.0


class Meters:
    """Metrics over all streams of lb. Written by the event loop alone."""

    def __init__(self, metrics: Metrics) -> None:
        self.rows_per_second = ROWS_PER_SECOND
        """Of audio; set once the model is known."""
        self._ttft = metrics.histogram("ttft_seconds", "From request to first row", FIRST_S)
        self._ttfa = metrics.histogram("ttfa_seconds", "From request to audio", FIRST_S)
        self._row_gap = metrics.histogram("row_gap_seconds", "Between rows of one stream", GAP_S)
        self._rate = metrics.histogram(
            "stream_rate_rows_per_second", "Rows per second of a stream, first to last", RATES
        )
        self._stalls = metrics.counter("stalls", "Times that a listener's buffer ran empty")
        self._stalled = metrics.counter("stalled_streams", "Streams with a stall or more")
        self._rows = metrics.counter("rows", "Rows of ended streams")
        self._segments = {
            name: metrics.histogram(
                "segment_seconds",
                "Time of a request in a segment of its timeline",
                SEGMENT_S,
                {"segment": name},
            )
            for name in (*SEGMENTS[1:-1], CUT)
        }
        self._outcomes = {
            outcome: metrics.counter(
                "requests_ended", "Requests that ended", {"outcome": str(outcome)}
            )
            for outcome in OUTCOMES
        }

    def note_row(self, stream: StreamMeter, times: CallTimes, now: int) -> None:
        """A row of the stream leaves lb."""
        playback = stream.playback
        if now > playback.empty_ns:  # its listener hears nothing: not yet, or not any more
            self._note_silence(stream, times, now)
        playback.add(1, now)
        last_ns = stream.last_ns
        stream.last_ns = now
        if last_ns:
            self._row_gap.observe((now - last_ns) * 1e-9)

    def _note_silence(self, stream: StreamMeter, times: CallTimes, now: int) -> None:
        """A row that ends a stall, or one of those before audio starts."""
        if stream.playback.playing:
            self._stalls.add()
            return
        if not stream.rows:
            stream.first_ns = times.first_row_ns = now
            self._ttft.observe((now - times.received_ns) / NS)
        if stream.rows + 1 == AUDIO_ROWS:
            self._ttfa.observe((now - times.received_ns) / NS)

    def note_end(self, outcome: str) -> None:
        """A request ended, or was refused at the door."""
        self._outcomes[outcome].add()

    def note_stream(self, stream: StreamMeter) -> None:
        """A stream with rows is over."""
        self._rows.add(stream.rows)
        if stream.stalled:
            self._stalled.add()
        if stream.rows_per_second:
            self._rate.observe(stream.rows_per_second)

    def note_timeline(self, times: CallTimes, finished: Finished | None) -> None:
        """A request is over, with all of its points that lb will ever know."""
        points = times.points(finished)
        points.pop("decode_admitted", 0)
        points.pop("lb_first_row", 0)
        at_ns = list(points.values())
        if finished is None:
            self._segments[CUT].observe((at_ns[-1] - at_ns[0]) / NS)
            return
        names = [*SEGMENTS[1 : len(at_ns) - 1], SEGMENTS[-2]]
        for name, (start_ns, end_ns) in zip(names, pairwise(at_ns), strict=True):
            self._segments[name].observe((end_ns - start_ns) / NS)
