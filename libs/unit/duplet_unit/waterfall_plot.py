"""Waterfalls as pictures, SVG or PNG; needs matplotlib (`pip install 'duplet-load[plots]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from duplet_client import Timeline
from duplet_unit.waterfall import milliseconds, spreads

COLOURS = {
    "client": "#9aa0a6",
    "lb": "#1f9ed1",
    "prefill": "#b5489c",
    "kvproxy": "#e0a100",
    "decode": "#3a9d4f",
}


def plot_waterfall(timelines: Sequence[Timeline], path: Path) -> None:
    """One request's segments in their places, or percentiles of many; the suffix says the kind.

    Raises:
        ValueError: of many requests none has all segments, or matplotlib knows no such suffix.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    if len(timelines) == 1:
        names = _draw_one(axes, timelines[0])
    else:
        names = _draw_many(axes, timelines)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()])
    figure.savefig(path)


def _draw_one(axes: Axes, timeline: Timeline) -> list[str]:
    rows: list[tuple[str, str, float, float, float]] = []
    start_ns = 0
    for segment in timeline.segments():
        rows.append((segment.name, segment.service, start_ns, segment.duration_ns, 1.0))
        start_ns += segment.duration_ns
    if timeline.shares_clock:
        for span in timeline.beside():
            begins_ns = span.start_ns - timeline.client_sent_ns
            lasted_ns = span.end_ns - span.start_ns
            rows.append((f"({span.name})", span.service, begins_ns, lasted_ns, 0.45))
    for index, (_, service, left_ns, width_ns, alpha) in enumerate(rows):
        width_ms, left_ms = width_ns / 1e6, left_ns / 1e6
        axes.barh(index, width_ms, left=left_ms, color=COLOURS[service], alpha=alpha)
    axes.set_xlabel("ms since the request was sent")
    axes.set_title(f"one request: {milliseconds(timeline.total_ns)} ms")
    return [row[0] for row in rows]


def _draw_many(axes: Axes, timelines: Sequence[Timeline]) -> list[str]:
    *segments, whole = spreads(timelines)
    for index, s in enumerate(segments):
        for time_ns, alpha in ((s.p99_ns, 0.25), (s.p90_ns, 0.5), (s.p50_ns, 1.0)):
            axes.barh(index, time_ns / 1e6, color=COLOURS[s.service], alpha=alpha)
    axes.set_xlabel("ms: p50 solid, p90 and p99 paler")
    p50, p99 = milliseconds(whole.p50_ns), milliseconds(whole.p99_ns)
    axes.set_title(f"{len(timelines)} requests: whole p50 {p50} ms, p99 {p99} ms")
    return [s.name for s in segments]
