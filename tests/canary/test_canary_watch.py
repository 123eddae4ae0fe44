"""The run itself, between sides that follow a script."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duplet_canary import watch as watch_module
from duplet_canary.equivalence import MARGIN
from duplet_canary.journal import open_journal
from duplet_canary.plan import Pair
from duplet_canary.speaker import Ask
from duplet_canary.verdict import Verdict, judge
from duplet_canary.watch import Watch, observe
from duplet_core.errors import Reason, Unavailable
from duplet_runtime.metrics import Metrics
from tests.canary.canary_parts import ScriptedEar, ScriptedSpeaker, make_watch, plan


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "AFTER_FAILURE_S", 0)


def verdict(watch: Watch, *, rows_must_equal: bool = True) -> Verdict:
    return judge(watch.tally, MARGIN, rows_must_equal=rows_must_equal).verdict


def in_another_voice(ask: Ask) -> Ask:
    """What a unit would say that had the other voice's prefix in its pages."""
    prompt = ask.prompt.copy()
    prompt[0, 0] = 1 - prompt[0, 0]
    return replace(ask, prompt=prompt)


def with_a_wrong_letter(ask: Ask) -> Ask:
    prompt = ask.prompt.copy()
    prompt[3, 0] += 1
    return replace(ask, prompt=prompt)


async def test_alike_sides_are_equivalent_and_heard_once() -> None:
    ear = ScriptedEar()
    watch = make_watch(ScriptedSpeaker(), ear)
    await watch.run(200, at_once=4)
    assert verdict(watch) is Verdict.EQUIVALENT
    assert not watch.alarm
    assert ear.heard == 200
    assert watch.tally.all.rates.unit_errors == 0


async def test_another_voices_rows_raise_the_alarm_by_rows() -> None:
    unit = ScriptedSpeaker(lambda ask: in_another_voice(ask) if ask.seed == 30 else ask)
    watch = make_watch(unit, ScriptedEar())
    await watch.run(200, at_once=4)
    assert watch.alarm == "rows unequal in 1 of 200 pairs"
    assert verdict(watch) is Verdict.DIFFERENT


async def test_another_voices_rows_raise_the_alarm_by_ear() -> None:
    """Rows may differ here, and the words are right."""
    unit = ScriptedSpeaker(lambda ask: in_another_voice(ask) if ask.seed % 3 == 0 else ask)
    watch = make_watch(unit, ScriptedEar(), other_seeds=True)
    await watch.run(200, at_once=4)
    assert "sound like another voice" in watch.alarm
    assert watch.tally.all.rates.unit_errors == 0


async def test_a_wrong_word_is_heard() -> None:
    ear = ScriptedEar()
    watch = make_watch(ScriptedSpeaker(with_a_wrong_letter), ear, other_seeds=True)
    await watch.run(60, at_once=4)
    assert watch.tally.all.rates.unit_errors == 60
    assert watch.tally.all.rates.monolith_errors == 0
    assert "error rates differ" in watch.alarm
    assert verdict(watch, rows_must_equal=False) is Verdict.DIFFERENT
    assert ear.heard == 120


async def test_without_an_ear_rows_are_compared() -> None:
    watch = make_watch(ScriptedSpeaker(with_a_wrong_letter))
    await watch.run(10, at_once=3)
    assert watch.tally.all.unequal == 10
    assert watch.tally.all.rates.difference() is None


async def test_the_same_seed_goes_to_both_sides_and_another_where_asked() -> None:
    for other_seeds in (False, True):
        monolith, unit = ScriptedSpeaker(), ScriptedSpeaker()
        watch = make_watch(unit, monolith=monolith, other_seeds=other_seeds)
        await watch.run(20, at_once=1)
        same = [a.seed == b.seed for a, b in zip(monolith.asked, unit.asked, strict=True)]
        assert all(same) is not other_seeds
        prompts = zip(monolith.asked, unit.asked, strict=True)
        assert all(np.array_equal(a.prompt, b.prompt) for a, b in prompts)


async def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "canary.jsonl"
    first, second = ScriptedSpeaker(), ScriptedSpeaker()
    with open_journal(path, plan()) as (journal, done):
        watch = make_watch(first, ScriptedEar(), journal=journal, done=done)
        await watch.run(150, at_once=4)
        assert verdict(watch) is Verdict.NOT_ENOUGH_PAIRS
    with open_journal(path, plan()) as (journal, done):
        watch = make_watch(second, ScriptedEar(), journal=journal, done=done)
        assert watch.tally.pairs == 150
        await watch.run(200, at_once=4)
    assert len(first.asked) == 150
    assert len(second.asked) == 50
    assert not {ask.seed for ask in first.asked} & {ask.seed for ask in second.asked}
    assert verdict(watch) is Verdict.EQUIVALENT
    with open_journal(path, plan()) as (_, done):
        assert sorted(pair.number for pair in done) == list(range(200))


async def test_an_alarm_of_the_log_is_still_one(tmp_path: Path) -> None:
    path = tmp_path / "canary.jsonl"
    with open_journal(path, plan()) as (journal, done):
        watch = make_watch(ScriptedSpeaker(with_a_wrong_letter), journal=journal, done=done)
        await watch.run(1, at_once=1)
    with open_journal(path, plan()) as (journal, done):
        assert make_watch(ScriptedSpeaker(), journal=journal, done=done).alarm


async def test_an_endless_run_ends_when_told() -> None:
    seen: list[Pair] = []

    def stop_at_ten(pair: Pair) -> None:
        seen.append(pair)
        if len(seen) == 10:
            watch.stop()

    watch = make_watch(ScriptedSpeaker(), on_pair=stop_at_ten)
    async with asyncio.timeout(30):
        await watch.run(0, at_once=3)
    assert 10 <= len(seen) <= 15


async def test_no_more_pairs_than_asked_are_spoken_at_once() -> None:
    class Counting(ScriptedSpeaker):
        now = most = 0

        async def say(self, ask: Ask):  # type: ignore[no-untyped-def]
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return await super().say(ask)

    unit = Counting()
    await make_watch(unit).run(40, at_once=5)
    assert unit.most == 5


async def test_failures_are_counted_and_not_heard() -> None:
    unit = ScriptedSpeaker(lambda ask: "KV_MISMATCH" if ask.seed % 5 == 0 else ask)
    ear = ScriptedEar()
    watch = make_watch(unit, ear)
    await watch.run(50, at_once=4)
    assert watch.tally.sides["unit"].failures["KV_MISMATCH"] == 10
    assert watch.tally.all.answered == 40
    assert ear.heard == 40
    assert watch.alarm.startswith("the unit failed 10 of 50 requests")


async def test_the_gauges_tell_the_run() -> None:
    metrics = Metrics("canary")
    watch = make_watch(ScriptedSpeaker(with_a_wrong_letter), ScriptedEar())
    observe(watch, metrics)

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"duplet_canary_{name}")

    assert value("alarm") == 0
    assert value("pairs") == 0
    assert str(value("difference_points")) == "nan"
    await watch.run(30, at_once=2)
    assert value("alarm") == 1
    assert value("pairs") == value("answered_pairs") == value("unequal_pairs") == 30
    assert value("monolith_error_rate") == 0
    wrong, low, high = (value(f"difference{end}_points") for end in ("", "_low", "_high"))
    assert wrong is not None and low is not None and high is not None
    assert 0 < low < wrong < high


async def test_what_ends_a_run_is_told_as_itself() -> None:
    def fail(_pair: Pair) -> None:
        raise Unavailable(Reason.CANCELLED, "log: No space left on device")

    watch = make_watch(ScriptedSpeaker(), on_pair=fail)
    with pytest.raises(Unavailable, match="No space left"):
        await watch.run(10, at_once=2)
