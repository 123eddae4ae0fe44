"""Timelines as tables, pictures and traces, and their way through JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from duplet_client import Timeline
from duplet_core.timeline import BESIDE, POINTS, SEGMENTS, SERVICES
from duplet_unit.chrome_trace import chrome_trace
from duplet_unit.waterfall import (
    spread_table,
    spreads,
    sum_ns,
    timelines_from_json,
    waterfall_table,
)
from duplet_unit.waterfall_plot import plot_waterfall

TIMES = {point: 1_000_000 * number**2 for number, point in enumerate(POINTS, start=3)}
STEPS = TIMES["last_step"] - TIMES["first_step"]
WHOLE = Timeline(
    TIMES["client_sent"],
    tuple((point, TIMES[point]) for point in POINTS[1:-1]),
    TIMES["client_finished"],
    beside_points=(
        (BESIDE[0], TIMES["lb_admitted"] + 1_000_000),
        (BESIDE[1], TIMES["verified"] + 2_000_000),
    ),
    step_gaps_ns=(STEPS - 10, 10),
)
REFUSED = Timeline(
    TIMES["client_sent"], WHOLE.unit_points[:1], TIMES["client_finished"], finished=False
)


def slower(times: int) -> Timeline:
    """WHOLE, with every segment so many times as long."""
    zero_ns = WHOLE.client_sent_ns
    points = tuple((name, zero_ns + times * (at - zero_ns)) for name, at in WHOLE.unit_points)
    end_ns = zero_ns + times * WHOLE.total_ns
    return replace(WHOLE, unit_points=points, client_finished_ns=end_ns, beside_points=())


def shown(table: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def first_cells(lines: list[str]) -> list[str]:
    return [line.partition("│")[0].strip() for line in lines]


def test_the_table_shows_every_segment_and_the_sum() -> None:
    lines = shown(waterfall_table(WHOLE)).splitlines()
    names = first_cells(lines)
    assert names[2 : 2 + len(SEGMENTS)] == list(SEGMENTS)
    assert all("█" in line for line in lines[2 : 2 + len(SEGMENTS)])
    assert "(wait for KV)" in names
    assert "432.000" in lines[-1]
    assert "client measured 432.000 ms" in lines[-1]


def test_bars_follow_each_other() -> None:
    lines = shown(waterfall_table(WHOLE)).splitlines()[2 : 2 + len(SEGMENTS)]
    starts = [line.index("█") for line in lines]
    assert starts == sorted(starts)
    assert starts[0] < starts[-1]


def test_a_client_with_another_clock_gets_a_network_segment() -> None:
    other = Timeline(10**15, WHOLE.unit_points, 10**15 + 500_000_000)
    assert "network" in shown(waterfall_table(other))
    assert sum_ns(other) == 500_000_000


def test_a_refused_request_is_shown_too() -> None:
    assert "until it ended" in shown(waterfall_table(REFUSED))


def test_many_requests_show_percentiles_of_each_segment() -> None:
    timelines = [slower(times) for times in range(1, 101)]
    found = {spread.name: spread for spread in spreads([*timelines, REFUSED])}
    assert list(found) == [*SEGMENTS, "whole"]
    for name, segment in zip(SEGMENTS, WHOLE.segments(), strict=True):
        times = (found[name].p50_ns, found[name].p90_ns, found[name].p99_ns, found[name].most_ns)
        assert times == tuple(n * segment.duration_ns for n in (50, 90, 99, 100))
    assert found["whole"].p50_ns == 50 * WHOLE.total_ns
    lines = shown(spread_table(timelines)).splitlines()
    assert first_cells(lines)[2:-2] == list(SEGMENTS)
    assert "100 requests" in lines[-1]


def test_many_requests_that_all_failed_have_no_percentiles() -> None:
    with pytest.raises(ValueError, match="none ended well"):
        spreads([REFUSED, REFUSED])


def test_timelines_survive_json() -> None:
    lines = [json.dumps({"timeline": t.to_fields()}) for t in (WHOLE, REFUSED)]
    text = "\n".join([*lines, '{"timeline": null}', ""])
    assert timelines_from_json(text) == [WHOLE, REFUSED]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"timeline": null}', '{"timeline": {"client_sent_ns": 1}}'],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the JSON of `duplet generate --json`"):
        timelines_from_json(text)


def test_the_trace_has_every_span_where_it_was() -> None:
    trace = json.loads(json.dumps(chrome_trace([WHOLE, slower(2)])))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]["request"] == 0]
    named = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert set(named) == {*SERVICES}
    chain = [e for e in spans if e["name"] in SEGMENTS]
    assert [e["name"] for e in chain] == list(SEGMENTS)
    assert [e["pid"] for e in chain] == [named[service] for service in SERVICES]
    for one, after in pairwise(chain):
        assert one["ts"] + one["dur"] == pytest.approx(after["ts"])
    steps = [e for e in spans if e["name"] == "step"]
    assert sum(e["dur"] for e in steps) == pytest.approx(STEPS / 1e3)
    assert {"wait for KV", "decode admission"} <= {e["name"] for e in spans}
    overlapping = [e for e in spans if e["name"] == "wait for KV"]
    assert {e["tid"] for e in overlapping}.isdisjoint({e["tid"] for e in chain})


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
@pytest.mark.parametrize("count", [1, 3])
def test_pictures_are_drawn(tmp_path: Path, suffix: str, magic: bytes, count: int) -> None:
    path = tmp_path / f"waterfall{suffix}"
    plot_waterfall([slower(n) for n in range(1, count + 1)], path)
    assert path.read_bytes().startswith(magic)
