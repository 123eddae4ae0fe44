"""A timeline as a table, and its way through JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from duplet_client import Timeline
from duplet_core.timeline import POINTS, SEGMENTS
from duplet_unit.waterfall import (
    sum_ns,
    timeline_from_json,
    timeline_to_fields,
    waterfall_table,
)

TIMES = {point: 1_000_000 * number**2 for number, point in enumerate(POINTS, start=3)}
WHOLE = Timeline(
    TIMES["client_sent"],
    tuple((point, TIMES[point]) for point in POINTS[1:-1]),
    TIMES["client_finished"],
)


def shown(timeline: Timeline) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(waterfall_table(timeline))
    return out.getvalue()


def test_the_table_shows_every_segment_and_the_sum() -> None:
    lines = shown(WHOLE).splitlines()
    body, foot = lines[2:-2], lines[-1]
    assert [line.partition("│")[0].strip() for line in body] == list(SEGMENTS)
    assert all("█" in line for line in body)
    assert "432.000" in foot
    assert "client measured 432.000 ms" in foot


def test_bars_follow_each_other() -> None:
    starts = [line.index("█") for line in shown(WHOLE).splitlines()[2:-2]]
    assert starts == sorted(starts)
    assert starts[0] < starts[-1]


def test_a_client_with_another_clock_gets_a_network_segment() -> None:
    other = Timeline(10**15, WHOLE.unit_points, 10**15 + 300_000_000)
    assert "network" in shown(other)
    assert sum_ns(other) == 300_000_000


def test_the_timeline_survives_json() -> None:
    text = json.dumps({"timeline": timeline_to_fields(WHOLE), "reason": "LENGTH"})
    assert timeline_from_json(text) == WHOLE


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"timeline": null}', '{"timeline": {"client_sent_ns": 1}}'],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the JSON of `duplet generate --json`"):
        timeline_from_json(text)
