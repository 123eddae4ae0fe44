"""Timelines as tables for a terminal, and their way through JSON.

One request is a table of its segments, each with its place in the whole; many are a table of
percentiles by segment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from duplet_client import Timeline
from duplet_core.timeline import SEGMENTS, SERVICES

BAR_WIDTH = 40
SPREAD_WIDTH = 20
STYLES = {
    "client": "bright_black",
    "lb": "cyan",
    "prefill": "magenta",
    "kvproxy": "yellow",
    "decode": "green",
}


def timelines_from_json(text: str) -> list[Timeline]:
    """Read the `timeline` of every line: one or many objects of `duplet generate --json`, or the
    requests of `duplet bench --out`. Requests without one are left out.

    Raises:
        ValueError: a line is not such JSON, or there is no timeline at all.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)["timeline"]
            if fields is not None:
                found.append(Timeline.from_fields(fields))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} is not the JSON of `duplet generate --json`: {error!r}"
            ) from error
    if not found:
        raise ValueError("no timeline: not the JSON of `duplet generate --json`")
    return found


def sum_ns(timeline: Timeline) -> int:
    """What the segments add up to, in ns."""
    return sum(segment.duration_ns for segment in timeline.segments())


def waterfall_table(timeline: Timeline) -> Table:
    """The segments with their times and places, the sum under them, and what went on beside."""
    whole_ns = sum_ns(timeline)
    table = Table(show_edge=False, pad_edge=False, show_footer=True)
    table.add_column("segment", footer="sum")
    table.add_column("of", footer="")
    table.add_column("ms", justify="right", footer=milliseconds(whole_ns))
    table.add_column("", footer=f"client measured {milliseconds(timeline.total_ns)} ms")
    start_ns = 0
    for segment in timeline.segments():
        bar = _bar(start_ns, segment.duration_ns, whole_ns, segment.service)
        table.add_row(segment.name, segment.service, milliseconds(segment.duration_ns), bar)
        start_ns += segment.duration_ns
    if timeline.shares_clock and timeline.beside():
        table.add_section()
        for span in timeline.beside():
            lasted_ns = span.end_ns - span.start_ns
            place = (span.start_ns - timeline.client_sent_ns, lasted_ns, whole_ns)
            bar = _bar(*place, span.service, "░")
            table.add_row(f"({span.name})", span.service, milliseconds(lasted_ns), bar)
    return table


@dataclass(frozen=True, slots=True)
class Spread:
    """How long something took over many requests; ns."""

    name: str
    service: str
    p50_ns: int
    p90_ns: int
    p99_ns: int
    most_ns: int


def spread_of(name: str, service: str, times_ns: Iterable[int]) -> Spread:
    """Percentiles of at least one time: each the smallest that so many do not exceed."""
    ordered = sorted(times_ns)
    at = [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99, 1)]
    return Spread(name, service, *at)


def spreads(timelines: Sequence[Timeline]) -> list[Spread]:
    """By segment in the order of the timeline, over the requests that have all of them; last the
    whole. Percentiles of segments do not add up to those of the whole.

    Raises:
        ValueError: no request has all segments: none ended well on this machine.
    """
    whole = [t for t in timelines if tuple(s.name for s in t.segments()) == SEGMENTS]
    if not whole:
        raise ValueError("no request has all segments: none ended well on the unit's machine")
    columns = zip(*([s.duration_ns for s in t.segments()] for t in whole), strict=True)
    found = [
        spread_of(name, service, times_ns)
        for name, service, times_ns in zip(SEGMENTS, SERVICES, columns, strict=True)
    ]
    return [*found, spread_of("whole", "client", (t.total_ns for t in whole))]


def spread_table(timelines: Sequence[Timeline]) -> Table:
    """Percentiles by segment, with a bar each: solid to p50, then to p90 and p99.

    Raises:
        ValueError: no request has all segments.
    """
    *segments, whole = spreads(timelines)
    longest_ns = max(s.p99_ns for s in segments)
    table = Table(show_edge=False, pad_edge=False, show_footer=True)
    table.add_column("segment", footer="whole", no_wrap=True)
    table.add_column("of", no_wrap=True)
    for heading, value in (
        ("p50", whole.p50_ns),
        ("p90", whole.p90_ns),
        ("p99", whole.p99_ns),
        ("max", whole.most_ns),
    ):
        table.add_column(heading, justify="right", footer=milliseconds(value), no_wrap=True)
    table.add_column("", footer=f"ms; {len(timelines)} requests")
    for s in segments:
        times = (milliseconds(t) for t in (s.p50_ns, s.p90_ns, s.p99_ns, s.most_ns))
        table.add_row(s.name, s.service, *times, _spread_bar(s, longest_ns))
    return table


def milliseconds(span_ns: int) -> str:
    """ns as ms, to the microsecond."""
    return f"{span_ns / 1e6:.3f}"


def _bar(start_ns: int, span_ns: int, whole_ns: int, service: str, cell: str = "█") -> Text:
    """The segment's place in the whole; never narrower than one cell, so that it is seen."""
    scale = BAR_WIDTH / max(whole_ns, 1)
    left = min(int(start_ns * scale), BAR_WIDTH - 1)
    width = max(1, min(round(span_ns * scale), BAR_WIDTH - left))
    return Text(" " * left + cell * width, style=STYLES[service])


def _spread_bar(spread: Spread, longest_ns: int) -> Text:
    scale = SPREAD_WIDTH / max(longest_ns, 1)
    ends = [max(1, round(t * scale)) for t in (spread.p50_ns, spread.p90_ns, spread.p99_ns)]
    cells = "█" * ends[0] + "▒" * (ends[1] - ends[0]) + "░" * (ends[2] - ends[1])
    return Text(cells, style=STYLES[spread.service])
