"""Every verdict and every alarm."""

from __future__ import annotations

import random

import pytest

from duplet_canary.equivalence import MARGIN
from duplet_canary.report import describe, to_fields
from duplet_canary.tally import Tally
from duplet_canary.verdict import ENOUGH_EQUAL_PAIRS, Judgement, Verdict, find_alarm, judge
from tests.canary.canary_parts import pair, side, tally_of


def by_ear(tally: Tally) -> Judgement:
    return judge(tally, MARGIN, rows_must_equal=False)


def by_rows(tally: Tally) -> Judgement:
    return judge(tally, MARGIN, rows_must_equal=True)


def heard_pairs(count: int, unit_share: float = 0.07, seed: int = 1) -> Tally:
    """Pairs of 40 phonemes of which the monolith gets 7 % wrong, each at random."""
    draw = random.Random(seed)

    def wrong(share: float) -> int:
        return sum(draw.random() < share for _ in range(40))

    return tally_of(pair(n, side(wrong(0.07)), side(wrong(unit_share))) for n in range(count))


def test_equal_rows_in_enough_pairs_are_equivalent() -> None:
    tally = tally_of(pair(n, side(3), side(3), equal=True) for n in range(ENOUGH_EQUAL_PAIRS))
    found = by_rows(tally)
    assert str(found) == "equivalent (rows equal in 200 of 200 pairs)"


def test_equal_rows_in_few_pairs_are_not_enough() -> None:
    tally = tally_of(pair(n, side(3), side(3), equal=True) for n in range(ENOUGH_EQUAL_PAIRS - 1))
    assert by_rows(tally).verdict is Verdict.NOT_ENOUGH_PAIRS
    assert by_rows(Tally()).verdict is Verdict.NOT_ENOUGH_PAIRS


def test_one_unequal_pair_in_a_thousand_is_different_where_rows_must_be_equal() -> None:
    tally = tally_of(pair(n, side(3), side(3), equal=n != 800) for n in range(1_000))
    found = by_rows(tally)
    assert found == Judgement(Verdict.DIFFERENT, "rows unequal in 1 of 1000 pairs")


def test_without_ears_unequal_rows_say_nothing() -> None:
    tally = tally_of(
        pair(n, side(None, ""), side(None, ""), equal=False, reference=0) for n in range(500)
    )
    found = by_ear(tally)
    assert found.verdict is Verdict.NOT_ENOUGH_PAIRS
    assert "nobody listened" in found.why


def test_two_alike_sides_are_equivalent_with_enough_pairs() -> None:
    found = by_ear(heard_pairs(3_000))
    assert found.verdict is Verdict.EQUIVALENT
    assert "power 0.9" in found.why or "power 1.0" in found.why


def test_two_alike_sides_are_not_equivalent_by_luck() -> None:
    """An interval inside the margin is not enough where most intervals would not be."""
    lucky = 0
    for seed in range(60):
        tally = heard_pairs(800, seed=seed)
        found = tally.all.rates.difference()
        assert found is not None
        assert found.power() < 0.5
        lucky += found.is_within()
        assert by_ear(tally).verdict is not Verdict.EQUIVALENT
    assert lucky > 0


def test_a_worse_unit_is_different() -> None:
    found = by_ear(heard_pairs(1_000, unit_share=0.09))
    assert found.verdict is Verdict.DIFFERENT
    assert "points" in found.why


def test_a_better_unit_is_different_too() -> None:
    assert by_ear(heard_pairs(1_000, unit_share=0.05)).verdict is Verdict.DIFFERENT


def test_a_small_sure_difference_is_equivalent() -> None:
    """One phoneme in 400 more, in every tenth pair: certain, and inside the margin."""
    tally = tally_of(pair(n, side(2), side(2 + (n % 10 == 0))) for n in range(2_000))
    found = tally.all.rates.difference()
    assert found is not None and found.excludes_zero()
    assert by_ear(tally).verdict is Verdict.EQUIVALENT


def test_a_doubtful_run_says_how_many_pairs_it_needs() -> None:
    found = by_ear(heard_pairs(100))
    assert found.verdict is Verdict.NOT_ENOUGH_PAIRS
    needed = int(found.why.split(" would have ")[0].split()[-1])
    assert 1_000 < needed < 3_000


@pytest.mark.parametrize("wrong", [0, 3])
def test_sides_that_never_scatter_are_not_called_equivalent_by_ear(wrong: int) -> None:
    tally = tally_of(pair(n, side(wrong), side(wrong)) for n in range(100))
    assert by_ear(tally).verdict is Verdict.NOT_ENOUGH_PAIRS


def test_sides_that_nobody_understands_are_not_called_equivalent() -> None:
    draw = random.Random(2)
    tally = tally_of(
        pair(n, side(30 + draw.randrange(2)), side(30 + draw.randrange(2))) for n in range(3_000)
    )
    found = tally.all.rates.difference()
    assert found is not None and found.is_within() and found.power() > 0.9
    assert by_ear(tally).verdict is Verdict.NOT_ENOUGH_PAIRS
    assert "of the monolith is misheard" in by_ear(tally).why


def test_a_unit_that_fails_is_different() -> None:
    tally = tally_of(
        pair(n, side(), side(None, error="KV_MISMATCH" if n % 20 == 0 else "", voice=""))
        for n in range(200)
    )
    found = by_ear(tally)
    assert found.verdict is Verdict.DIFFERENT
    assert "10 KV_MISMATCH" in found.why


def test_failures_on_both_sides_and_full_units_raise_no_alarm() -> None:
    away = [
        pair(n, side(None, error="UNAVAILABLE"), side(None, error="UNAVAILABLE")) for n in range(50)
    ]
    full = [pair(n, side(), side(None, error="OVERLOADED")) for n in range(50, 100)]
    tally = tally_of([*away, *full])
    assert find_alarm(tally, MARGIN, rows_must_equal=True) == ""
    assert tally.sides["unit"].not_now == 50
    assert tally.all.answered == 0


def test_another_voice_with_the_right_words_is_different() -> None:
    """What error rates cannot hear."""
    tally = tally_of(
        pair(n, side(2), side(2, voice="cedar" if n % 4 == 0 else "amber")) for n in range(200)
    )
    found = by_ear(tally)
    assert found.verdict is Verdict.DIFFERENT
    assert found.why == "50 answers of the unit sound like another voice, 0 of the monolith"


def test_voices_mistaken_on_both_sides_raise_no_alarm() -> None:
    draw = random.Random(4)

    def voice() -> str:
        return "cedar" if draw.random() < 0.02 else "amber"

    tally = tally_of(pair(n, side(2, voice()), side(2, voice())) for n in range(400))
    assert find_alarm(tally, MARGIN, rows_must_equal=False) == ""


def test_the_alarm_asks_for_more_than_the_verdict() -> None:
    """It looks after every pair: of 40 runs of alike sides none may raise it on the way."""
    for seed in range(40):
        draw = random.Random(seed)
        tally = Tally()
        for n in range(150):
            wrong = [sum(draw.random() < 0.07 for _ in range(40)) for _ in range(2)]
            tally.add(pair(n, side(wrong[0]), side(wrong[1])))
            if n % 10 == 0:
                assert find_alarm(tally, MARGIN, rows_must_equal=False) == "", seed


def test_the_report_has_groups_times_and_the_verdict_last() -> None:
    tally = heard_pairs(120)
    found = by_ear(tally)
    lines = describe(tally, found, MARGIN, rows_must_equal=False).splitlines()
    assert lines[-1] == str(found)
    assert any(line.strip().startswith("voice amber") for line in lines)
    assert any("TTFT 100.0, 100.0 ms" in line for line in lines)
    fields = to_fields(tally, found, MARGIN, rows_must_equal=False)
    assert fields["verdict"] == "not enough pairs"
    assert fields["groups"]["short"]["answered"] == 120
    assert fields["heard"]["utterances"] == 120
    assert fields["sides"]["unit"]["rows"] == 3_600
    assert fields["heard"]["power"] < 0.8


def test_the_report_of_nothing() -> None:
    text = describe(Tally(), by_rows(Tally()), MARGIN, rows_must_equal=True)
    assert text.splitlines()[0] == "0 pairs, 0 answered by both sides"
    assert to_fields(Tally(), by_rows(Tally()), MARGIN, rows_must_equal=True)["heard"] is None
