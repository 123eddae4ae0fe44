"""What was measured so far, by system, mix and number of streams: kept in a file as it comes,
so that a run that is cut keeps what it has and a later one goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one number of streams; seconds and rows/s, None where nothing was heard."""

    streams: int
    carried: bool
    requests: int
    refused: int
    stalled_streams: int
    slow_streams: int
    """Below the floor."""
    ttfa_p50_s: float | None = None
    ttfa_p95_s: float | None = None
    ttfa_p99_s: float | None = None
    gap_p99_s: float | None = None
    rate_p1: float | None = None
    """Rows/s which the slowest 1 % of streams did not exceed."""
    rate_p50: float | None = None
    lag_p99_s: float | None = None
    """Of the load generator itself."""

    @property
    def wrong_share(self) -> float:
        """Share of requests that were refused, stalled, or were too slow."""
        wrong = self.refused + max(self.stalled_streams, self.slow_streams)
        return wrong / max(1, self.requests)

    def describe(self) -> str:
        """For people, one line."""
        ttfa = "-" if self.ttfa_p95_s is None else f"{1e3 * self.ttfa_p95_s:.0f} ms"
        slowest = "-" if self.rate_p1 is None else f"{self.rate_p1:.1f} rows/s"
        return (
            f"{self.streams} streams: {'carried' if self.carried else 'not carried'}; "
            f"{self.requests} requests, {self.refused} refused, {self.stalled_streams} stalled, "
            f"{self.slow_streams} below the floor, TTFA p95 {ttfa}, slowest 1 % {slowest}"
        )


def read_points(path: Path, workload: str = "") -> dict[str, dict[str, list[Point]]]:
    """By mix and system, in order of streams; of the workload, or of the newest that has any.

    Raises:
        ValueError: a line is none of ours, or of another version.
    """
    text = path.read_text("utf-8")
    # Behind the last end of a line is what a run was cut in.
    whole = text[: text.rfind("\n") + 1].splitlines()
    lines = [_read_line(path, number, line) for number, line in enumerate(whole, start=1)]
    wanted = workload or (lines[-1][0] if lines else "")
    found: dict[str, dict[str, dict[int, Point]]] = {}
    for of, mix, system, point in lines:
        if of == wanted:
            found.setdefault(mix, {}).setdefault(system, {})[point.streams] = point
    return {
        mix: {name: [of[n] for n in sorted(of)] for name, of in systems.items()}
        for mix, systems in found.items()
    }


def _read_line(path: Path, number: int, text: str) -> tuple[str, str, str, Point]:
    """Workload, mix, system and point."""
    try:
        line = json.loads(text)
        return line["workload"], line["mix"], line["system"], Point(**line["point"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: no point of this version: {error!r}") from error


class Store:
    """Points of one workload in a .jsonl file, which only grows, but for half a line that a run
    was cut in: of lines about the same the last one holds. The file may have other workloads'
    points too."""

    def __init__(self, path: Path, workload: str) -> None:
        self._path = path
        self._workload = workload
        self._points: dict[tuple[str, str], dict[int, Point]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        known = read_points(path, workload) if path.exists() else {}
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        for mix, systems in known.items():
            for system, points in systems.items():
                self._points[system, mix] = {point.streams: point for point in points}

    def points(self, system: str, mix: str) -> list[Point]:
        """By number of streams."""
        found = self._points.get((system, mix), {})
        return [found[streams] for streams in sorted(found)]

    def add(self, system: str, mix: str, point: Point) -> None:
        """Keep the point; it is in the file when this returns."""
        self._points.setdefault((system, mix), {})[point.streams] = point
        line = {"workload": self._workload, "system": system, "mix": mix, "point": asdict(point)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def best(points: Sequence[Point]) -> Point | None:
    """The most streams below which everything was carried; None when not even the fewest were."""
    found = None
    for point in points:
        if not point.carried:
            break
        found = point
    return found


def next_levels(points: Sequence[Point], first: int, step: int, most: int) -> list[int]:
    """Numbers of streams to measure next, ascending; none when what is carried is known to a
    step.

    Args:
        points: what is known, by number of streams.
        first: where to begin.
        step: between levels.
        most: streams that are tried at most.
    """
    if not points:
        return list(range(min(first, most), most + 1, step))
    carried = best(points)
    failed = next((point.streams for point in points if not point.carried), None)
    if failed is None:
        assert carried is not None
        return list(range(carried.streams + step, most + 1, step))
    if carried is not None or failed == 1:
        return []
    below = failed // 2
    finer = max(1, step // 2)
    return list(range(below, failed, finer))
