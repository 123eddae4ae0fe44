"""What lb counts of the rows that leave it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duplet_core.playback import AUDIO_ROWS, NS, Playback
from duplet_lb.meter import Meters, StreamMeter
from duplet_lb.times import CallTimes
from duplet_runtime.metrics import Metrics

RATE = 20.0
RECEIVED_NS = 5 * NS


class Metered:
    """One stream of lb, and lb's figures."""

    def __init__(self) -> None:
        self._registry = (metrics := Metrics("lb")).registry
        self.meters = Meters(metrics)
        self.meters.rows_per_second = RATE
        self.stream = StreamMeter(self.meters)
        self.times = CallTimes(RECEIVED_NS)

    def note(self, now: int) -> None:
        self.meters.note_row(self.stream, self.times, now)

    def value(self, name: str) -> float:
        value = self._registry.get_sample_value(f"duplet_lb_{name}")
        assert value is not None, name
        return value


@given(st.lists(st.integers(0, NS // 2), min_size=1, max_size=80))
def test_the_figures_are_those_of_a_player_that_hears_every_row(waits_ns: list[int]) -> None:
    metered, player, now = Metered(), Playback(RATE), RECEIVED_NS
    at_ns = [now := now + wait_ns for wait_ns in waits_ns]
    for now in at_ns:
        metered.note(now)
        player.add(1, now)
    assert metered.stream.rows == player.rows == len(at_ns)
    assert metered.value("stalls_total") == player.stalls
    assert metered.stream.stalled is (player.stalls > 0)
    assert metered.value("row_gap_seconds_count") == len(at_ns) - 1
    assert abs(metered.value("row_gap_seconds_sum") - (at_ns[-1] - at_ns[0]) / NS) < 1e-6
    assert metered.times.first_row_ns == metered.stream.first_ns == at_ns[0]


def test_times_to_the_first_row_and_to_audio_are_noted_once() -> None:
    metered = Metered()
    for row in range(1, 3 * AUDIO_ROWS):
        metered.note(RECEIVED_NS + row * NS // 10)
        assert metered.value("ttft_seconds_count") == 1
        assert metered.value("ttfa_seconds_count") == (row >= AUDIO_ROWS)
    assert metered.value("ttft_seconds_sum") == 0.1
    assert metered.value("ttfa_seconds_sum") == AUDIO_ROWS / 10
    assert metered.value("stalls_total") > 0
