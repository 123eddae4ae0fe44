"""lb's points of a request's timeline, and the whole timeline as the client gets it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from duplet.speech.v1 import speech_pb2
from duplet_core.messages import Finished
from duplet_core.timeline import STAMPED


@dataclass(slots=True)
class CallTimes:
    """Of one Generate call; ns, 0 where it did not come to that."""

    received_ns: int
    checked_ns: int = 0
    admitted_ns: int = 0
    first_row_ns: int = 0
    """lb had the first row."""
    finished_ns: int = 0
    """lb handed Finished, or the error, to gRPC."""

    def points(self, finished: Finished | None = None) -> dict[str, int]:
        """All points that are known, in the order of the timeline, then those beside it.

        `finished`: with the stamps of the other services, where they came.
        """
        known = {
            "lb_received": self.received_ns,
            "lb_checked": self.checked_ns,
            "lb_admitted": self.admitted_ns,
        }
        # A request that stopped at once has prefill's stamps alone.
        known |= zip(STAMPED, finished.stamps if finished else (), strict=False)
        known["lb_finished"] = self.finished_ns
        known["decode_admitted"] = finished.admitted_ns if finished else 0
        known["lb_first_row"] = self.first_row_ns
        return {name: at_ns for name, at_ns in known.items() if at_ns}


def time_points(points: dict[str, int]) -> Iterable[speech_pb2.TimePoint]:
    """Points as the client gets them."""
    return (speech_pb2.TimePoint(name=name, at_ns=at_ns) for name, at_ns in points.items())
