"""The admission guard of a fresh unit: with timed steps it takes at once what fits, and what
they had wrong is right after a few steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from duplet_core.engine import StepDone, StepTime
from duplet_core.step_guard import FIRST_STREAMS, FIT_EVERY_STEPS, StepGuard
from tests.core.drivers import DecodeDriver
from tests.core.samples import DECODE_CONFIG

FLOOR = 42.0
FLOOR_NS = round(1e9 / FLOOR)

Takes = Callable[[int, int], int]
"""Nanoseconds of a step, by its streams and their pages."""


def pair(streams: int, pages: int) -> int:
    """Like S2-Pro's steps on an H200."""
    return 5_200_000 + 20_000 * streams + 470 * pages


def stairs(streams: int, pages: int) -> int:
    """A step pads its streams to the next size of graph, and large ones multiply for longer."""
    size = next(n for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256) if n >= streams)
    return 5_200_000 + 15_000 * size + 40 * size**2 + 470 * pages


def heavy(streams: int, pages: int) -> int:
    """A card on which seven fit."""
    return 12_000_000 + 600_000 * streams + 4_000 * pages


def timed(takes: Takes, most: int = 256, factor: float = 1.0) -> tuple[StepTime, ...]:
    """What an engine says at start, with every time `factor` times what it is."""
    sizes = [(n, n * each) for each in (2, 128) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    return tuple(StepTime(n, p, round(factor * takes(n, p))) for n, p in sizes if n <= most)


class Unit:
    """A decode of one guard: listeners are admitted by its credit, land, step and end."""

    def __init__(self, guard: StepGuard, takes: Takes, seed: int = 0, noise: float = 0.03) -> None:
        self.guard = guard
        self.now = 0
        self.steps_ns: list[int] = []
        self.most = 0
        self._takes = takes
        self._rng = random.Random(seed)
        self._noise = noise
        self._landing: list[list[int]] = []  # [pages now, pages reserved, rows left]
        self._live: list[list[int]] = []

    def offer(self, listeners: int) -> int:
        """So many ask at once; returns how many are admitted."""
        admitted = 0
        for _ in range(listeners):
            held = self._landing + self._live
            prompt, output = self._rng.randint(63, 125), self._rng.randint(8, 13)
            credit = self.guard.credit(len(held), sum(pages for _, pages, _ in held))
            need = credit.stream_ns + (prompt + output) * credit.page_ns
            if len(held) < self.guard.streams_believed() and (not held or need <= credit.free_ns):
                self._landing.append([prompt, prompt + output, output * 16])
                admitted += 1
        return admitted

    def step(self, steps: int = 1, landing: int = 2) -> None:
        """Steps, with so many prompts landing before each."""
        for _ in range(steps):
            self._live += self._landing[:landing]
            del self._landing[:landing]
            streams, pages = len(self._live), sum(now for now, _, _ in self._live)
            if not streams:
                return
            self.most = max(self.most, streams)
            taken = self._takes(streams, pages) * (1 + self._noise * self._rng.uniform(-1, 1))
            self.guard.observe(streams, pages, self.now, self.now + round(taken))
            self.now += round(taken)
            self.steps_ns.append(round(taken))
            for stream in self._live:
                stream[2] -= 1
                stream[0] += stream[2] % 16 == 0
            self._live = [stream for stream in self._live if stream[2] > 0]

    def run_empty(self) -> None:
        while self._landing or self._live:
            self.step()


def could(takes: Takes, guard: StepGuard) -> int:
    """Streams of the middle length that the longest step has room for."""
    return max(n for n in range(1, 257) if takes(n, n * 105) <= guard.longest_step_ns)


def test_without_timed_steps_a_fresh_unit_takes_the_first_four() -> None:
    assert Unit(StepGuard(FLOOR), pair).offer(64) == FIRST_STREAMS


def test_with_timed_steps_64_at_once_are_all_taken() -> None:
    unit = Unit(StepGuard(FLOOR, timed(pair)), pair)
    assert unit.offer(64) == 64
    unit.run_empty()
    assert unit.most == 64 and max(unit.steps_ns) < FLOOR_NS


@pytest.mark.parametrize("takes", [pair, stairs, heavy])
@pytest.mark.parametrize("seed", range(3))
def test_a_burst_on_a_fresh_unit_fills_it_and_breaks_no_floor(takes: Takes, seed: int) -> None:
    """Nobody has been stepped when all of them are admitted."""
    unit = Unit(StepGuard(FLOOR, timed(takes)), takes, seed)
    fits = could(takes, unit.guard)
    assert unit.offer(500) >= 0.85 * fits
    unit.step(40, landing=20)
    for _ in range(400):
        unit.offer(2)
        unit.step()
    assert max(unit.steps_ns) < FLOOR_NS


@pytest.mark.parametrize("takes", [pair, heavy])
@pytest.mark.parametrize("factor", [0.5, 0.7, 1.5, 3.0])
@pytest.mark.parametrize("streams", [4, 6])
def test_figures_that_were_wrong_are_right_after_one_fit(
    takes: Takes, factor: float, streams: int
) -> None:
    """Also of many more streams than have been seen."""
    guard = StepGuard(FLOOR, timed(takes, factor=factor))
    assert guard.predict_ns(64, 6400) == pytest.approx(factor * takes(64, 6400), rel=0.01)
    now = 0
    for k in range(FIT_EVERY_STEPS):
        taken = takes(streams, 100 * streams + k)
        guard.observe(streams, 100 * streams + k, now, now + taken)
        now += taken
    for more in (1, streams, 16, 64, 200):
        truth = takes(more, 100 * more)
        assert guard.predict_ns(more, 100 * more) == pytest.approx(truth, rel=0.03)


@pytest.mark.parametrize("factor", [0.6, 0.8])
def test_who_comes_while_optimistic_figures_are_corrected_breaks_no_floor(factor: float) -> None:
    """Ten more ask before every step, from the first one on."""
    unit = Unit(StepGuard(FLOOR, timed(pair, factor=factor)), pair)
    for _ in range(60):
        unit.offer(10)
        unit.step(landing=10)
    assert unit.most > 0.85 * could(pair, unit.guard)
    assert max(unit.steps_ns) < FLOOR_NS


def test_a_context_that_costs_more_than_was_timed_is_learned() -> None:
    def dearer(streams: int, pages: int) -> int:
        return pair(streams, 2 * pages)

    unit = Unit(StepGuard(FLOOR, timed(pair)), dearer)
    for _ in range(600):
        unit.offer(2)
        unit.step()
    assert max(unit.steps_ns[100:]) < FLOOR_NS
    assert unit.most > 0.8 * could(dearer, unit.guard)


def test_timed_steps_do_not_contradict_the_days() -> None:
    """Whose pages cost four times as much: of the sizes that the day has, its own word counts."""

    def dearer(streams: int, pages: int) -> int:
        return pair(streams, 4 * pages)

    guard, rng, now = StepGuard(FLOOR, timed(pair)), random.Random(2), 0
    for k in range(2000):
        streams = 1 + k % 24
        pages = sum(rng.randint(60, 135) for _ in range(streams))
        guard.observe(streams, pages, now, now + dearer(streams, pages))
        now += dearer(streams, pages)
    for streams in (4, 12, 24):
        truth = dearer(streams, 100 * streams)
        assert guard.predict_ns(streams, 100 * streams) == pytest.approx(truth, rel=0.06)


def test_noise_of_a_quiet_night_says_nothing_of_a_crowd() -> None:
    """Steps of one size that differ by chance only, for longer than they are remembered."""
    guard, rng, now = StepGuard(FLOOR, timed(pair)), random.Random(3), 0
    for k in range(6000):
        pages = 400 + k % 12
        taken = round(pair(4, pages) * rng.uniform(0.95, 1.05))
        guard.observe(4, pages, now, now + taken)
        now += taken
        if k % FIT_EVERY_STEPS == 0:
            assert guard.predict_ns(128, 12_800) == pytest.approx(pair(128, 12_800), rel=0.1)
    assert guard.streams_believed() == 256


@pytest.mark.parametrize("most", [1, 8])
def test_beyond_the_largest_timed_batch_it_doubles_as_ever(most: int) -> None:
    guard = StepGuard(FLOOR, timed(pair, most))
    first = max(most, FIRST_STREAMS)
    assert guard.streams_believed() == first == Unit(guard, pair).offer(64)
    now = 0
    for _ in range(FIT_EVERY_STEPS):
        guard.observe(first, 100 * first, now, now + pair(first, 100 * first))
        now += pair(first, 100 * first)
    assert guard.streams_believed() == 2 * first


@pytest.mark.parametrize(
    "figures",
    [
        (),
        (StepTime(1, 2, 7_000_000),),
        (StepTime(1, 2, 1), StepTime(1, 2, 10**12)),
        (StepTime(4, 0, 9_000_000), StepTime(4, 0, 9_000_000)),
        (StepTime(1, 100, 20_000_000), StepTime(64, 100, 5_000_000)),
    ],
)
def test_few_or_strange_figures_make_no_cost_negative(figures: Sequence[StepTime]) -> None:
    guard = StepGuard(FLOOR, figures)
    for streams in (0, 1, 200):
        credit = guard.credit(streams, 100 * streams)
        assert min(credit.free_ns, credit.stream_ns, credit.page_ns) >= 0
    now = 0
    for k in range(200):
        guard.observe(1 + k % 8, 100, now, now + pair(1 + k % 8, 100))
        now += pair(1 + k % 8, 100)
    assert guard.predict_ns(8, 100) == pytest.approx(pair(8, 100), rel=0.02)


def test_decode_tells_lb_what_its_engine_timed_before_any_step() -> None:
    config = replace(DECODE_CONFIG, slots=64, floor_rows_per_s=FLOOR, step_times=timed(pair, 64))
    decode = DecodeDriver(config)
    guard = decode.machine.guard
    assert guard is not None
    assert guard.streams_believed() == 64
    assert guard.credit(0, 0).stream_ns == pytest.approx(20_000, rel=0.05)
    decode.say(StepDone(0, (), b"", (), 0, 10**7))
    assert guard.fits == 0, "a step without streams changes nothing"
