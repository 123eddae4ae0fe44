"""One request's timeline as a table of segments, with their sum against the client's time."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table
from rich.text import Text

from duplet_client import Timeline

BAR_WIDTH = 40


def timeline_to_fields(timeline: Timeline) -> dict[str, Any]:
    """The timeline as JSON has it; times are ns."""
    return {
        "client_sent_ns": timeline.client_sent_ns,
        "unit_points": [list(point) for point in timeline.unit_points],
        "client_finished_ns": timeline.client_finished_ns,
    }


def timeline_from_json(text: str) -> Timeline:
    """Read the `timeline` of `duplet generate --json`.

    Raises:
        ValueError: the text is not such JSON.
    """
    try:
        fields = json.loads(text)["timeline"]
        points = tuple((str(name), int(at_ns)) for name, at_ns in fields["unit_points"])
        return Timeline(int(fields["client_sent_ns"]), points, int(fields["client_finished_ns"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the JSON of `duplet generate --json`: {error!r}") from error


def sum_ns(timeline: Timeline) -> int:
    """What the segments add up to, in ns."""
    return sum(segment.duration_ns for segment in timeline.segments())


def waterfall_table(timeline: Timeline) -> Table:
    """A table of the segments with their times and places, and the sum under it."""
    whole_ns = sum_ns(timeline)
    table = Table(show_edge=False, pad_edge=False, show_footer=True)
    table.add_column("segment", footer="sum")
    table.add_column("ms", justify="right", footer=milliseconds(whole_ns))
    table.add_column("", footer=f"client measured {milliseconds(timeline.total_ns)} ms")
    start_ns = 0
    for segment in timeline.segments():
        bar = _bar(start_ns, segment.duration_ns, whole_ns)
        table.add_row(segment.name, milliseconds(segment.duration_ns), bar)
        start_ns += segment.duration_ns
    return table


def milliseconds(span_ns: int) -> str:
    """ns as ms, to the microsecond."""
    return f"{span_ns / 1e6:.3f}"


def _bar(start_ns: int, span_ns: int, whole_ns: int) -> Text:
    """The segment's place in the whole; never narrower than one cell, so that it is seen."""
    scale = BAR_WIDTH / max(whole_ns, 1)
    left = min(int(start_ns * scale), BAR_WIDTH - 1)
    width = max(1, min(round(span_ns * scale), BAR_WIDTH - left))
    return Text(" " * left + "█" * width, style="cyan")
