"""Timing seen from the client."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_client.timing import Beside, Segment, StreamTiming, make_timeline
from duplet_core.timeline import POINTS, SEGMENTS

NS = 1_000_000_000


def test_rates_and_first_times() -> None:
    timing = StreamTiming()
    assert (timing.ttft_s, timing.ttfa_s, timing.rows_per_second) == (None, None, None)
    timing.sent_ns = 1 * NS
    timing.note_rows(4, 3 * NS)
    assert (timing.ttft_s, timing.ttfa_s, timing.rows_per_second) == (2.0, None, None)
    timing.note_rows(4, 4 * NS)
    assert timing.ttfa_s is None
    timing.note_rows(6, 5 * NS)
    assert timing.ttfa_s == 4.0
    assert timing.rows_per_second == 5.0
    timing.note_rows(2, 7 * NS)
    assert timing.ttfa_s == 4.0
    assert timing.rows_per_second == 3.0
    assert timing.rows == 16


def test_nine_rows_are_enough_for_audio() -> None:
    timing = StreamTiming()
    timing.sent_ns = 0
    for row in range(1, 10):
        timing.note_rows(1, row * NS)
    assert timing.ttfa_s == 9.0


def test_whole_timeline_has_every_segment() -> None:
    unit = [(name, 100 + 10 * i) for i, name in enumerate(POINTS[1:-1])]
    timeline = make_timeline(95, unit, 300)
    assert timeline.shares_clock
    assert [name for name, _ in timeline.points] == list(POINTS)
    segments = timeline.segments()
    assert [segment.name for segment in segments] == list(SEGMENTS)
    assert segments[0] == Segment("to lb", 5)
    assert segments[1] == Segment("lb check", 10)
    assert segments[-1] == Segment("to client", 40)


def test_a_missing_point_widens_the_segment_after_it() -> None:
    timeline = make_timeline(0, [("lb_received", 1), ("prefill_drawn", 7), ("lb_finished", 9)], 12)
    assert timeline.segments() == (
        Segment("to lb", 1),
        Segment("first row", 6),
        Segment("back to lb", 2),
        Segment("to client", 3),
    )


@pytest.mark.parametrize(
    ("points", "names"),
    [
        ([], ["until it ended"]),
        ([("lb_received", 10), ("lb_finished", 15)], ["to lb", "until it ended", "to client"]),
        (
            [("lb_received", 10), ("lb_checked", 11), ("lb_admitted", 12)],
            ["to lb", "lb check", "lb queue", "until it ended"],
        ),
    ],
    ids=["no answer", "refused", "cancelled"],
)
def test_what_did_not_end_well_says_where_it_was(
    points: list[tuple[str, int]], names: list[str]
) -> None:
    timeline = make_timeline(5, points, 50, finished=False)
    assert [segment.name for segment in timeline.segments()] == names
    assert sum(segment.duration_ns for segment in timeline.segments()) == 45


def test_spans_beside_the_chain_have_both_ends() -> None:
    points = [("lb_admitted", 3), ("landed", 20), ("verified", 22), ("lb_finished", 50)]
    assert make_timeline(0, points, 60).beside() == ()
    points += [("decode_admitted", 5), ("lb_first_row", 25)]
    assert make_timeline(0, points, 60).beside() == (
        Beside("decode admission", "decode", 3, 5),
        Beside("wait for KV", "decode", 5, 20),
        Beside("first row to lb", "lb", 22, 25),
    )


def test_another_clock_gets_one_network_segment() -> None:
    timeline = make_timeline(5_000, [("lb_received", 10), ("lb_finished", 40)], 5_050)
    assert not timeline.shares_clock
    assert timeline.points == (("lb_received", 10), ("lb_finished", 40))
    assert timeline.segments() == (Segment("back to lb", 30), Segment("network", 20))


def test_points_are_ordered_and_strange_ones_left_out() -> None:
    timeline = make_timeline(
        0, [("lb_finished", 9), ("tea_break", 5), ("lb_received", 1), ("client_sent", 8)], 10
    )
    assert timeline.unit_points == (("lb_received", 1), ("lb_finished", 9))


@given(
    st.dictionaries(st.sampled_from(POINTS), st.integers(0, 2**62)),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
)
@settings(deadline=None)
def test_segments_add_up_exactly(points: dict[str, int], sent_ns: int, finished_ns: int) -> None:
    timeline = make_timeline(sent_ns, list(points.items()), finished_ns)
    total_ns = sum(segment.duration_ns for segment in timeline.segments())
    assert total_ns == timeline.total_ns == finished_ns - sent_ns
