"""The two bounds (S9) and drain: the writer exits, decode refuses, both say so first."""

from __future__ import annotations

import pytest

from duplet_core import engine
from duplet_core.effects import (
    CopyResult,
    Drain,
    Drained,
    Effect,
    Exit,
    SetHealth,
)
from duplet_core.errors import Reason
from duplet_core.ids import Role, TransferId
from duplet_core.ledger import PageState
from duplet_core.messages import (
    Abort,
    AbortAck,
    Drop,
    End,
    Failed,
    Handed,
    Hello,
    Landed,
    Leaving,
    Refused,
    Refusing,
    SourceReleased,
)
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer_state import WriterConfig
from tests.core.drivers import DecodeDriver, PrefillDriver, WriterDriver
from tests.core.samples import (
    DECODE_CONFIG,
    HANDOFF,
    MILLISECOND,
    PAGE_ROWS,
    PROMPT_ROWS,
    SECOND,
    T1,
    T2,
    T3,
    WRITER2,
    admit,
    counted,
    credits_sent,
    first_move,
    grant,
    last_chunk,
    pick,
    prefill,
    sent,
    whole_move,
)

CONFIG = WriterConfig()
GRACE_NS = DECODE_CONFIG.quarantine_grace_ns


def health(effects: list[Effect], name: str) -> list[bool]:
    return [e.ok for e in pick(effects, SetHealth) if e.name == name]


def aborted(count: int) -> WriterDriver:
    """A writer with so many transfers, each aborted with one copy outstanding."""
    writer = WriterDriver()
    for n in range(count):
        transfer = TransferId(f"t{n}")
        writer.hear(Role.DECODE, grant(transfer))
        writer.hear(Role.PREFILL, first_move(transfer))
        writer.hear(Role.DECODE, Abort(transfer))
    return writer


# --- the writer's bound -------------------------------------------------------------


def test_s9_three_withheld_acks_turn_health_red_and_then_end_the_process() -> None:
    writer = aborted(3)
    assert health(writer.end_copy(CopyResult.UNKNOWN), "writer") == []
    assert health(writer.end_copy(CopyResult.UNKNOWN), "writer") == []
    effects = writer.end_copy(CopyResult.UNKNOWN)
    assert health(effects, "writer") == [False]
    assert pick(effects, Exit) == [], "health first"
    assert writer.machine.next_timer() == writer.now + CONFIG.red_before_exit_ns
    assert pick(writer.tick(CONFIG.red_before_exit_ns - 1), Exit) == []
    effects = writer.tick(1)
    assert len(pick(effects, Exit)) == 1
    assert writer.machine.next_timer() is None
    assert pick(writer.tick(SECOND), Exit) == [], "once"


def test_s9_an_end_counts_as_withheld_when_its_copies_run_too_long() -> None:
    writer = aborted(3)
    assert writer.machine.withheld(writer.now) == 0
    due = writer.machine.next_timer()
    assert due == writer.now + CONFIG.withheld_after_ns
    assert health(writer.tick(CONFIG.withheld_after_ns - 1), "writer") == []
    assert writer.machine.ends_withheld == 0
    assert health(writer.tick(1), "writer") == [False]
    assert writer.machine.ends_withheld == 3


def test_s9_one_end_withheld_beyond_the_limit_is_enough() -> None:
    writer = aborted(1)
    writer.end_copy(CopyResult.UNKNOWN)
    start = writer.now
    timers = []
    while (due := writer.machine.next_timer()) is not None:
        timers.append(due - start)
        writer.now = due
        effects = writer.tick()
        if pick(effects, Exit):
            break
    limit = CONFIG.withheld_limit_ns
    assert timers == [CONFIG.withheld_after_ns, limit, limit + CONFIG.red_before_exit_ns]
    assert pick(effects, Exit) != []


def test_s9_a_withheld_release_counts_as_well() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, first_move())
    writer.hear(Role.PREFILL, Drop(T1))
    writer.tick(CONFIG.withheld_limit_ns - 1)
    assert health(writer.tick(1), "writer") == [False]


def test_s9_an_abort_storm_during_healthy_copies_does_not_turn_red() -> None:
    writer = aborted(200)
    effects: list[Effect] = []
    for _ in range(200):
        writer.now += 2 * MILLISECOND
        effects += writer.end_copy()
    assert health(effects, "writer") == []
    assert len([m for m in sent(effects, Role.DECODE) if isinstance(m, AbortAck)]) == 200
    assert writer.machine.transfers.by_id == {}
    assert writer.machine.next_timer() is None


def test_s9_a_healthy_copy_that_runs_long_but_nobody_waits_for_is_no_alarm() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, first_move())
    assert writer.machine.next_timer() is None
    assert health(writer.tick(3_600 * SECOND), "writer") == []


def test_s9_two_withheld_and_one_that_recovers_do_not_turn_red() -> None:
    writer = aborted(3)
    assert sent(writer.end_copy(), Role.DECODE) == [AbortAck(TransferId("t0"))]
    assert health(writer.tick(CONFIG.withheld_after_ns), "writer") == []
    assert writer.machine.withheld(writer.now) == 2
    writer.end_copy()
    writer.end_copy()
    assert writer.machine.next_timer() is None


# --- decode's bound -----------------------------------------------------------------


def cancelled(decode: DecodeDriver, request_id: str, transfer: TransferId) -> list[Effect]:
    decode.hear(Role.LB, admit(request_id, transfer))
    return decode.hear(Role.LB, End(request_id, transfer, Reason.CANCELLED))


def test_s9_a_quarter_in_quarantine_is_borne() -> None:
    decode = DecodeDriver()
    effects = cancelled(decode, "r1", T1)
    assert decode.pages(PageState.QUARANTINED) == 4
    assert health(effects, "quarantine") == []
    assert credits_sent(effects)[-1].refusing is None


def test_s9_more_than_a_quarter_refuses_and_recovers_without_traffic() -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit("runs", T3))
    decode.hear(Role.KVPROXY, Landed(T3, PROMPT_ROWS, HANDOFF))
    decode.say(engine.Verified(1, T3, True, ""))
    cancelled(decode, "r1", T1)
    cancelled(decode, "r2", T2)
    effects = decode.tick(GRACE_NS)
    assert health(effects, "quarantine") == [False]
    assert credits_sent(effects)[-1].refusing is Reason.QUARANTINE
    (refused,) = sent(decode.hear(Role.LB, admit("r4", TransferId("t4"))), Role.LB)
    assert isinstance(refused, Refused) and refused.reason is Reason.QUARANTINE
    # What runs goes on and finishes.
    row = b"1234"
    assert len(sent(decode.say(engine.StepDone(1, (1,), row, (), 1, 2)), Role.LB)) == 1
    # No request, no lb: the proof alone brings it back.
    decode.lose(Role.LB)
    effects = decode.hear(Role.KVPROXY, AbortAck(T1))
    assert health(effects, "quarantine") == [True]
    effects = decode.connect(Role.LB)
    credit = getattr(sent(effects, Role.LB)[0], "credit", None)
    assert credit is not None and credit.refusing is None


def test_s9_an_abort_that_is_acknowledged_in_time_refuses_nobody() -> None:
    decode = DecodeDriver()
    for n in range(40):
        transfer = TransferId(f"t{n}")
        cancelled(decode, f"r{n}", transfer)
        effects = cancelled(decode, f"s{n}", TransferId(f"u{n}"))
        assert decode.pages(PageState.QUARANTINED) == 8, "half of the pool, for a moment"
        effects += decode.tick(GRACE_NS - 1)
        effects += decode.hear(Role.KVPROXY, AbortAck(transfer))
        effects += decode.hear(Role.KVPROXY, AbortAck(TransferId(f"u{n}")))
        assert health(effects, "quarantine") == []
        assert {c.refusing for c in credits_sent(effects)} == {None}
    assert decode.machine.next_timer() is None


def test_s9_the_line_is_crossed_by_age_without_traffic() -> None:
    decode = DecodeDriver()
    cancelled(decode, "r1", T1)
    decode.now += 1
    cancelled(decode, "r2", T2)
    assert decode.machine.next_timer() == decode.now - 1 + GRACE_NS
    assert health(decode.tick(GRACE_NS - 1), "quarantine") == [], "the older one alone is borne"
    assert decode.machine.next_timer() == decode.now + 1
    assert health(decode.tick(1), "quarantine") == [False]
    assert decode.machine.next_timer() is None


def test_s9_an_admit_that_overtakes_the_timer_is_refused() -> None:
    decode = DecodeDriver()
    cancelled(decode, "r1", T1)
    cancelled(decode, "r2", T2)
    decode.now += GRACE_NS
    (refused,) = sent(decode.hear(Role.LB, admit("r3", T3)), Role.LB)[:1]
    assert isinstance(refused, Refused) and refused.reason is Reason.QUARANTINE


def test_s9_the_writers_death_ends_the_quarantine() -> None:
    decode = DecodeDriver()
    cancelled(decode, "r1", T1)
    cancelled(decode, "r2", T2)
    decode.tick(GRACE_NS)
    effects = decode.bury(Role.KVPROXY)
    assert health(effects, "quarantine") == [True]
    assert decode.pages(PageState.FREE) == 16
    assert credits_sent(effects)[-1].refusing is Reason.WRITER_LOST
    effects = decode.connect(Role.KVPROXY, WRITER2)
    assert credits_sent(effects)[-1].refusing is None


def test_s9_quarantine_needs_no_free_page_to_end() -> None:
    decode = DecodeDriver()
    for n in range(4):
        decode.hear(Role.LB, admit(f"r{n}", TransferId(f"t{n}")))
    assert decode.pages(PageState.FREE) == 0
    decode.lose(Role.KVPROXY)
    assert decode.pages(PageState.QUARANTINED) == 16
    decode.connect(Role.KVPROXY)
    for n in range(4):
        decode.hear(Role.KVPROXY, AbortAck(TransferId(f"t{n}")))
    assert decode.pages(PageState.FREE) == 16


# --- credit -------------------------------------------------------------------------


def test_credit_is_told_on_change_and_only_then() -> None:
    decode = DecodeDriver()
    (credit,) = credits_sent(decode.hear(Role.LB, admit()))
    assert (credit.total_pages, credit.free_pages) == (16, 12)
    assert (credit.free_slots, credit.admits_seen) == (3, 1)
    assert credits_sent(decode.tick()) == []
    (credit,) = credits_sent(decode.hear(Role.LB, End("r1", T1, None)))
    assert (credit.free_pages, credit.free_slots) == (12, 4), "a slot is free, its pages not"
    (credit,) = credits_sent(decode.hear(Role.KVPROXY, AbortAck(T1)))
    assert credit.free_pages == 16


def test_a_refused_admit_is_seen_as_well() -> None:
    decode = DecodeDriver()
    effects = decode.hear(Role.LB, admit(prompt_rows=40, max_rows=20))
    assert credits_sent(effects)[-1].admits_seen == 1
    assert counted(effects, "admits_refused_within_credit") == 1


def test_decode_without_a_writer_refuses() -> None:
    decode = DecodeDriver()
    assert credits_sent(decode.lose(Role.KVPROXY))[-1].refusing is Reason.WRITER_LOST
    (refused,) = sent(decode.hear(Role.LB, admit()), Role.LB)
    assert isinstance(refused, Refused) and refused.reason is Reason.WRITER_LOST


@pytest.mark.parametrize("rows", [(0, 1), (1, 0), (-4, 8)])
def test_an_admit_that_makes_no_sense_ends_lbs_stream(rows: tuple[int, int]) -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit("r1", T1, *rows))
    assert decode.machine.instance_of(Role.LB) is None
    assert decode.transfers.by_transfer == {}


# --- drain --------------------------------------------------------------------------


def test_decode_drains_its_streams_and_does_not_wait_for_quarantine() -> None:
    decode = DecodeDriver()
    cancelled(decode, "r1", T1)
    decode.hear(Role.LB, admit("r2", T2))
    effects = decode.feed(Drain())
    assert credits_sent(effects)[-1].refusing is Reason.DRAINING
    assert pick(effects, Drained) == []
    effects = decode.hear(Role.LB, admit("r3", T3))
    (refused,) = sent(effects, Role.LB)
    assert isinstance(refused, Refused) and refused.reason is Reason.DRAINING
    assert counted(effects, "admits_refused_within_credit") == 0
    decode.hear(Role.KVPROXY, Landed(T2, PROMPT_ROWS, HANDOFF))
    decode.say(engine.Verified(1, T2, True, ""))
    decode.say(engine.StepDone(1, (), b"", ((1, True),), 1, 2))
    assert pick(decode.say(engine.Stopped(1, None)), Drained) == [Drained()]
    assert pick(decode.tick(), Drained) == [], "told once"


def test_a_draining_decode_still_hears_proofs_and_deaths() -> None:
    decode = DecodeDriver()
    cancelled(decode, "r1", T1)
    decode.feed(Drain())
    decode.bury(Role.KVPROXY)
    assert decode.pages(PageState.FREE) == 16


def test_prefill_drains_what_it_took() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    effects = driver.feed(Drain())
    assert pick(effects, Drained) == []
    assert sent(effects, Role.LB) == [Refusing(Reason.DRAINING)]
    (failed,) = sent(driver.hear(Role.LB, prefill("r2", T2)), Role.LB)
    assert isinstance(failed, Failed) and failed.reason is Reason.DRAINING
    driver.say(last_chunk(1))
    driver.hear(Role.LB, End("r1", T1, None))
    assert pick(driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False)), Drained) == [Drained()]


def test_prefill_stays_until_what_it_handed_over_has_landed() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.feed(Drain())
    assert pick(driver.say(last_chunk(1)), Drained) == []
    effects = driver.hear(Role.KVPROXY, SourceReleased(T1, landed=True))
    assert sent(effects, Role.LB) == [Handed("r1", T1)], "before lb's stream ends with us"
    assert pick(effects, Drained) == [Drained()]


def test_prefill_tells_lb_whether_it_has_a_writer() -> None:
    driver = PrefillDriver(connected=False)
    (said,) = sent(driver.connect(Role.LB), Role.LB)
    assert isinstance(said, Hello) and said.refusing is Reason.WRITER_LOST
    assert sent(driver.connect(Role.KVPROXY), Role.LB) == [Refusing(None)]
    assert sent(driver.lose(Role.KVPROXY), Role.LB) == [Refusing(Reason.WRITER_LOST)]
    driver.lose(Role.LB)
    driver.connect(Role.KVPROXY)
    (said,) = sent(driver.connect(Role.LB), Role.LB)
    assert isinstance(said, Hello) and said.refusing is None


def test_the_writer_is_drained_when_every_end_is_told() -> None:
    writer = aborted(1)
    assert pick(writer.feed(Drain()), Drained) == []
    assert pick(writer.end_copy(), Drained) == [Drained()]


def test_a_writer_that_leaves_says_so_once_a_stream_and_serves_what_is_granted() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant(T1))
    effects = writer.feed(Drain())
    assert sent(effects, Role.DECODE) == [Leaving()]
    assert pick(effects, Drained) == []
    assert sent(writer.hear(Role.DECODE, grant(T2, (4, 5, 6))), Role.DECODE) == [], "it crossed"
    writer.hear(Role.PREFILL, whole_move(T1))
    writer.end_copy()
    writer.hear(Role.PREFILL, whole_move(T2))
    assert pick(writer.end_copy(), Drained) == [Drained()]
    effects = writer.connect(Role.DECODE)
    assert sent(effects, Role.DECODE)[-1] == Leaving(), "a new stream has not heard it"


def test_decode_grants_nothing_to_a_writer_that_leaves() -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit("r1", T1))
    effects = decode.hear(Role.KVPROXY, Leaving())
    assert credits_sent(effects)[-1].refusing is Reason.WRITER_LOST
    (refused,) = sent(decode.hear(Role.LB, admit("r2", T2)), Role.LB)[:1]
    assert isinstance(refused, Refused) and refused.reason is Reason.WRITER_LOST
    decode.hear(Role.KVPROXY, Landed(T1, PROMPT_ROWS, HANDOFF))
    assert decode.pages(PageState.LIVE) == 4, "what was granted goes on"
    decode.lose(Role.KVPROXY)
    decode.bury(Role.KVPROXY)
    effects = decode.connect(Role.KVPROXY, WRITER2)
    assert credits_sent(effects)[-1].refusing is None


def test_prefill_refuses_what_it_cannot_hold() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill("r1", T1))
    for message, reason in (
        (prefill("r2", T2, 33), Reason.PROMPT_TOO_LONG),
        (prefill("r1", T2), Reason.DUPLICATE_REQUEST),
        (prefill("r2", T1), Reason.DUPLICATE_REQUEST),
    ):
        (failed,) = sent(driver.hear(Role.LB, message), Role.LB)
        assert isinstance(failed, Failed) and failed.reason is reason
        assert failed.transfer == message.transfer


def test_prefills_queue_is_bounded() -> None:
    driver = PrefillDriver(PrefillConfig(pages=3, page_rows=PAGE_ROWS, spec="", queue_limit=1))
    for request_id, transfer in (("runs", T1), ("waits", T2)):
        assert sent(driver.hear(Role.LB, prefill(request_id, transfer)), Role.LB) == []
    (failed,) = sent(driver.hear(Role.LB, prefill("r3", T3)), Role.LB)
    assert isinstance(failed, Failed) and failed.reason is Reason.OVERLOADED
