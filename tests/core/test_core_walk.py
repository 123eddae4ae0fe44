"""Whole requests through all four machines, also with a fault at every single point."""

from __future__ import annotations

from typing import Any

import pytest

from duplet_core.effects import Cancel, Submit
from duplet_core.errors import Reason
from duplet_core.ids import Role, TransferId
from duplet_core.timeline import STAMPED
from tests.core.loop import DIALED, Loop
from tests.core.samples import MAX_ROWS, ROW, SAMPLING, SECOND

LATE = pytest.mark.parametrize("late_copies", [False, True], ids=["copies-soon", "copies-late"])
MOST_STEPS = 400


def ask(loop: Loop, n: int, rows: int = 10) -> TransferId:
    """Submit request n; its rows differ from every other request's."""
    transfer = TransferId(f"t{n}")
    prompt = n.to_bytes(4, "little") * (2 * rows)
    pages = -(-(rows + MAX_ROWS) // 4)
    deadline_ns = loop.now + 30 * SECOND
    asked = (f"r{n}", transfer, prompt, rows, MAX_ROWS, pages, SAMPLING, deadline_ns)
    loop.feed(Role.LB, Submit(*asked))
    return transfer


def assert_served(loop: Loop, transfer: TransferId) -> None:
    ended = loop.ended[transfer]
    assert ended.reason is None, ended
    assert loop.rows[transfer] == MAX_ROWS
    assert ended.finished is not None
    assert ended.finished.output_rows == MAX_ROWS
    assert not ended.finished.stop


def mismatches(loop: Loop) -> int:
    decode: Any = loop.machines[Role.DECODE]
    mismatched: int = decode.transfers.kv_mismatches
    return mismatched


@LATE
def test_one_request_from_prompt_to_rows_and_every_page_is_free(late_copies: bool) -> None:
    loop = Loop(late_copies=late_copies)
    assert loop.leftovers() == []
    transfer = ask(loop, 1)
    loop.rest()
    assert_served(loop, transfer)
    finished = loop.ended[transfer].finished
    assert finished is not None
    assert len(finished.stamps) == len(STAMPED)
    assert finished.admitted_ns > 0
    assert len(finished.step_gaps_ns) == MAX_ROWS - 2
    assert loop.leftovers() == []


@LATE
def test_many_requests_share_the_unit_and_queue_for_it(late_copies: bool) -> None:
    loop = Loop(late_copies=late_copies)
    # Sixteen pages a pool; each needs four to seven in decode, and there are three slots.
    asked = [ask(loop, n, rows=4 + n % 5 * 4) for n in range(1, 13)]
    loop.run()
    for transfer in asked:
        assert_served(loop, transfer)
    assert list(loop.ended) != [] and mismatches(loop) == 0
    assert loop.leftovers() == []


def test_the_same_request_id_serves_again_and_again() -> None:
    loop = Loop()
    for n in range(1, 6):
        prompt = ROW * 10
        asked = Submit(
            "same", TransferId(f"t{n}"), prompt, 10, MAX_ROWS, 4, SAMPLING, loop.now + SECOND
        )
        loop.feed(Role.LB, asked)
        loop.rest()
        assert_served(loop, TransferId(f"t{n}"))
    assert loop.leftovers() == []


def busy(late_copies: bool) -> tuple[Loop, list[TransferId]]:
    """Three requests just submitted; the third waits for pages."""
    loop = Loop(late_copies=late_copies)
    return loop, [ask(loop, n, rows=n * 6) for n in (1, 2, 3)]


def steps_of_a_walk(late_copies: bool) -> int:
    loop, _ = busy(late_copies)
    steps = 0
    while loop.step():
        steps += 1
    assert 60 < steps < MOST_STEPS
    return steps


def assert_recovers(loop: Loop, asked: list[TransferId]) -> None:
    """Every request has one end, every page is free, no wrong KV was seen, and it serves again."""
    loop.dial()
    loop.rest()
    loop.dial()
    loop.rest()
    assert set(asked) <= set(loop.ended)
    late = [e for e in loop.ended.values() if e.reason is Reason.DEADLINE]
    assert late == [], "the fault was known, and the client was left to its deadline"
    assert loop.leftovers() == []
    assert mismatches(loop) == 0
    again = ask(loop, 9)
    loop.rest()
    assert_served(loop, again)
    assert loop.leftovers() == []


@LATE
def test_a_cancel_at_any_point_frees_every_page(late_copies: bool) -> None:
    for point in range(steps_of_a_walk(late_copies)):
        loop, asked = busy(late_copies)
        for _ in range(point):
            loop.step()
        for transfer in asked[:2]:
            loop.feed(Role.LB, Cancel(transfer, Reason.CANCELLED))
        assert asked[0] in loop.ended and asked[1] in loop.ended, "the client hears at once"
        assert_recovers(loop, asked)


@LATE
@pytest.mark.parametrize("pair", sorted(DIALED), ids="-".join)
def test_a_broken_stream_at_any_point_frees_every_page(
    pair: tuple[Role, Role], late_copies: bool
) -> None:
    for point in range(steps_of_a_walk(late_copies)):
        loop, asked = busy(late_copies)
        for _ in range(point):
            loop.step()
        loop.cut(*pair)
        assert_recovers(loop, asked)


@LATE
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.KVPROXY])
def test_a_killed_and_restarted_part_at_any_point_frees_every_page(
    role: Role, late_copies: bool
) -> None:
    for point in range(steps_of_a_walk(late_copies)):
        loop, asked = busy(late_copies)
        for _ in range(point):
            loop.step()
        loop.kill(role)
        loop.run()
        loop.start(role)
        assert_recovers(loop, asked)


@LATE
def test_a_killed_and_restarted_lb_at_any_point_frees_every_page(late_copies: bool) -> None:
    for point in range(steps_of_a_walk(late_copies)):
        loop, _ = busy(late_copies)
        for _ in range(point):
            loop.step()
        loop.kill(Role.LB)
        loop.run()
        loop.start(Role.LB)
        assert_recovers(loop, [])
