"""When may a page be used again? The safety rules, each as a short story (S1 to S8, S10, S12)."""

from __future__ import annotations

import pytest

from duplet_core import engine
from duplet_core.decode_state import DecodeConfig, State
from duplet_core.effects import CloseMapping, CopyResult, StartCopy
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
    Move,
    Refused,
    SourceReleased,
    Started,
    TransferBroken,
    TransferFailed,
)
from tests.core.drivers import DecodeDriver, PrefillDriver, WriterDriver
from tests.core.samples import (
    DECODE1,
    DECODE2,
    DIGESTS,
    HANDOFF,
    PREFILL1,
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
    first_move,
    grant,
    last_chunk,
    last_move,
    pick,
    prefill,
    sent,
    to_engine,
    whole_move,
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


def moving(*, whole: bool = False) -> WriterDriver:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, whole_move() if whole else first_move())
    return writer


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


# --- S3: ABORT deletes the grant, its ack means quiet for ever ----------------------


def test_s3_abort_before_a_move_is_acknowledged_at_once() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    assert sent(writer.hear(Role.DECODE, Abort(T1)), Role.DECODE) == [AbortAck(T1)]
    # The grant is gone: the Move that was under way waits and writes nothing.
    effects = writer.hear(Role.PREFILL, whole_move())
    assert pick(effects, StartCopy) == []
    effects = writer.hear(Role.PREFILL, Drop(T1))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1)]
    assert writer.machine.transfers.by_id == {}


def test_s3_abort_without_a_grant_is_acknowledged_at_once() -> None:
    writer = WriterDriver()
    assert sent(writer.hear(Role.DECODE, Abort(T1)), Role.DECODE) == [AbortAck(T1)]
    writer.hear(Role.PREFILL, whole_move(T2))
    assert sent(writer.hear(Role.DECODE, Abort(T2)), Role.DECODE) == [AbortAck(T2)]


def test_s3_the_ack_waits_for_every_copy_and_starts_none() -> None:
    writer = moving()
    writer.hear(Role.PREFILL, Move(T1, 6, 1, (6,)))
    assert sent(writer.hear(Role.DECODE, Abort(T1)), Role.DECODE) == []
    effects = writer.hear(Role.PREFILL, Move(T1, 7, 3, (6, 7), HANDOFF))
    assert pick(effects, StartCopy) == [], "no copy without a grant"
    assert sent(writer.end_copy(), Role.DECODE) == []
    effects = writer.end_copy()
    assert sent(effects, Role.DECODE) == [AbortAck(T1)]
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1)]


@pytest.mark.parametrize("later", [CopyResult.OK, CopyResult.UNKNOWN])
def test_s3_a_copy_with_an_unknown_result_is_never_acknowledged(later: CopyResult) -> None:
    writer = moving()
    writer.hear(Role.PREFILL, last_move())
    (broken,) = sent(writer.end_copy(CopyResult.UNKNOWN), Role.DECODE)
    assert broken == TransferBroken(T1, "copy failed: as the test wants")
    writer.hear(Role.DECODE, Abort(T1))
    effects = writer.end_copy(later)
    assert sent(effects, Role.DECODE) == sent(effects, Role.PREFILL) == []
    assert T1 in writer.machine.transfers.by_id


def test_s3_an_unknown_result_after_the_abort_withholds_the_ack() -> None:
    writer = moving()
    writer.hear(Role.DECODE, Abort(T1))
    effects = writer.end_copy(CopyResult.UNKNOWN)
    assert sent(effects, Role.DECODE) == sent(effects, Role.PREFILL) == []
    assert writer.machine.withheld(writer.now) == 1


def test_s3_a_copy_that_never_started_is_quiet() -> None:
    effects = moving().end_copy(CopyResult.NOT_STARTED)
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "copy refused: as the test wants")]
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1)]


def test_s3_an_abort_that_crosses_the_landing_is_answered() -> None:
    writer = moving(whole=True)
    writer.end_copy()
    assert sent(writer.hear(Role.DECODE, Abort(T1)), Role.DECODE) == [AbortAck(T1)]


def test_s3_a_grant_is_consumed_by_landing() -> None:
    writer = moving(whole=True)
    writer.end_copy()
    effects = writer.hear(Role.PREFILL, whole_move())
    assert pick(effects, StartCopy) == [], "the same Move again finds no grant"


@pytest.mark.parametrize("start_row", [0, 5, 7])
def test_s3_a_move_out_of_row_order_ends_the_transfer(start_row: int) -> None:
    # Its predecessor was lost, or it is a repetition: landing would be of an incomplete KV.
    writer = moving()
    move = Move(T1, start_row, 1, (6,), HANDOFF)
    (broken,) = sent(writer.hear(Role.PREFILL, move), Role.DECODE)
    assert isinstance(broken, TransferBroken)
    assert broken.detail == f"move of row {start_row} + 1, next is 6 of 10"
    effects = writer.end_copy()
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, broken.detail)]
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1)]


def test_s3_a_later_move_of_an_unknown_transfer_ends_it() -> None:
    writer = WriterDriver()
    effects = writer.hear(Role.PREFILL, last_move())
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1)]
    writer.hear(Role.DECODE, grant(T2))
    effects = writer.hear(Role.PREFILL, last_move(T2))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T2)]
    (failed,) = sent(effects, Role.DECODE)
    assert isinstance(failed, TransferFailed)


def test_s3_a_move_after_the_last_one_ends_the_transfer() -> None:
    writer = moving(whole=True)
    (broken,) = sent(writer.hear(Role.PREFILL, Move(T1, 10, 1, (7,))), Role.DECODE)
    assert isinstance(broken, TransferBroken)


def test_s3_moves_beyond_the_granted_rows_end_the_transfer() -> None:
    writer = WriterDriver()
    writer.hear(Role.PREFILL, Move(T1, 0, 11, (5, 6, 7), HANDOFF))
    effects = writer.hear(Role.DECODE, grant())
    assert pick(effects, StartCopy) == []
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "more rows than granted")]
    writer.hear(Role.DECODE, grant(T2))
    effects = writer.hear(Role.PREFILL, Move(T2, 0, 11, (5, 6, 7), HANDOFF))
    assert pick(effects, StartCopy) == []


def test_s3_a_last_move_short_of_the_granted_rows_does_not_land() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, Move(T1, 0, 9, (5, 6, 7), HANDOFF))
    effects = writer.end_copy()
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "9 rows moved, 10 granted")]


def test_s3_a_second_grant_permits_nothing() -> None:
    writer = moving(whole=True)
    effects = writer.hear(Role.DECODE, grant(pages=(9, 10, 11)))
    assert counted(effects, "grants_ignored") == 1
    writer.hear(Role.DECODE, Abort(T1))
    effects = writer.hear(Role.DECODE, grant(pages=(9, 10, 11)))
    assert counted(effects, "grants_ignored") == 1
    assert sent(writer.end_copy(), Role.DECODE) == [AbortAck(T1)]
    assert writer.machine.transfers.by_id == {}


def test_s3_pools_with_other_pages_are_not_copied() -> None:
    writer = WriterDriver(connected=False)
    writer.connect(Role.DECODE)
    writer.connect(Role.PREFILL)
    pools = writer.machine.pools
    pools[PREFILL1] = type(pools[PREFILL1])(Role.PREFILL, 16, 2)
    writer.hear(Role.DECODE, grant())
    effects = writer.hear(Role.PREFILL, Move(T1, 0, 10, (1, 2, 3, 4, 5), HANDOFF))
    assert pick(effects, StartCopy) == []
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "the pools' pages differ in rows")]


@pytest.mark.parametrize(
    "bad",
    [
        Grant(T1, (0, 1), 10),
        Grant(T1, (0, 1, 1), 10),
        Grant(T1, (0, 1, 16), 10),
        Grant(T1, (0, 1, -1), 10),
        Grant(T1, (), 0),
    ],
)
def test_s3_a_grant_that_makes_no_sense_ends_decodes_stream(bad: Grant) -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, bad)
    assert writer.machine.instance_of(Role.DECODE) is None
    assert writer.machine.transfers.by_id == {}


@pytest.mark.parametrize(
    "bad",
    [
        Move(T1, -1, 4, (0, 1)),
        Move(T1, 0, 0, (0,)),
        Move(T1, 0, 5, (0,)),
        Move(T1, 0, 4, (16,)),
        Move(T1, 0, 4, (-1,)),
    ],
)
def test_s3_a_move_that_makes_no_sense_ends_prefills_stream(bad: Move) -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    effects = writer.hear(Role.PREFILL, bad)
    assert writer.machine.instance_of(Role.PREFILL) is None
    assert pick(effects, StartCopy) == []


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
    driver.connect(Role.KVPROXY, WRITER2)
    effects = driver.hear(Role.KVPROXY, SourceReleased(T1))
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
    assert due == decode.now + 2 * SECOND
    assert decode.tick(2 * SECOND - 1) == []
    effects = decode.tick(1)
    (failed,) = sent(effects, Role.LB)
    assert isinstance(failed, Failed) and failed.reason is Reason.TRANSFER_DEADLINE
    assert sent(effects, Role.KVPROXY) == [Abort(T1)]
    assert decode.pages(PageState.QUARANTINED) == 4
    assert decode.machine.next_timer() is None
    assert decode.tick(3_600 * SECOND) == []
    assert decode.pages(PageState.QUARANTINED) == 4, "time is never proof"


def test_s5_a_landed_transfer_has_no_deadline_any_more() -> None:
    decode = granted()
    decode.hear(Role.KVPROXY, Started(T1))
    decode.hear(Role.KVPROXY, LANDED)
    assert decode.machine.next_timer() is None


def test_s5_the_writer_tells_once_that_a_transfer_started() -> None:
    writer = WriterDriver()
    writer.hear(Role.PREFILL, first_move())
    assert sent(writer.hear(Role.DECODE, grant()), Role.DECODE) == [Started(T1)]
    assert sent(writer.hear(Role.PREFILL, last_move()), Role.DECODE) == []


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


@pytest.mark.parametrize("result", [CopyResult.OK, CopyResult.NOT_STARTED])
def test_s6_released_only_when_no_copy_reads(result: CopyResult) -> None:
    writer = moving()
    writer.hear(Role.PREFILL, Move(T1, 6, 1, (6,)))
    assert sent(writer.hear(Role.PREFILL, Drop(T1)), Role.PREFILL) == []
    assert sent(writer.end_copy(), Role.PREFILL) == []
    assert sent(writer.end_copy(result), Role.PREFILL) == [SourceReleased(T1)]


def test_s6_an_unknown_copy_may_still_read() -> None:
    writer = moving()
    writer.hear(Role.PREFILL, Drop(T1))
    assert sent(writer.end_copy(CopyResult.UNKNOWN), Role.PREFILL) == []
    assert sent(writer.hear(Role.PREFILL, Drop(T1)), Role.PREFILL) == []


def test_s6_drop_of_an_unknown_transfer_is_answered() -> None:
    effects = WriterDriver().hear(Role.PREFILL, Drop(T1))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1)]


def test_s6_drop_before_any_move_was_heard_ends_the_grant() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    effects = writer.hear(Role.PREFILL, Drop(T1))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1)]
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "prefill dropped it")]


def test_s6_prefill_reuses_nothing_before_the_release() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill("a", T1, 20))
    driver.say(last_chunk(1))
    effects = driver.hear(Role.LB, prefill("b", T2, 20))
    assert to_engine(effects) == [], "three pages are free, five are needed"
    driver.hear(Role.LB, End("a", T1, None))
    assert driver.free_pages == 3
    (start,) = to_engine(driver.hear(Role.KVPROXY, SourceReleased(T1)))
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
    driver.hear(Role.KVPROXY, SourceReleased(T1))
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


# --- S12: mappings of the dead are closed once they are quiet -----------------------


def test_s12_a_dead_decodes_mapping_waits_for_its_copies() -> None:
    writer = moving()
    assert pick(writer.bury(Role.DECODE), CloseMapping) == []
    effects = writer.hear(Role.PREFILL, last_move())
    assert pick(effects, StartCopy) == [], "its grants are deleted"
    effects = writer.end_copy()
    assert pick(effects, CloseMapping) == [CloseMapping(DECODE1)]
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1)]
    assert list(writer.machine.pools) == [PREFILL1]


def test_s12_an_idle_dead_peers_mapping_is_closed_at_once() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    assert pick(writer.bury(Role.DECODE), CloseMapping) == [CloseMapping(DECODE1)]
    assert pick(writer.bury(Role.PREFILL), CloseMapping) == [CloseMapping(PREFILL1)]
    assert writer.machine.transfers.by_id == {}


def test_s12_an_unknown_copy_keeps_the_mapping_open() -> None:
    writer = moving()
    writer.bury(Role.DECODE)
    assert pick(writer.end_copy(CopyResult.UNKNOWN), CloseMapping) == []
    assert DECODE1 in writer.machine.pools


def test_s12_a_dead_prefills_unfinished_transfer_fails_with_writes_complete() -> None:
    writer = moving()
    effects = writer.bury(Role.PREFILL)
    assert sent(effects, Role.DECODE) == [TransferBroken(T1, "prefill has exited")]
    effects = writer.end_copy()
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "prefill has exited")]
    assert pick(effects, CloseMapping) == [CloseMapping(PREFILL1)]


def test_s12_what_a_dead_prefill_had_handed_over_whole_still_lands() -> None:
    writer = moving(whole=True)
    assert pick(writer.bury(Role.PREFILL), CloseMapping) == []
    effects = writer.end_copy()
    assert isinstance(sent(effects, Role.DECODE)[0], Landed)
    assert pick(effects, CloseMapping) == [CloseMapping(PREFILL1)]


def test_s12_a_successor_gets_a_mapping_of_its_own() -> None:
    writer = moving()
    writer.bury(Role.DECODE)
    writer.connect(Role.DECODE, DECODE2)
    assert set(writer.machine.pools) == {PREFILL1, DECODE1, DECODE2}
    effects = writer.end_copy()
    assert pick(effects, CloseMapping) == [CloseMapping(DECODE1)]
    assert sent(effects, Role.DECODE) == [], "its successor is told nothing of it"


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
