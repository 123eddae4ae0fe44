"""The writer's part of the safety rules: grants, copies, ends, mappings (S3, S5, S6, S12)."""

from __future__ import annotations

import pytest

from duplet_core.effects import CloseMapping, CopyResult, StartCopy
from duplet_core.ids import Role
from duplet_core.messages import (
    Abort,
    AbortAck,
    Drop,
    Grant,
    Landed,
    Move,
    SourceReleased,
    Started,
    TransferBroken,
    TransferFailed,
)
from tests.core.drivers import WriterDriver
from tests.core.samples import (
    DECODE1,
    DECODE2,
    HANDOFF,
    PREFILL1,
    PREFILL2,
    T1,
    T2,
    counted,
    first_move,
    grant,
    last_move,
    pick,
    sent,
    whole_move,
)


def moving(*, whole: bool = False) -> WriterDriver:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, whole_move() if whole else first_move())
    return writer


# --- S3: ABORT deletes the grant, its ack means quiet for ever ----------------------


def test_s3_abort_before_a_move_is_acknowledged_at_once() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    assert sent(writer.hear(Role.DECODE, Abort(T1)), Role.DECODE) == [AbortAck(T1)]
    # The grant is gone: the Move that was under way waits and writes nothing.
    effects = writer.hear(Role.PREFILL, whole_move())
    assert pick(effects, StartCopy) == []
    effects = writer.hear(Role.PREFILL, Drop(T1))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]
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
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]


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
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]


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
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]


def test_s3_a_later_move_of_an_unknown_transfer_ends_it() -> None:
    writer = WriterDriver()
    effects = writer.hear(Role.PREFILL, last_move())
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]
    writer.hear(Role.DECODE, grant(T2))
    effects = writer.hear(Role.PREFILL, last_move(T2))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T2, landed=False)]
    (failed,) = sent(effects, Role.DECODE)
    assert isinstance(failed, TransferFailed)


def test_s3_a_move_after_the_last_one_ends_the_transfer() -> None:
    writer = moving(whole=True)
    (broken,) = sent(writer.hear(Role.PREFILL, Move(T1, 10, 1, (7,))), Role.DECODE)
    assert isinstance(broken, TransferBroken)


def test_s3_a_move_after_a_last_one_that_was_short_ends_the_transfer() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    writer.hear(Role.PREFILL, Move(T1, 0, 9, (5, 6, 7), HANDOFF))
    effects = writer.hear(Role.PREFILL, Move(T1, 9, 1, (7,)))
    assert pick(effects, StartCopy) == []
    assert isinstance(sent(effects, Role.DECODE)[0], TransferBroken)


def test_s3_another_prefill_does_not_go_on_with_a_transfer() -> None:
    writer = moving()
    writer.lose(Role.PREFILL)
    writer.connect(Role.PREFILL, PREFILL2)
    effects = writer.hear(Role.PREFILL, Drop(T1))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)], (
        "none of its pages is read"
    )
    assert sent(effects, Role.DECODE) == []
    effects = writer.hear(Role.PREFILL, last_move())
    assert pick(effects, StartCopy) == []
    assert isinstance(sent(effects, Role.DECODE)[0], TransferBroken)
    assert sent(writer.end_copy(), Role.PREFILL) == [], "that release is for its predecessor"


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


# --- S5: a transfer's deadline counts from its first queued copy --------------------


def test_s5_the_writer_tells_once_that_a_transfer_started() -> None:
    writer = WriterDriver()
    writer.hear(Role.PREFILL, first_move())
    assert sent(writer.hear(Role.DECODE, grant()), Role.DECODE) == [Started(T1)]
    assert sent(writer.hear(Role.PREFILL, last_move()), Role.DECODE) == []


# --- S6: source pages wait for SourceReleased ---------------------------------------


@pytest.mark.parametrize("result", [CopyResult.OK, CopyResult.NOT_STARTED])
def test_s6_released_only_when_no_copy_reads(result: CopyResult) -> None:
    writer = moving()
    writer.hear(Role.PREFILL, Move(T1, 6, 1, (6,)))
    assert sent(writer.hear(Role.PREFILL, Drop(T1)), Role.PREFILL) == []
    assert sent(writer.end_copy(), Role.PREFILL) == []
    assert sent(writer.end_copy(result), Role.PREFILL) == [SourceReleased(T1, landed=False)]


def test_s6_an_unknown_copy_may_still_read() -> None:
    writer = moving()
    writer.hear(Role.PREFILL, Drop(T1))
    assert sent(writer.end_copy(CopyResult.UNKNOWN), Role.PREFILL) == []
    assert sent(writer.hear(Role.PREFILL, Drop(T1)), Role.PREFILL) == []


def test_s6_drop_of_an_unknown_transfer_is_answered() -> None:
    effects = WriterDriver().hear(Role.PREFILL, Drop(T1))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]


def test_s6_drop_before_any_move_was_heard_ends_the_grant() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant())
    effects = writer.hear(Role.PREFILL, Drop(T1))
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]
    assert sent(effects, Role.DECODE) == [TransferFailed(T1, "prefill dropped it")]


# --- S12: mappings of the dead are closed once they are quiet -----------------------


def test_s12_a_dead_decodes_mapping_waits_for_its_copies() -> None:
    writer = moving()
    assert pick(writer.bury(Role.DECODE), CloseMapping) == []
    effects = writer.hear(Role.PREFILL, last_move())
    assert pick(effects, StartCopy) == [], "its grants are deleted"
    effects = writer.end_copy()
    assert pick(effects, CloseMapping) == [CloseMapping(DECODE1)]
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=False)]
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
    writer.hear(Role.DECODE, Abort(T1))
    writer.bury(Role.DECODE)
    writer.connect(Role.DECODE, DECODE2)
    assert set(writer.machine.pools) == {PREFILL1, DECODE1, DECODE2}
    effects = writer.end_copy()
    assert pick(effects, CloseMapping) == [CloseMapping(DECODE1)]
    assert sent(effects, Role.DECODE) == [], "its successor is told nothing of it"
