"""After a stream broke: what Hello lists, what both ends make of it, what was lost with it."""

from __future__ import annotations

import pytest

from duplet_core import engine
from duplet_core.decode_state import State
from duplet_core.effects import CopyResult, Effect, StartCopy
from duplet_core.errors import Reason
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.messages import (
    Abort,
    AbortAck,
    Drop,
    End,
    Failed,
    Handed,
    Handoff,
    Hello,
    Landed,
    Message,
    SourceReleased,
    TransferBroken,
    TransferFailed,
)
from duplet_core.prefill_state import State as JobState
from tests.core.drivers import DecodeDriver, PrefillDriver, WriterDriver
from tests.core.samples import (
    DECODE1,
    DECODE2,
    HANDOFF,
    LB1,
    LB2,
    PREFILL1,
    PREFILL2,
    PROMPT_ROWS,
    T1,
    T2,
    T3,
    T4,
    WRITER1,
    admit,
    chunk,
    counted,
    first_move,
    grant,
    hello,
    last_chunk,
    last_move,
    pick,
    prefill,
    sent,
    whole_move,
)


def failures(effects: list[Effect]) -> list[Failed]:
    """What lb hears of requests that cannot go on."""
    return [message for message in sent(effects, Role.LB) if isinstance(message, Failed)]


def only_hello(messages: list[Message]) -> Hello:
    (said,) = [m for m in messages if isinstance(m, Hello)]
    return said


# --- decode says what it holds ------------------------------------------------------


def test_decode_lists_what_is_not_proven_and_nothing_else() -> None:
    decode = DecodeDriver()
    for n, transfer in enumerate((T1, T2, T3, T4), start=1):
        decode.hear(Role.LB, admit(f"r{n}", transfer, 8, 4))
    decode.hear(Role.KVPROXY, Landed(T1, 8, Handoff(b"", HANDOFF.digests[:2], ())))
    decode.hear(Role.LB, End("r2", T2, Reason.CANCELLED))
    decode.hear(Role.KVPROXY, TransferFailed(T3, "copy refused"))
    effects = decode.lose(Role.KVPROXY)
    failed = [m.request_id for m in sent(effects, Role.LB) if isinstance(m, Failed)]
    assert failed == ["r4"], "granted became quarantined before the Hello"
    effects = decode.connect(Role.KVPROXY)
    said = only_hello(sent(effects, Role.KVPROXY))
    assert said.held == (T2, T4)
    assert said.to_instance == WRITER1
    assert counted(effects, "aborts_resent") == 2
    assert sent(effects, Role.KVPROXY) == [said], "each counts as an Abort already"
    for transfer in said.held:
        decode.hear(Role.KVPROXY, AbortAck(transfer))
    assert decode.transfers.by_transfer[T1].state is State.VERIFYING
    assert len(decode.transfers.by_transfer) == 1


def test_an_abort_stays_pending_over_every_stream_until_a_proof() -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit())
    assert sent(decode.hear(Role.LB, End("r1", T1, None)), Role.KVPROXY) == [Abort(T1)]
    for _ in range(3):
        # Whatever is said meanwhile, no second Abort on the same stream.
        assert sent(decode.tick(10**12), Role.KVPROXY) == []
        decode.lose(Role.KVPROXY)
        said = only_hello(sent(decode.connect(Role.KVPROXY), Role.KVPROXY))
        assert said.held == (T1,)
        census = decode.machine._credit().census
        assert (census.pending_aborts, census.writers) == (1, 1)
    assert census.aborts_resent == 3
    decode.hear(Role.KVPROXY, AbortAck(T1))
    census = decode.machine._credit().census
    assert (census.pending_aborts, census.aborts_resent) == (0, 3)
    decode.bury(Role.KVPROXY)
    assert decode.machine._credit().census.writers == 0


def test_nothing_is_listed_after_the_proof() -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit())
    decode.hear(Role.LB, End("r1", T1, None))
    decode.hear(Role.KVPROXY, AbortAck(T1))
    decode.lose(Role.KVPROXY)
    assert only_hello(sent(decode.connect(Role.KVPROXY), Role.KVPROXY)).held == ()


def test_an_end_while_the_writer_is_away_is_asked_with_the_next_hello() -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit())
    decode.lose(Role.KVPROXY)
    assert sent(decode.hear(Role.LB, End("r1", T1, None)), Role.KVPROXY) == []
    said = only_hello(sent(decode.connect(Role.KVPROXY), Role.KVPROXY))
    assert said.held == (T1,)


# --- the writer hears decode's list -------------------------------------------------


def test_the_writer_takes_each_listed_transfer_as_an_abort() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant(T1))
    writer.hear(Role.DECODE, grant(T2, (4, 5, 6)))
    writer.hear(Role.PREFILL, first_move(T2))
    writer.lose(Role.DECODE)
    # T3's Grant was lost with the stream; T4 landed, and its Landed was lost.
    effects = writer.connect(Role.DECODE, held=(T1, T2, T3, T4))
    answers = sent(effects, Role.DECODE)
    assert answers[0] == hello(Role.KVPROXY, WRITER1, writer.stream(Role.DECODE), to=DECODE1)
    assert answers[1:] == [AbortAck(T1), AbortAck(T3), AbortAck(T4)]
    assert sent(writer.end_copy(), Role.DECODE) == [AbortAck(T2)]


def test_a_lost_landing_is_proven_by_the_next_hello() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, whole_move())
    writer.lose(Role.DECODE)
    effects = writer.end_copy()
    assert sent(effects, Role.DECODE) == [], "there is no stream to tell it on"
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=True)]
    effects = writer.connect(Role.DECODE, held=(T1,))
    assert sent(effects, Role.DECODE)[1:] == [AbortAck(T1)]


def test_copies_under_way_go_on_while_decode_is_away_and_are_waited_for() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, first_move())
    writer.lose(Role.DECODE)
    assert len(pick(writer.hear(Role.PREFILL, last_move()), StartCopy)) == 1
    effects = writer.connect(Role.DECODE, held=(T1,))
    assert [type(m) for m in sent(effects, Role.DECODE)] == [Hello], "not while copies run"
    assert sent(writer.end_copy(), Role.DECODE) == []
    assert sent(writer.end_copy(), Role.DECODE) == [AbortAck(T1)]


def test_a_grant_that_decode_does_not_list_ends_too() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, first_move())
    writer.lose(Role.DECODE)
    effects = writer.connect(Role.DECODE)
    broken = TransferBroken(T1, "decode's stream broke")
    assert sent(effects, Role.DECODE)[1:] == [broken]
    effects = writer.end_copy()
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "decode's stream broke")]


def test_another_decodes_transfer_is_not_ended_by_a_list() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, first_move())
    writer.lose(Role.DECODE)
    writer.connect(Role.DECODE, DECODE2, held=(T1,))
    assert T1 in writer.machine.transfers.by_id
    writer.end_copy()
    assert len(pick(writer.hear(Role.PREFILL, last_move()), StartCopy)) == 1


# --- prefill says what it holds -----------------------------------------------------


def test_prefill_lists_what_the_writer_owes_and_nothing_else() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill("computing", T1, 4))
    driver.hear(Role.LB, prefill("handed", T2, 4))
    driver.say(last_chunk(2))
    driver.hear(Role.LB, prefill("stopping", T3, 8))
    driver.say(chunk(3))
    driver.hear(Role.LB, End("stopping", T3, Reason.CANCELLED))
    driver.hear(Role.LB, prefill("owed", T4, 4))
    driver.say(last_chunk(4))
    driver.hear(Role.LB, End("owed", T4, None))
    assert failures(driver.lose(Role.KVPROXY)) == [], "nothing was cut in the middle"
    said = only_hello(sent(driver.connect(Role.KVPROXY), Role.KVPROXY))
    assert said == hello(
        Role.PREFILL, PREFILL1, driver.stream(Role.KVPROXY), to=WRITER1, held=(T2, T3, T4)
    )
    for transfer in said.held:
        driver.hear(Role.KVPROXY, SourceReleased(transfer, landed=False))
    driver.say(engine.Stopped(3, None))
    assert driver.free_pages == 7
    assert driver.machine.jobs.by_transfer[T1].state is JobState.COMPUTING


def test_a_request_between_two_parts_ends_with_the_stream() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.say(chunk(1))
    (failed,) = failures(driver.lose(Role.KVPROXY))
    assert failed.reason is Reason.WRITER_LOST
    # The chunk that was being computed is not sent on the new stream: its predecessor is lost.
    driver.connect(Role.KVPROXY)
    effects = driver.say(last_chunk(1, after_first=True))
    assert sent(effects, Role.KVPROXY) == []
    driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False))
    assert driver.free_pages == 8


def test_a_request_before_its_first_part_takes_the_new_stream() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.lose(Role.KVPROXY)
    driver.connect(Role.KVPROXY)
    assert len(sent(driver.say(last_chunk(1)), Role.KVPROXY)) == 1


def test_a_lost_release_is_asked_for_again() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.say(last_chunk(1))
    driver.lose(Role.KVPROXY)
    driver.hear(Role.LB, End("r1", T1, None))
    assert driver.free_pages == 5
    said = only_hello(sent(driver.connect(Role.KVPROXY), Role.KVPROXY))
    assert said.held == (T1,)
    driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False))
    assert driver.free_pages == 8


def test_a_last_move_that_may_be_lost_is_told_to_lb_when_its_pages_come_back() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.say(last_chunk(1))
    assert failures(driver.lose(Role.KVPROXY)) == [], "it may have landed"
    driver.connect(Role.KVPROXY)
    (failed,) = failures(driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False)))
    assert failed.reason is Reason.WRITER_LOST
    assert driver.free_pages == 8


def test_a_last_move_that_landed_is_nobodys_failure() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.say(last_chunk(1))
    driver.lose(Role.KVPROXY)
    driver.connect(Role.KVPROXY)
    effects = driver.hear(Role.KVPROXY, SourceReleased(T1, landed=True))
    assert sent(effects, Role.LB) == [Handed("r1", T1)], "decode has all it needs"
    assert driver.free_pages == 8


def test_a_last_move_whose_writer_died_is_told_to_lb() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.say(last_chunk(1))
    (failed,) = failures(driver.bury(Role.KVPROXY))
    assert failed.reason is Reason.WRITER_LOST
    assert driver.free_pages == 8


def test_a_last_move_on_a_whole_stream_leaves_the_end_to_decode() -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.say(last_chunk(1))
    assert sent(driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False)), Role.LB) == []
    assert driver.free_pages == 8


# --- the writer hears prefill's list ------------------------------------------------


def test_the_writer_ends_what_prefill_may_have_lost_a_part_of() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant(T1))
    writer.hear(Role.PREFILL, first_move(T1))  # incomplete
    writer.hear(Role.PREFILL, whole_move(T2))  # complete, without a grant
    writer.hear(Role.DECODE, grant(T3, (8, 9, 10)))
    writer.hear(Role.PREFILL, whole_move(T3))  # complete, being copied
    effects = writer.connect(Role.PREFILL, held=(T1, T2, T3, T4))
    assert sent(effects, Role.PREFILL)[1:] == [
        SourceReleased(T2, landed=False),
        SourceReleased(T4, landed=False),
    ]
    detail = "prefill's stream broke between parts"
    assert sent(effects, Role.DECODE) == [TransferBroken(T1, detail)]
    effects = writer.end_copy()
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, detail)]
    effects = writer.end_copy()
    assert sent(effects, Role.PREFILL) == [SourceReleased(T3, landed=True)]
    assert isinstance(sent(effects, Role.DECODE)[0], Landed)


def landed(writer: WriterDriver, *transfers: TransferId) -> None:
    for transfer in transfers:
        writer.hear(Role.DECODE, grant(transfer))
        writer.hear(Role.PREFILL, whole_move(transfer))
        assert isinstance(sent(writer.end_copy(), Role.DECODE)[-1], Landed)


def test_a_landing_is_told_again_for_as_long_as_prefill_asks() -> None:
    writer = WriterDriver()
    landed(writer, T1, T2)
    for _ in range(2):  # the answer may be lost like the first one
        effects = writer.connect(Role.PREFILL, held=(T1, T3))
        assert sent(effects, Role.PREFILL)[1:] == [
            SourceReleased(T1, landed=True),
            SourceReleased(T3, landed=False),
        ]
    effects = writer.hear(Role.PREFILL, Drop(T1))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=True)]
    writer.connect(Role.PREFILL)
    assert writer.machine.transfers._landed == {}, "what is not asked for is over"


def test_landings_are_remembered_as_long_as_a_pool_can_hold_their_pages() -> None:
    writer = WriterDriver()
    pages = writer.machine.pools[PREFILL1].pages
    names = tuple(TransferId(f"t{n}") for n in range(pages + 1))
    landed(writer, *names)
    writer.lose(Role.PREFILL)
    effects = writer.connect(Role.PREFILL, held=names)
    answers = [m for m in sent(effects, Role.PREFILL) if isinstance(m, SourceReleased)]
    assert [a.landed for a in answers] == [False] + [True] * pages


def test_a_dead_prefills_landings_are_forgotten_also_those_after_its_death() -> None:
    writer = WriterDriver()
    landed(writer, T1)
    writer.hear(Role.DECODE, grant(T2))
    writer.hear(Role.PREFILL, whole_move(T2))
    writer.bury(Role.PREFILL)
    assert isinstance(sent(writer.end_copy(), Role.DECODE)[-1], Landed)
    assert writer.machine.transfers._landed == {}


def test_a_first_move_lost_with_the_stream_fails_its_grant() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    effects = writer.connect(Role.PREFILL, held=(T1,))
    assert sent(effects, Role.PREFILL)[1:] == [SourceReleased(T1, landed=False)]
    (failed,) = sent(effects, Role.DECODE)
    assert isinstance(failed, TransferFailed)


def test_a_grant_that_prefill_does_not_list_waits_on() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    effects = writer.connect(Role.PREFILL)
    assert sent(effects, Role.DECODE) == []
    assert len(pick(writer.hear(Role.PREFILL, whole_move()), StartCopy)) == 1


def test_a_release_withheld_by_an_unknown_copy_stays_withheld_over_a_reconnect() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, whole_move())
    writer.end_copy(CopyResult.UNKNOWN)
    effects = writer.connect(Role.PREFILL, held=(T1,))
    assert [type(m) for m in sent(effects, Role.PREFILL)] == [Hello]
    effects = writer.connect(Role.DECODE, held=(T1,))
    assert [type(m) for m in sent(effects, Role.DECODE)] == [Hello]


def test_another_prefills_transfers_are_left_alone() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, first_move())
    writer.lose(Role.PREFILL)
    effects = writer.connect(Role.PREFILL, PREFILL2, held=(T1,))
    assert sent(effects, Role.PREFILL)[1:] == [SourceReleased(T1, landed=False)]
    assert sent(effects, Role.DECODE) == []
    # The old one's copy completes; its rest never comes, until its death ends the transfer.
    writer.end_copy()
    effects = writer.bury(Role.PREFILL, PREFILL1)
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "prefill has exited")]


# --- lb ---------------------------------------------------------------------------


@pytest.mark.parametrize("successor", [LB1, LB2])
def test_lb_says_nothing_for_the_break_ended_its_requests(successor: InstanceId) -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit())
    decode.lose(Role.LB)
    effects = decode.connect(Role.LB, successor)
    said = only_hello(sent(effects, Role.LB))
    assert said.credit is not None
    assert (said.credit.free_pages, said.credit.admits_seen) == (12, 0)
    assert said.spec != ""
    decode.hear(Role.KVPROXY, AbortAck(T1))
    # An End for the earlier use, from whichever lb, finds nothing to end.
    decode.hear(Role.LB, admit("r1", T2))
    decode.hear(Role.LB, End("r1", T1, None))
    assert decode.transfers.by_transfer[T2].state is State.GRANTED


def test_an_lb_ends_only_requests_of_its_own_life() -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit())
    decode.hear(Role.KVPROXY, Landed(T1, PROMPT_ROWS, HANDOFF))
    decode.lose(Role.LB)
    decode.connect(Role.LB, LB2)
    assert sent(decode.say(engine.Verified(1, T1, True, "")), Role.LB) == []
    assert sent(decode.say(engine.Stopped(1, None)), Role.LB) == []
