"""The admission guard: what it learns of steps, what lb may admit by it, and that it opens."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from duplet_core import engine
from duplet_core.errors import Reason
from duplet_core.front_state import FrontConfig
from duplet_core.ids import Role
from duplet_core.ledger import PageState
from duplet_core.messages import Census, Credit, StepCredit
from duplet_core.step_guard import FIRST_STREAMS, FIT_EVERY_STEPS, StepGuard
from tests.core.drivers import DecodeDriver, FrontDriver
from tests.core.samples import (
    DECODE_CONFIG,
    T1,
    T2,
    T3,
    admit,
    admitted,
    credits_sent,
    ended,
    sent,
    submit,
)

FLOOR = 42.0
FLOOR_NS = round(1e9 / FLOOR)
MILLISECOND = 1_000_000


@dataclass(frozen=True)
class Cost:
    """What a step truly takes."""

    base_ns: int
    stream_ns: int
    page_ns: int

    def of(self, streams: int, pages: int) -> int:
        return self.base_ns + streams * self.stream_ns + pages * self.page_ns


H200 = Cost(6_000_000, 15_000, 330)
CARD = Cost(12_000_000, 90_000, 900)
SLOW_CARD = Cost(15_000_000, 150_000, 500)
NO_CONTEXT = Cost(500_000, 2_000_000, 0)
FLAT = Cost(15_000_000, 0, 0)


def taught(cost: Cost, sizes: list[tuple[int, int]], noise: float = 0.0) -> StepGuard:
    guard = StepGuard(FLOOR)
    rng = random.Random(1)
    now = 0
    for streams, pages in sizes:
        taken = round(cost.of(streams, pages) * (1 + noise * rng.uniform(-1, 1)))
        guard.observe(streams, pages, now, now + taken)
        now += taken
    return guard


@pytest.mark.parametrize("cost", [H200, CARD, NO_CONTEXT, FLAT])
def test_steps_of_other_sizes_are_foretold(cost: Cost) -> None:
    sizes = [(n, n * (90 + k % 60)) for n in (1, 2, 4, 8, 16, 32) for k in range(60)]
    guard = taught(cost, sizes, noise=0.02)
    for streams, pages in ((1, 100), (24, 3000), (64, 9000)):
        assert guard.predict_ns(streams, pages) == pytest.approx(cost.of(streams, pages), rel=0.04)


@pytest.mark.parametrize("streams", [1, 2, 3, 8])
def test_what_one_size_cannot_tell_stays_as_it_was_known(streams: int) -> None:
    """A quiet night forgets no crowd: neither who fits nor who does not."""
    crowd = [(n, n * 100 + k) for n in range(1, 17) for k in range(40)]
    guard = taught(CARD, crowd + [(streams, streams * 100)] * 8000)
    for more in (streams, streams + 1, 24):
        foretold = guard.predict_ns(more, more * 100)
        assert foretold == pytest.approx(CARD.of(more, more * 100), rel=0.02)


@pytest.mark.parametrize("before", [0, 16])
@pytest.mark.parametrize("cost", [SLOW_CARD, CARD, H200])
def test_one_stream_at_a_time_does_not_close_the_unit_to_a_second(cost: Cost, before: int) -> None:
    """A base of two thirds of the longest step and more is read as the one stream's cost, and
    steps of one stream never say otherwise."""
    crowd = [(n, n * 100) for n in range(1, before + 1) for _ in range(40)]
    guard = taught(cost, crowd + [(1, 60 + k % 400 // 16) for k in range(8000)])
    credit = guard.credit(1, 90)
    assert guard.streams_believed() == (FIRST_STREAMS if before < 2 else 2 * before)
    assert credit.stream_ns + 90 * credit.page_ns <= credit.free_ns
    now = 10**15
    for _ in range(FIT_EVERY_STEPS):  # and once there are some, it knows what they cost
        guard.observe(4, 360, now, now + cost.of(4, 360))
        now += 10**9
    assert guard.predict_ns(16, 1440) == pytest.approx(cost.of(16, 1440), rel=0.05)


def test_no_cost_is_negative() -> None:
    sizes = [(n, 1000 - 10 * n) for n in range(1, 40) for _ in range(8)]
    credit = taught(NO_CONTEXT, sizes, noise=0.3).credit(1, 10)
    assert credit.stream_ns >= 0 and credit.page_ns >= 0 and credit.free_ns >= 0


@pytest.mark.parametrize("floor", [5e-324, 1e-12, 1e12])
def test_any_floor_fits_a_message(floor: float) -> None:
    credit = StepGuard(floor).credit(1, 10)
    assert 0 <= credit.free_ns < 2**63


def test_a_step_counts_from_the_end_of_the_one_before() -> None:
    guard = StepGuard(FLOOR)
    for k in range(64):  # launched 1 ms after the start of the one before, as overlap does
        end = (k + 1) * 5 * MILLISECOND
        guard.observe(4, 400, max(0, end - 9 * MILLISECOND), end)
    assert guard.predict_ns(4, 400) == pytest.approx(5 * MILLISECOND, rel=0.01)


def test_one_pause_does_not_close_the_unit() -> None:
    guard = taught(H200, [(8, 1000)] * 400)
    before = guard.credit(8, 1000).free_ns
    guard.observe(8, 1000, 10**12, 10**12 + 30_000_000_000)
    for k in range(64):
        start = 2 * 10**12 + k * 10**8
        guard.observe(8, 1000, start, start + H200.of(8, 1000))
    assert guard.credit(8, 1000).free_ns > 0.8 * before


@pytest.mark.parametrize("cost", [H200, CARD, NO_CONTEXT])
@pytest.mark.parametrize("seed", range(4))
def test_at_three_times_the_capacity_no_step_breaks_the_floor(cost: Cost, seed: int) -> None:
    """Streams come by a burst and then faster than they end; each grows to its own length."""
    rng = random.Random(seed)
    guard = StepGuard(FLOOR)
    live: list[list[int]] = []  # [pages now, pages reserved, steps left]
    now, most, steps_over = 0, 0, 0
    for step in range(3000):
        for _ in range(500 if step == 20 else rng.choice((0, 0, 1, 2, 3))):
            prompt, output = rng.randint(60, 125), rng.randint(10, 64)
            credit = guard.credit(len(live), sum(s[1] for s in live))
            need = credit.stream_ns + (prompt + output) * credit.page_ns
            if not live or (len(live) < guard.streams_believed() and need <= credit.free_ns):
                live.append([prompt, prompt + output, output * 16])
        pages = sum(s[0] for s in live)
        taken = round(cost.of(len(live), pages) * rng.uniform(0.97, 1.03))
        if live:
            guard.observe(len(live), pages, now, now + taken)
            steps_over += taken > FLOOR_NS
        now += taken
        most = max(most, len(live))
        for s in live:
            s[2] -= 1
            s[0] += s[2] % 16 == 0
        live = [s for s in live if s[2] > 0]
    assert steps_over == 0
    reserved_mean = 130
    could = (guard.longest_step_ns - cost.base_ns) / (cost.stream_ns + reserved_mean * cost.page_ns)
    assert most > 0.8 * could, "the guard gives nothing away either"


# --- decode tells it ----------------------------------------------------------------


def guarded() -> DecodeDriver:
    return DecodeDriver(replace(DECODE_CONFIG, floor_rows_per_s=FLOOR))


def test_decode_without_a_floor_says_nothing_of_steps() -> None:
    (credit,) = credits_sent(DecodeDriver().hear(Role.LB, admit()))
    assert credit.step is None


def test_decode_charges_an_admit_with_all_its_pages() -> None:
    decode = guarded()
    assert decode.machine.guard is not None
    for k in range(64):
        pages = (1 + k % 4) * 3 + k % 5
        decode.machine.guard.observe(1 + k % 4, pages, k * 10**9, k * 10**9 + pages * 10**6)
    (credit,) = credits_sent(decode.hear(Role.LB, admit()))
    reserved = decode.pages(PageState.GRANTED)
    assert credit.step is not None and reserved * credit.step.page_ns > MILLISECOND
    assert credit.step == decode.machine.guard.credit(1, reserved)


def test_what_is_in_quarantine_is_in_no_step() -> None:
    decode = guarded()
    decode.hear(Role.LB, admit())
    effects = decode.lose(Role.KVPROXY)
    step = credits_sent(effects)[-1].step
    assert step is not None and step.streams == 0


def test_decode_learns_from_its_steps() -> None:
    decode = guarded()
    guard = decode.machine.guard
    assert guard is not None
    for k in range(16):
        decode.say(engine.StepDone(k, (), b"", (), k * 10**9, k * 10**9 + 10**7))
    assert guard.most_streams == 0, "a step without streams teaches nothing"
    assert guard.streams_believed() == FIRST_STREAMS


def test_a_new_fit_is_told() -> None:
    decode = guarded()
    guard = decode.machine.guard
    assert guard is not None
    for k in range(FIT_EVERY_STEPS - 1):
        guard.observe(4, 40, k * 10**9, k * 10**9 + 10**7)
    assert credits_sent(decode.tick()) == []
    guard.observe(4, 40, 10**12, 10**12 + 10**7)
    (credit,) = credits_sent(decode.tick())
    assert credit.step == guard.credit(0, 0) and credit.step.stream_ns > 0


# --- lb keeps to it -----------------------------------------------------------------


def full(step: StepCredit | None, seen: int = 0) -> Credit:
    return Credit(16, 16, 8, seen, step=step)


def test_lb_counts_what_it_sent_against_the_steps() -> None:
    front = FrontDriver()
    front.hear(Role.DECODE, full(StepCredit(1, 100, 10, 20)))
    assert admitted(front.feed(submit("a", T1, pages=2))) == [T1], "10 + 2 * 20"
    assert admitted(front.feed(submit("b", T2, pages=2))) == [T2], "and as much again: 100"
    assert admitted(front.feed(submit("c", T3, pages=1))) == []
    assert admitted(front.hear(Role.DECODE, full(StepCredit(3, 29, 10, 20), seen=2))) == []
    assert admitted(front.hear(Role.DECODE, full(StepCredit(3, 30, 10, 20), seen=2))) == [T3]


def test_people_are_told_how_many_more_like_these_fit() -> None:
    front = FrontDriver()
    census = Census(granted_pages=4, live_pages=2)
    front.hear(Role.DECODE, Credit(16, 10, 8, 0, None, census, StepCredit(3, 149, 10, 20)))
    assert front.machine.free_streams() == 2, "two pages each: 50 ns"
    front.hear(Role.DECODE, Credit(16, 10, 1, 0, None, census, StepCredit(3, 149, 10, 20)))
    assert front.machine.free_streams() == 1
    front.hear(Role.DECODE, full(None))
    assert front.machine.free_streams() == 8


def test_an_idle_unit_takes_one_whatever_it_costs() -> None:
    """Else a unit that was slow once would learn nothing any more."""
    front = FrontDriver()
    front.hear(Role.DECODE, full(StepCredit(0, 0, 10, 20)))
    assert admitted(front.feed(submit("a", T1, pages=2))) == [T1]
    assert admitted(front.feed(submit("b", T2, pages=2))) == []


def test_what_the_floor_has_no_room_for_is_refused_and_costs_prefill_nothing() -> None:
    front = FrontDriver(FrontConfig(queue_wait_ns=500))
    front.hear(Role.DECODE, full(StepCredit(9, 5, 10, 20)))
    assert admitted(front.feed(submit("a", T1, pages=2))) == []
    effects = front.tick(500)
    assert [reason for _, reason in ended(effects)] == [Reason.OVERLOADED]
    assert sent(effects, Role.PREFILL) == sent(effects, Role.DECODE) == []


def test_who_waits_for_a_long_prompts_refusal_is_not_refused_with_it() -> None:
    """Both times are over at one tick of the clock, and the second always fitted."""
    front = FrontDriver(FrontConfig(queue_wait_ns=500))
    front.hear(Role.DECODE, full(StepCredit(1, 100, 10, 20)))
    assert admitted(front.feed(submit("a", T1, pages=9))) == []
    assert admitted(front.feed(submit("b", T2, pages=1))) == []
    effects = front.tick(500)
    assert [transfer for transfer, _ in ended(effects)] == [T1]
    assert admitted(effects) == [T2]
