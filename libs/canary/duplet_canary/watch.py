"""Runs a plan: pairs are sent, heard, written down and added up, until something ends it."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duplet_canary.ear import Ear, Heard
from duplet_canary.equivalence import Difference
from duplet_canary.journal import Journal
from duplet_canary.plan import Job, Jobs, Pair, Side
from duplet_canary.speaker import Ask, Speaker, Spoken
from duplet_canary.tally import Tally
from duplet_canary.verdict import find_alarm
from duplet_runtime.metrics import Metrics

AFTER_FAILURE_S = 1.0
"""Pause of a loop whose pair failed: a side that is away is not stormed."""

MakePrompt = Callable[[str, str], NDArray[np.int32]]
"""From text and voice to prompt rows."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Who speaks and who listens. Owned by whoever made them."""

    monolith: Speaker
    unit: Speaker
    make_prompt: MakePrompt
    ear: Ear | None
    """None: rows are compared and nothing is heard."""


class Watch:
    """Adds pairs to a tally and a journal; says when an alarm begins."""

    def __init__(
        self,
        sides: Sides,
        jobs: Jobs,
        journal: Journal,
        done: Iterable[Pair],
        *,
        margin: float,
        rows_must_equal: bool,
        on_pair: Callable[[Pair], None],
    ) -> None:
        """`done`: pairs of the journal, which are counted and not sent again. `on_pair` is called
        after each new pair."""
        self.tally = Tally()
        self.alarm = ""
        """Why somebody should look; empty while all is well."""
        self.difference: Difference | None = None
        """By ear, over all pairs so far."""
        self._sides = sides
        self._jobs = jobs
        self._journal = journal
        self._margin = margin
        self._rows_must_equal = rows_must_equal
        self._on_pair = on_pair
        self._stopping = False
        self._done = set()
        for pair in done:
            self._done.add(pair.number)
            self.tally.add(pair)
        self._judge()

    def stop(self) -> None:
        """Send nothing new; `run` returns when what is on its way has been heard."""
        self._stopping = True

    async def run(self, pairs: int, at_once: int) -> None:
        """Work until there are `pairs` in all, those of the journal included (0: no end), or
        until `stop`. Twice `at_once` pairs are under way: so many speak, the others are heard.
        """
        numbers = itertools.count() if pairs == 0 else iter(range(pairs))
        waiting = (number for number in numbers if number not in self._done)
        speaking = asyncio.Semaphore(at_once)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(2 * at_once):
                    group.create_task(self._work(waiting, speaking))
        except ExceptionGroup as failed:
            # The first one ended the others.
            raise failed.exceptions[0] from failed

    async def _work(self, waiting: Iterator[int], speaking: asyncio.Semaphore) -> None:
        while not self._stopping:
            number = next(waiting, None)
            if number is None:
                return
            pair = await self._make_pair(self._jobs.job(number), speaking)
            self._journal.add(pair)
            self.tally.add(pair)
            self._judge()
            self._on_pair(pair)
            if not pair.answered and not self._stopping:
                await asyncio.sleep(AFTER_FAILURE_S)

    async def _make_pair(self, job: Job, speaking: asyncio.Semaphore) -> Pair:
        prompt = self._sides.make_prompt(job.utterance.text, job.voice)
        async with speaking:
            monolith, unit = await asyncio.gather(
                self._sides.monolith.say(Ask(prompt, job.voice, job.monolith_seed, job.max_rows)),
                self._sides.unit.say(Ask(prompt, job.voice, job.unit_seed, job.max_rows)),
            )
        heard = await self._hear(job, monolith, unit)
        return Pair(
            number=job.number,
            utterance=job.utterance.number,
            length=job.utterance.length,
            voice=job.voice,
            reference=0 if heard is None else heard[0].length,
            equal=monolith.says_the_same_as(unit),
            monolith=Side.of(monolith, None if heard is None else heard[0]),
            unit=Side.of(unit, None if heard is None else heard[1]),
        )

    async def _hear(self, job: Job, monolith: Spoken, unit: Spoken) -> tuple[Heard, Heard] | None:
        """Both sides by ear; the same rows are heard once, for they sound the same."""
        if self._sides.ear is None or monolith.error or unit.error:
            return None
        first = await self._sides.ear.hear(monolith.rows, job.utterance.text)
        if np.array_equal(monolith.rows, unit.rows):
            return first, first
        return first, await self._sides.ear.hear(unit.rows, job.utterance.text)

    def _judge(self) -> None:
        self.difference = self.tally.all.rates.difference()
        self.alarm = find_alarm(self.tally, self._margin, rows_must_equal=self._rows_must_equal)


def observe(watch: Watch, metrics: Metrics) -> None:
    """Add the gauges of a run; NaN while a value is not known."""
    sums = watch.tally

    def rate(side: str) -> float:
        found = watch.difference
        if found is None:
            return math.nan
        return found.monolith_rate if side == "monolith" else found.unit_rate

    def points(end: int) -> float:
        found = watch.difference
        return math.nan if found is None else 100 * found.interval()[end]

    def mean() -> float:
        found = watch.difference
        return math.nan if found is None else 100 * found.mean

    metrics.gauge("pairs", "Pairs that were sent to both sides", lambda: sums.pairs)
    metrics.gauge("answered_pairs", "Pairs that both sides answered", lambda: sums.all.answered)
    metrics.gauge("unequal_pairs", "Pairs whose rows differ", lambda: sums.all.unequal)
    metrics.gauge("monolith_error_rate", "Of the monolith, by ear", lambda: rate("monolith"))
    metrics.gauge("unit_error_rate", "Of the unit, by ear", lambda: rate("unit"))
    metrics.gauge("difference_points", "Unit's error rate minus monolith's, percent", mean)
    end = "end of the difference's 95 % interval"
    metrics.gauge("difference_low_points", f"Low {end}", lambda: points(0))
    metrics.gauge("difference_high_points", f"High {end}", lambda: points(1))
    metrics.gauge("alarm", "1 while somebody should look", lambda: float(bool(watch.alarm)))
