"""lb's machine: credit, order, waiting, ends, ids that return, peers that come and go."""

from __future__ import annotations

import pytest

from duplet_core.effects import (
    Cancel,
    Close,
    Drain,
    Drained,
    Effect,
    Ended,
    Rows,
    Send,
    SetHealth,
    SpecKnown,
)
from duplet_core.errors import Reason
from duplet_core.front_state import FrontConfig, State
from duplet_core.ids import Role, TransferId
from duplet_core.messages import (
    Accepted,
    Admit,
    Credit,
    End,
    Failed,
    Finished,
    Grant,
    Handed,
    Prefill,
    Refused,
    Refusing,
    StepRows,
    StoppedAtOnce,
)
from tests.core.drivers import FrontDriver
from tests.core.samples import (
    MAX_ROWS,
    PREFILL2,
    PROMPT_ROWS,
    ROW,
    SAMPLING,
    SECOND,
    T1,
    T2,
    T3,
    T4,
    admitted,
    counted,
    ended,
    pick,
    sent,
    submit,
)

ROW2 = b"\x09\x00\x00\x00\x08\x00\x00\x00"


def streaming(front: FrontDriver, *requests: tuple[str, TransferId]) -> None:
    """Submit the requests; decode accepts them as streams 1, 2, …"""
    for stream, (request_id, transfer) in enumerate(requests, start=1):
        front.feed(submit(request_id, transfer))
        front.hear(Role.DECODE, Accepted(request_id, transfer, stream, ROW))


# --- admission ------------------------------------------------------------------


def test_admit_and_prefill_leave_at_once_and_in_this_order() -> None:
    effects = FrontDriver().feed(submit())
    sends = [(e.peer, e.message) for e in pick(effects, Send)]
    assert sends == [
        (Role.DECODE, Admit("r1", T1, PROMPT_ROWS, MAX_ROWS, SAMPLING)),
        (Role.PREFILL, Prefill("r1", T1, ROW * PROMPT_ROWS, PROMPT_ROWS, SAMPLING)),
    ]
    assert admitted(effects) == [T1]


def test_admits_under_way_are_counted_against_the_told_pages() -> None:
    front = FrontDriver()  # 16 pages, 4 slots
    assert admitted(front.feed(submit("a", T1, pages=10))) == [T1]
    assert admitted(front.feed(submit("b", T2, pages=7))) == []
    assert front.machine.requests[T2].state is State.QUEUED
    # Decode had not seen the Admit when it told this: nothing changes.
    assert admitted(front.hear(Role.DECODE, Credit(16, 16, 4, 0))) == []
    # It has seen it, and one page more came free.
    assert admitted(front.hear(Role.DECODE, Credit(16, 7, 3, 1))) == [T2]


def test_admits_under_way_are_counted_against_the_told_slots() -> None:
    front = FrontDriver()
    front.hear(Role.DECODE, Credit(16, 16, 2, 0))
    assert admitted(front.feed(submit("a", T1, pages=1))) == [T1]
    assert admitted(front.feed(submit("b", T2, pages=1))) == [T2]
    assert admitted(front.feed(submit("c", T3, pages=1))) == []
    # One of two Admits is in these figures: one slot is left, the other Admit will take it.
    assert admitted(front.hear(Role.DECODE, Credit(16, 15, 1, 1))) == []
    assert admitted(front.hear(Role.DECODE, Credit(16, 14, 1, 2))) == [T3]


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    front = FrontDriver()
    front.hear(Role.DECODE, Credit(16, 4, 4, 0))
    assert admitted(front.feed(submit("big", T1, pages=8))) == []
    assert admitted(front.feed(submit("small", T2, pages=1))) == [], "nobody overtakes"
    effects = front.hear(Role.DECODE, Credit(16, 9, 4, 0))
    assert admitted(effects) == [T1, T2]
    order = [(e.peer, type(e.message).__name__) for e in pick(effects, Send)]
    assert order == [(Role.DECODE, "Admit"), (Role.PREFILL, "Prefill")] * 2


def test_a_queued_request_is_refused_when_its_wait_is_over() -> None:
    front = FrontDriver(FrontConfig(queue_wait_ns=500))
    front.hear(Role.DECODE, Credit(16, 16, 0, 0))
    front.feed(submit())
    assert front.machine.next_timer() == front.now + 500
    assert ended(front.tick(499)) == []
    effects = front.tick(1)
    assert ended(effects) == [(T1, Reason.OVERLOADED)]
    assert sent(effects, Role.DECODE) == sent(effects, Role.PREFILL) == []
    assert counted(effects, "requests_overloaded") == 1
    assert front.machine.next_timer() is None


@pytest.mark.parametrize("why", [Reason.DRAINING, Reason.QUARANTINE, Reason.WRITER_LOST])
def test_while_decode_refuses_requests_wait_and_are_told_its_reason(why: Reason) -> None:
    front = FrontDriver(FrontConfig(queue_wait_ns=500))
    front.hear(Role.DECODE, Credit(16, 16, 4, 0, why))
    assert admitted(front.feed(submit())) == []
    assert ended(front.tick(500)) == [(T1, why)]
    front.feed(submit("r2", T2))
    assert admitted(front.hear(Role.DECODE, Credit(16, 16, 4, 0))) == [T2]


def test_the_queue_is_bounded() -> None:
    front = FrontDriver(FrontConfig(queue_limit=2))
    front.hear(Role.DECODE, Credit(16, 16, 0, 0))
    for request_id, transfer in (("a", T1), ("b", T2)):
        assert ended(front.feed(submit(request_id, transfer))) == []
    assert ended(front.feed(submit("c", T3))) == [(T3, Reason.OVERLOADED)]


def test_what_can_never_fit_is_refused_at_once() -> None:
    front = FrontDriver()
    assert ended(front.feed(submit(pages=17))) == [(T1, Reason.PROMPT_TOO_LONG)]


def test_a_live_id_is_refused_and_its_owner_is_not_disturbed() -> None:
    front = FrontDriver()
    front.feed(submit("r1", T1))
    effects = front.feed(submit("r1", T2))
    assert ended(effects) == [(T2, Reason.DUPLICATE_REQUEST)]
    assert sent(effects, Role.DECODE) == []
    assert front.machine.requests[T1].state is State.PENDING
    front.feed(Cancel(T1, Reason.CANCELLED))
    assert admitted(front.feed(submit("r1", T3))) == [T3], "after the end the id may return"


def test_credit_for_admits_that_were_never_sent_ends_decodes_stream() -> None:
    front = FrontDriver()
    effects = front.hear(Role.DECODE, Credit(16, 16, 4, 1))
    assert [c.reason for c in pick(effects, Close)] == [Reason.PEER_PROTOCOL]
    assert not front.machine.ready


# --- ends -----------------------------------------------------------------------


def test_the_deadline_ends_a_request_on_both_sides() -> None:
    front = FrontDriver()
    front.feed(submit(deadline_ns=5_000))
    assert front.machine.next_timer() == 5_000
    front.now = 4_999
    assert ended(front.tick()) == []
    effects = front.tick(1)
    assert ended(effects) == [(T1, Reason.DEADLINE)]
    end = End("r1", T1, Reason.DEADLINE)
    assert sent(effects, Role.DECODE) == sent(effects, Role.PREFILL) == [end]


def test_cancel_of_an_unknown_request_is_nothing() -> None:
    assert FrontDriver().feed(Cancel(T4, Reason.CANCELLED)) == []


def test_a_cancelled_request_makes_room_for_the_queue() -> None:
    front = FrontDriver()
    front.hear(Role.DECODE, Credit(16, 8, 4, 0))
    front.feed(submit("blocks", T1, pages=9))
    assert admitted(front.feed(submit("next", T2, pages=3))) == []
    assert admitted(front.feed(Cancel(T1, Reason.CANCELLED))) == [T2]


def test_an_end_is_told_also_to_the_side_that_reported_it() -> None:
    for peer, message in (
        (Role.DECODE, Refused("r1", T1, Reason.OVERLOADED, "")),
        (Role.DECODE, Failed("r1", T1, Reason.KV_MISMATCH, "")),
        (Role.PREFILL, Failed("r1", T1, Reason.ENGINE_FAILED, "")),
        (Role.PREFILL, StoppedAtOnce("r1", T1, (1, 2, 3))),
    ):
        front = FrontDriver()
        front.feed(submit())
        effects = front.hear(peer, message)
        reason = getattr(message, "reason", None)
        assert sent(effects, Role.PREFILL) == sent(effects, Role.DECODE) == [End("r1", T1, reason)]
        assert len(pick(effects, Ended)) == 1


def test_a_stream_that_decode_accepted_does_not_need_prefill_any_more() -> None:
    front = FrontDriver()
    streaming(front, ("r1", T1))
    assert front.hear(Role.PREFILL, Failed("r1", T1, Reason.WRITER_LOST, "")) == []
    assert ended(front.hear(Role.DECODE, Failed("r1", T1, Reason.ENGINE_FAILED, ""))) == [
        (T1, Reason.ENGINE_FAILED)
    ]


def test_a_refused_request_gives_its_credit_back_with_decodes_word() -> None:
    front = FrontDriver()
    front.feed(submit("a", T1, pages=16))
    front.hear(Role.DECODE, Refused("a", T1, Reason.OVERLOADED, ""))
    assert admitted(front.feed(submit("b", T2, pages=1))) == [], "still counted"
    assert admitted(front.hear(Role.DECODE, Credit(16, 16, 4, 1))) == [T2]


def test_no_peer_can_speak_of_a_request_that_waits() -> None:
    front = FrontDriver()
    front.hear(Role.DECODE, Credit(16, 16, 0, 0))
    front.feed(submit())
    for peer, message in (
        (Role.DECODE, Failed("r1", T1, Reason.KV_MISMATCH, "")),
        (Role.DECODE, Accepted("r1", T1, 1, ROW)),
        (Role.PREFILL, StoppedAtOnce("r1", T1, ())),
    ):
        assert front.hear(peer, message) == []
    assert front.machine.requests[T1].state is State.QUEUED


# --- an id that returns -----------------------------------------------------------


def test_late_messages_about_an_earlier_use_are_not_taken_for_the_later_one() -> None:
    front = FrontDriver()
    streaming(front, ("r1", T1))
    front.feed(Cancel(T1, Reason.CANCELLED))
    front.feed(submit("r1", T2))
    for peer, late in (
        (Role.DECODE, Refused("r1", T1, Reason.OVERLOADED, "")),
        (Role.DECODE, Failed("r1", T1, Reason.KV_MISMATCH, "")),
        (Role.DECODE, Accepted("r1", T1, 1, ROW)),
        (Role.DECODE, Finished("r1", T1, True, 3, 1, ())),
        (Role.DECODE, StepRows(4, (1,), ROW)),
        (Role.PREFILL, Failed("r1", T1, Reason.ENGINE_FAILED, "")),
        (Role.PREFILL, StoppedAtOnce("r1", T1, ())),
    ):
        assert front.hear(peer, late) == []
    assert front.machine.requests[T2].state is State.PENDING
    effects = front.hear(Role.DECODE, Accepted("r1", T2, 2, ROW2))
    assert pick(effects, Rows) == [Rows(T2, ROW2)]
    # The earlier stream's rows are nobody's, also now.
    effects = front.hear(Role.DECODE, StepRows(5, (1, 2), ROW + ROW2))
    assert pick(effects, Rows) == [Rows(T2, ROW2)]


# --- rows -------------------------------------------------------------------------


def test_a_steps_rows_go_to_their_streams() -> None:
    front = FrontDriver()
    streaming(front, ("a", T1), ("b", T2), ("c", T3))
    front.feed(Cancel(T2, Reason.CANCELLED))
    effects = front.hear(Role.DECODE, StepRows(1, (3, 2, 1), b"3333" + b"2222" + b"1111"))
    assert effects == [Rows(T3, b"3333"), Rows(T1, b"1111")]


def test_a_step_without_streams_breaks_the_protocol() -> None:
    effects = FrontDriver().hear(Role.DECODE, StepRows(1, (), b""))
    assert [c.reason for c in pick(effects, Close)] == [Reason.PEER_PROTOCOL]


def test_a_stream_id_that_is_in_use_breaks_the_protocol() -> None:
    # Taking it would give one client's rows to another.
    front = FrontDriver()
    streaming(front, ("a", T1))
    front.feed(submit("b", T2))
    effects = front.hear(Role.DECODE, Accepted("b", T2, 1, ROW2))
    assert [c.reason for c in pick(effects, Close)] == [Reason.PEER_PROTOCOL]
    assert pick(effects, Rows) == []
    assert ended(effects) == [(T1, Reason.DECODE_LOST), (T2, Reason.DECODE_LOST)]


def test_prefill_may_not_speak_for_decode() -> None:
    front = FrontDriver()
    for message in (Accepted("r1", T1, 1, ROW), Grant(T1, (0,), 1), StepRows(1, (1,), ROW)):
        effects = front.hear(Role.PREFILL, message)
        assert [c.reason for c in pick(effects, Close)] == [Reason.PEER_PROTOCOL]
        front.connect(Role.PREFILL)


# --- peers that come and go -------------------------------------------------------


def crowd() -> FrontDriver:
    """A stream, a pending request and a queued one."""
    front = FrontDriver()
    streaming(front, ("streams", T1))
    front.feed(submit("pending", T2))
    front.hear(Role.DECODE, Credit(16, 0, 0, 2))
    front.feed(submit("queued", T3))
    return front


def test_lost_decode_ends_every_request_and_tells_prefill() -> None:
    effects = crowd().lose(Role.DECODE)
    lost = Reason.DECODE_LOST
    assert ended(effects) == [(T1, lost), (T2, lost), (T3, lost)]
    assert sent(effects, Role.PREFILL) == [End("streams", T1, lost), End("pending", T2, lost)]
    assert sent(effects, Role.DECODE) == []


def test_lost_prefill_ends_what_decode_has_not_accepted() -> None:
    front = crowd()
    effects = front.lose(Role.PREFILL)
    lost = Reason.PREFILL_LOST
    assert ended(effects) == [(T2, lost), (T3, lost)]
    assert sent(effects, Role.DECODE) == [End("pending", T2, lost)]
    effects = front.hear(Role.DECODE, StepRows(9, (1,), ROW2))
    assert pick(effects, Rows) == [Rows(T1, ROW2)]


def test_lost_prefill_does_not_end_what_it_has_handed_over() -> None:
    front = crowd()
    front.hear(Role.PREFILL, Handed("pending", T2))
    effects = front.lose(Role.PREFILL)
    assert ended(effects) == [(T3, Reason.PREFILL_LOST)], "it was only queued"
    effects = front.hear(Role.DECODE, Accepted("pending", T2, 2, ROW))
    assert pick(effects, Rows) == [Rows(T2, ROW)]


def test_while_prefill_refuses_requests_wait_and_the_unit_says_why() -> None:
    front = FrontDriver()
    effects = front.hear(Role.PREFILL, Refusing(Reason.WRITER_LOST))
    (health,) = unit_health(effects)
    assert not health.ok
    assert health.detail == "prefill takes nothing new: WRITER_LOST"
    assert sent(front.feed(submit()), Role.PREFILL) == []
    effects = front.hear(Role.PREFILL, Refusing(None))
    assert [h.ok for h in unit_health(effects)] == [True]
    assert [type(m) for m in sent(effects, Role.PREFILL)] == [Prefill]
    front.lose(Role.PREFILL)
    effects = front.connect(Role.PREFILL, refusing=Reason.WRITER_LOST)
    assert [h.ok for h in unit_health(effects)] == [False], "its Hello says so too"


def test_a_request_that_waits_for_prefills_writer_is_told_its_reason() -> None:
    front = FrontDriver()
    front.hear(Role.PREFILL, Refusing(Reason.WRITER_LOST))
    front.feed(submit())
    effects = front.tick(front.machine.config.queue_wait_ns)
    assert ended(effects) == [(T1, Reason.WRITER_LOST)]


def unit_health(effects: list[Effect]) -> list[SetHealth]:
    return [e for e in pick(effects, SetHealth) if e.name == "unit"]


def test_not_ready_until_both_are_up_and_agree() -> None:
    front = FrontDriver(connected=False)
    assert ended(front.feed(submit())) == [(T1, Reason.NOT_READY)]
    effects = front.connect(Role.PREFILL)
    assert unit_health(effects) == [SetHealth("unit", False, "no stream to decode")]
    effects = front.connect(Role.DECODE, spec="another", credit=Credit(16, 16, 4, 0))
    assert pick(effects, SpecKnown) == []
    differ = "prefill and decode run different models: tiny and 'another'"
    assert unit_health(effects) == [SetHealth("unit", False, differ)]
    (refused,) = pick(front.feed(submit("r2", T2)), Ended)
    assert (refused.reason, refused.detail) == (Reason.NOT_READY, differ)
    front.lose(Role.PREFILL)
    effects = front.connect(Role.PREFILL, PREFILL2, spec="another")
    assert pick(effects, SpecKnown) == [SpecKnown("another")]
    assert unit_health(effects) == [SetHealth("unit", True, "")]
    assert admitted(front.feed(submit("r3", T3))) == [T3]


def test_a_new_stream_to_decode_starts_the_credit_anew() -> None:
    front = FrontDriver()
    front.feed(submit("a", T1, pages=16))
    front.lose(Role.DECODE)
    effects = front.connect(Role.DECODE, credit=Credit(16, 16, 4, 0))
    assert unit_health(effects)[-1].ok
    assert admitted(front.feed(submit("b", T2, pages=16))) == [T2]
    effects = front.hear(Role.DECODE, Credit(16, 0, 3, 2))
    assert [c.reason for c in pick(effects, Close)] == [Reason.PEER_PROTOCOL]


def test_drain_takes_nothing_new_and_ends_with_the_last_request() -> None:
    front = FrontDriver()
    streaming(front, ("a", T1))
    front.hear(Role.DECODE, Credit(16, 12, 0, 1))
    front.feed(submit("queued", T2))
    assert pick(front.feed(Drain()), Drained) == []
    assert ended(front.feed(submit("late", T3))) == [(T3, Reason.DRAINING)]
    # What was taken before is served.
    assert admitted(front.hear(Role.DECODE, Credit(16, 12, 3, 1))) == [T2]
    finished = Finished("a", T1, True, 3, 1, ())
    assert pick(front.hear(Role.DECODE, finished), Drained) == []
    effects = front.feed(Cancel(T2, Reason.CANCELLED))
    assert pick(effects, Drained) == [Drained()]
    assert pick(front.tick(), Drained) == [], "told once"


def test_drain_of_an_idle_lb_is_over_at_once() -> None:
    assert pick(FrontDriver().feed(Drain()), Drained) == [Drained()]


def test_next_timer_is_the_earliest_of_all() -> None:
    front = FrontDriver(FrontConfig(queue_wait_ns=10 * SECOND))
    assert front.machine.next_timer() is None
    front.feed(submit("a", T1, deadline_ns=9 * SECOND))
    front.feed(submit("b", T2, deadline_ns=7 * SECOND))
    front.hear(Role.DECODE, Credit(16, 0, 0, 2))
    front.feed(submit("c", T3, deadline_ns=8 * SECOND))
    front.feed(submit("d", T4, deadline_ns=90 * SECOND))
    assert front.machine.next_timer() == 7 * SECOND
    front.now = 8 * SECOND
    assert ended(front.tick()) == [(T2, Reason.DEADLINE), (T3, Reason.DEADLINE)]
    assert front.machine.next_timer() == 9 * SECOND


def test_the_end_of_a_wait_is_a_timer() -> None:
    """Nothing else may happen at lb for as long as a client would wait."""
    front = FrontDriver(FrontConfig(queue_wait_ns=500))
    front.hear(Role.DECODE, Credit(16, 0, 0, 0))
    front.feed(submit("a", T1))
    assert front.machine.next_timer() == front.now + 500
    assert ended(front.tick(500)) == [(T1, Reason.OVERLOADED)]


def test_a_unit_whose_decode_takes_nothing_new_is_not_ready_and_says_why() -> None:
    lb = FrontDriver()
    refused = lb.hear(Role.DECODE, Credit(16, 16, 4, 0, refusing=Reason.WRITER_LOST))
    assert [(h.name, h.ok) for h in pick(refused, SetHealth)] == [("unit", False)]
    assert "WRITER_LOST" in pick(refused, SetHealth)[0].detail
    full = lb.hear(Role.DECODE, Credit(16, 0, 0, 0))
    assert [(h.name, h.ok) for h in pick(full, SetHealth)] == [("unit", True)]
