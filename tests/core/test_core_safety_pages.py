"""When may a page be used again? The rules at decode and prefill, each as a short story."""

from __future__ import annotations

import pytest

from duplet_core import engine
from duplet_core.decode_state import DecodeConfig, State
from duplet_core.errors import Reason
from duplet_core.ids import Role, TransferId
from duplet_core.ledger import PageState
from duplet_core.messages import (
    Abort,
    AbortAck,
    Accepted,
    Drop,
    End,
    Failed,
    Grant,
    Handoff,
    Landed,
    Message,
    Refused,
    SourceReleased,
    Started,
    TransferBroken,
    TransferFailed,
)
from tests.core.drivers import DecodeDriver, PrefillDriver
from tests.core.samples import (
    DIGESTS,
    HANDOFF,
    PROMPT_ROWS,
    ROW,
    SECOND,
    T1,
    T2,
    T3,
    WRITER1,
    WRITER2,
    admit,
    chunk,
    counted,
    last_chunk,
    prefill,
    sent,
    to_engine,
)

LANDED = Landed(T1, PROMPT_ROWS, HANDOFF)
CANCEL = End("r1", T1, Reason.CANCELLED)
ALL = 16


def granted() -> DecodeDriver:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit())
    return decode


def quarantined() -> DecodeDriver:
    decode = granted()
    decode.hear(Role.LB, CANCEL)
    assert decode.pages(PageState.QUARANTINED) == 4
    return decode


def running() -> DecodeDriver:
    decode = granted()
    decode.hear(Role.KVPROXY, LANDED)
    decode.say(engine.Verified(1, T1, True, ""))
    return decode


# --- S1: one state a page; decode's own steps are writes too ----------------------


def test_s1_granted_pages_are_nobody_elses() -> None:
    decode = DecodeDriver()
    effects = decode.hear(Role.LB, admit("a", T1))
    effects += decode.hear(Role.LB, admit("b", T2))
    grants = [m for m in sent(effects, Role.KVPROXY) if isinstance(m, Grant)]
    assert [g.pages for g in grants] == [(0, 1, 2), (4, 5, 6)], "the output's page is kept back"
    assert decode.pages(PageState.GRANTED) == 8


def test_s1_a_cancelled_stream_keeps_its_pages_until_the_engine_let_go() -> None:
    decode = running()
    effects = decode.hear(Role.LB, CANCEL)
    assert to_engine(effects) == [engine.Stop(1)]
    # The step that was under way still writes into these pages.
    decode.say(engine.StepDone(7, (1,), ROW, (), 1, 2))
    assert decode.pages(PageState.LIVE) == 4
    decode.say(engine.Stopped(1, None))
    assert decode.pages(PageState.FREE) == ALL


def test_s1_a_finished_stream_keeps_its_pages_until_the_engine_let_go() -> None:
    decode = running()
    decode.say(engine.StepDone(7, (), b"", ((1, True),), 1, 2))
    assert decode.pages(PageState.LIVE) == 4
    decode.say(engine.Stopped(1, None))
    assert decode.pages(PageState.FREE) == ALL


def test_s1_a_writers_death_does_not_free_what_the_engine_uses() -> None:
    decode = running()
    decode.bury(Role.KVPROXY)
    assert decode.pages(PageState.LIVE) == 4
    assert decode.transfers.by_transfer[T1].state is State.RUNNING


# --- S2: back to free needs a proof -----------------------------------------------


@pytest.mark.parametrize("report", [LANDED, TransferFailed(T1, ""), AbortAck(T1)])
def test_s2_the_writers_report_proves(report: Message) -> None:
    decode = quarantined()
    decode.hear(Role.KVPROXY, report)
    assert decode.pages(PageState.FREE) == ALL


@pytest.mark.parametrize("report", [Started(T1), TransferBroken(T1, "copy failed")])
def test_s2_a_report_with_copies_outstanding_proves_nothing(report: Message) -> None:
    decode = quarantined()
    decode.hear(Role.KVPROXY, report)
    assert decode.pages(PageState.QUARANTINED) == 4


def test_s2_a_dead_writer_proves_without_any_stream() -> None:
    decode = quarantined()
    decode.lose(Role.KVPROXY)
    decode.bury(Role.KVPROXY)
    assert decode.pages(PageState.FREE) == ALL


def test_s2_the_death_of_another_writer_proves_nothing() -> None:
    decode = quarantined()
    decode.bury(Role.KVPROXY, WRITER2)
    assert decode.pages(PageState.QUARANTINED) == 4


@pytest.mark.parametrize("report", [LANDED, TransferFailed(T1, ""), AbortAck(T1)])
def test_s2_another_writers_report_is_ignored(report: Message) -> None:
    decode = quarantined()
    decode.lose(Role.KVPROXY)
    decode.connect(Role.KVPROXY, WRITER2)
    effects = decode.hear(Role.KVPROXY, report)
    assert counted(effects, "reports_ignored") == 1
    assert decode.pages(PageState.QUARANTINED) == 4


def test_s2_reports_about_nothing_are_ignored_and_counted() -> None:
    decode = DecodeDriver()
    for report in (LANDED, TransferFailed(T1, ""), TransferBroken(T1, ""), AbortAck(T1)):
        assert counted(decode.hear(Role.KVPROXY, report), "reports_ignored") == 1


def test_s2_an_ack_that_nobody_asked_for_frees_nothing() -> None:
    decode = granted()
    decode.hear(Role.KVPROXY, AbortAck(T1))
    assert decode.pages(PageState.GRANTED) == 4


def test_s2_a_landing_with_other_rows_or_digests_fails_the_request_and_proves() -> None:
    for landed in (
        Landed(T1, PROMPT_ROWS - 1, HANDOFF),
        Landed(T1, PROMPT_ROWS, Handoff(ROW, DIGESTS[:2], (1, 2, 3))),
    ):
        decode = granted()
        (failed,) = sent(decode.hear(Role.KVPROXY, landed), Role.LB)
        assert isinstance(failed, Failed) and failed.reason is Reason.TRANSFER_FAILED
        assert decode.pages(PageState.FREE) == ALL


# --- S4: death is the kernel's word -------------------------------------------------


def test_s4_a_new_writer_proves_nothing_about_the_old_one() -> None:
    decode = quarantined()
    decode.lose(Role.KVPROXY)
    hello = sent(decode.connect(Role.KVPROXY, WRITER2), Role.KVPROXY)[0]
    assert getattr(hello, "held", None) == (), "the new one never got that grant"
    assert decode.pages(PageState.QUARANTINED) == 4
    decode.bury(Role.KVPROXY, WRITER1)
    assert decode.pages(PageState.FREE) == ALL
    assert decode.machine.instance_of(Role.KVPROXY) == WRITER2


def test_s4_prefills_debts_stay_with_the_writer_that_got_the_moves() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.say(last_chunk(1))
    driver.lose(Role.KVPROXY)
    (hello,) = sent(driver.connect(Role.KVPROXY, WRITER2), Role.KVPROXY)
    assert getattr(hello, "held", None) == (), "the new one never got those Moves"
    effects = driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False))
    assert counted(effects, "reports_ignored") == 1
    assert driver.free_pages == 5
    driver.bury(Role.KVPROXY, WRITER1)
    assert driver.free_pages == 8


# --- S5: time and closed streams end requests, never free ---------------------------


def test_s5_the_deadline_counts_from_the_first_queued_copy() -> None:
    decode = granted()
    assert decode.machine.next_timer() is None, "queueing is not a stuck write"
    assert decode.tick(3_600 * SECOND) == []
    decode.hear(Role.KVPROXY, Started(T1))
    due = decode.machine.next_timer()
    limit = decode.machine.config.transfer_deadline_ns
    assert due == decode.now + limit
    assert decode.tick(limit - 1) == []
    effects = decode.tick(1)
    (failed,) = sent(effects, Role.LB)
    assert isinstance(failed, Failed) and failed.reason is Reason.TRANSFER_DEADLINE
    assert sent(effects, Role.KVPROXY) == [Abort(T1)]
    assert decode.pages(PageState.QUARANTINED) == 4
    assert decode.tick(3_600 * SECOND) == []
    assert decode.machine.next_timer() is None
    assert decode.pages(PageState.QUARANTINED) == 4, "time is never proof"


def test_s5_a_landed_transfer_has_no_deadline_any_more() -> None:
    decode = granted()
    decode.hear(Role.KVPROXY, Started(T1))
    decode.hear(Role.KVPROXY, LANDED)
    assert decode.machine.next_timer() is None


def test_s5_a_closed_stream_to_the_writer_ends_its_transfers_at_once() -> None:
    decode = granted()
    (failed,) = sent(decode.lose(Role.KVPROXY), Role.LB)
    assert failed == Failed("r1", T1, Reason.WRITER_LOST, "the stream to kvproxy ended")
    assert decode.pages(PageState.QUARANTINED) == 4


def test_s5_a_closed_stream_to_the_writer_does_not_end_what_landed() -> None:
    decode = running()
    assert sent(decode.lose(Role.KVPROXY), Role.LB) == []
    assert decode.transfers.by_transfer[T1].state is State.RUNNING


# --- S6: source pages wait for SourceReleased ---------------------------------------


def test_s6_prefill_reuses_nothing_before_the_release() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill("a", T1, 20))
    driver.say(last_chunk(1))
    effects = driver.hear(Role.LB, prefill("b", T2, 20))
    assert to_engine(effects) == [], "three pages are free, five are needed"
    driver.hear(Role.LB, End("a", T1, None))
    assert driver.free_pages == 3
    (start,) = to_engine(driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False)))
    assert isinstance(start, engine.Start) and start.pages == (0, 1, 2, 3, 4)


def test_s6_a_dead_writer_reads_nothing() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.say(last_chunk(1))
    driver.bury(Role.KVPROXY)
    assert driver.free_pages == 8


def test_prefill_starts_in_arrival_order_only() -> None:
    # Decode admits in the same order: nobody holds what an earlier one waits for.
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill("a", T1, 20))
    assert to_engine(driver.hear(Role.LB, prefill("b", T2, 20))) == []
    assert to_engine(driver.hear(Role.LB, prefill("c", T3, 4))) == [], "it would fit, but waits"
    effects = driver.hear(Role.LB, End("b", T2, Reason.CANCELLED))
    (start,) = to_engine(effects)
    assert isinstance(start, engine.Start) and start.pages == (5,)


# --- S7: a client never waits for proof ---------------------------------------------


def test_s7_failure_is_told_at_once_and_the_id_may_return() -> None:
    decode = granted()
    (failed,) = sent(decode.hear(Role.KVPROXY, TransferBroken(T1, "copy failed")), Role.LB)
    assert isinstance(failed, Failed) and failed.reason is Reason.TRANSFER_FAILED
    decode.hear(Role.LB, CANCEL)
    effects = decode.hear(Role.LB, admit("r1", T2))
    assert sent(effects, Role.LB) == []
    assert decode.transfers.by_transfer[T2].state is State.GRANTED
    # A transfer id never returns while its pages are held.
    (refused,) = sent(decode.hear(Role.LB, admit("r2", T1)), Role.LB)
    assert isinstance(refused, Refused) and refused.reason is Reason.DUPLICATE_REQUEST


# --- S8: a vanished lb ends all its requests ----------------------------------------


def test_s8_a_vanished_lb_ends_all_its_requests_at_decode() -> None:
    decode = running()
    decode.hear(Role.LB, admit("b", T2))
    effects = decode.lose(Role.LB)
    assert to_engine(effects) == [engine.Stop(1)]
    assert sent(effects, Role.KVPROXY) == [Abort(T2)]
    assert decode.pages(PageState.LIVE) == decode.pages(PageState.QUARANTINED) == 4
    decode.say(engine.Stopped(1, None))
    decode.hear(Role.KVPROXY, AbortAck(T2))
    assert decode.pages(PageState.FREE) == ALL


def test_s8_a_vanished_lb_ends_all_its_requests_at_prefill() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill("computing", T1, 20))
    driver.say(chunk(1))
    driver.hear(Role.LB, prefill("queued", T2, 20))
    effects = driver.lose(Role.LB)
    assert to_engine(effects) == [engine.Stop(1)]
    assert sent(effects, Role.KVPROXY) == [Drop(T1)]
    driver.say(engine.Stopped(1, None))
    driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False))
    assert driver.free_pages == 8
    assert driver.machine.jobs.by_transfer == {}


# --- S10: rows come only from verified KV -------------------------------------------


def test_s10_no_row_before_the_digests_are_checked() -> None:
    decode = granted()
    effects = decode.hear(Role.KVPROXY, LANDED)
    assert to_engine(effects) == [engine.Verify(1, T1, (0, 1, 2), PROMPT_ROWS, DIGESTS)]
    assert sent(effects, Role.LB) == []
    effects = decode.say(engine.Verified(1, T1, True, ""))
    assert isinstance(sent(effects, Role.LB)[0], Accepted)


def test_s10_wrong_kv_is_told_counted_and_never_read() -> None:
    decode = granted()
    decode.hear(Role.KVPROXY, LANDED)
    effects = decode.say(engine.Verified(1, T1, False, "page 2 differs"))
    assert sent(effects, Role.LB) == [Failed("r1", T1, Reason.KV_MISMATCH, "page 2 differs")]
    assert to_engine(effects) == [engine.Stop(1)]
    assert counted(effects, "kv_mismatches") == 1
    assert (decode.transfers.kv_checks, decode.transfers.kv_mismatches) == (1, 1)
    decode.say(engine.Stopped(1, None))
    assert decode.pages(PageState.FREE) == ALL


# --- admission -----------------------------------------------------------------------


def test_decode_refuses_what_it_cannot_hold() -> None:
    config = DecodeConfig(pages=8, page_rows=4, slots=1, longest_sequence=48, spec="")
    for message, reason in (
        (admit("r2", T2, 40, 9), Reason.PROMPT_TOO_LONG),
        (admit("r2", T2, 30, 10), Reason.OVERLOADED),
        (admit("r1", T2), Reason.DUPLICATE_REQUEST),
        (admit("r2", T1), Reason.DUPLICATE_REQUEST),
        (admit("r2", T2), Reason.OVERLOADED),
    ):
        decode = DecodeDriver(config)
        if message.prompt_rows == PROMPT_ROWS:
            decode.hear(Role.LB, admit("r1", T1))
        effects = decode.hear(Role.LB, message)
        (refused,) = sent(effects, Role.LB)
        assert isinstance(refused, Refused) and refused.reason is reason
        assert refused.transfer == TransferId(message.transfer)
        assert sent(effects, Role.KVPROXY) == []
