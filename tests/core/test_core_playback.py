"""The player of one stream: when audio starts, and what counts as a stall."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duplet_core.playback import AUDIO_ROWS, NS, Playback

ROW_NS = NS // 20


def player() -> Playback:
    """Plays 20 rows/s and has just begun, at time 0, with nine rows."""
    made = Playback(rows_per_second=20.0)
    for _ in range(AUDIO_ROWS):
        assert not made.playing
        made.add(1, 0)
    assert made.playing
    return made


def test_rows_in_time_are_no_stall() -> None:
    made = player()
    for row in range(1, 100):
        made.add(1, (AUDIO_ROWS - 1 + row) * ROW_NS)
    assert (made.stalls, made.stalled_ns) == (0, 0)


def test_the_last_moment_is_still_in_time() -> None:
    made = player()
    made.add(1, AUDIO_ROWS * ROW_NS)
    assert made.stalls == 0


def test_a_late_row_stalls_once_and_playing_goes_on_from_there() -> None:
    made = player()
    late_ns = AUDIO_ROWS * ROW_NS + 7
    made.add(1, late_ns)
    assert (made.stalls, made.stalled_ns) == (1, 7)
    made.add(1, late_ns + ROW_NS)
    assert made.stalls == 1
    made.add(1, late_ns + 2 * ROW_NS + 5)
    assert (made.stalls, made.stalled_ns) == (2, 12)


def test_waiting_for_audio_is_no_stall() -> None:
    made = Playback(rows_per_second=20.0)
    for row in range(AUDIO_ROWS):
        made.add(1, row * 100 * ROW_NS)
    assert made.stalls == 0


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 10 * ROW_NS)), max_size=60))
def test_a_player_has_played_what_time_and_rows_allow(steps: list[tuple[int, int]]) -> None:
    """Against a player that is told nothing and steps through time row by row."""
    made, now = player(), 0
    played_until, rows, stalls = 0, AUDIO_ROWS, 0  # the next row begins at `played_until`
    played = 0
    for count, wait_ns in steps:
        now += wait_ns
        while played < rows and played_until + ROW_NS <= now:
            played += 1
            played_until += ROW_NS
        if played == rows and now > played_until:
            stalls += 1
            played_until = now
        rows += count
        made.add(count, now)
    assert made.stalls == stalls
