"""The writer's table: every input in every state, with the state, copies and messages after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from duplet_core.effects import CopyDone, CopyResult, Effect, StartCopy
from duplet_core.errors import InvariantError
from duplet_core.ids import Role
from duplet_core.messages import (
    Abort,
    AbortAck,
    Landed,
    SourceReleased,
    Started,
    TransferBroken,
    TransferFailed,
)
from duplet_core.writer_state import Input, State
from duplet_core.writer_transfers import Transfers
from tests.core.drivers import WriterDriver
from tests.core.samples import (
    DECODE1,
    HANDOFF,
    PREFILL1,
    PROMPT_ROWS,
    T1,
    first_move,
    grant,
    kinds,
    last_move,
    pick,
    sent,
)


def in_state(state: State, *, whole: bool = False) -> WriterDriver:
    """A machine with one transfer; with a copy outstanding where there can be one.

    `whole`: the last Move is here as well, so that two copies are outstanding.
    """
    writer = WriterDriver()
    if state is not State.WAITING:
        writer.hear(Role.DECODE, grant())
    if state is not State.GRANTED:
        writer.hear(Role.PREFILL, first_move())
        if whole:
            writer.hear(Role.PREFILL, last_move())
    if state is State.ENDING:
        writer.hear(Role.DECODE, Abort(T1))
    assert writer.machine.transfers.by_id[T1].state is state
    return writer


def message_for(writer: WriterDriver, what: Input) -> Any:
    copy = writer.copies[0].copy if writer.copies else 1
    later = writer.machine.transfers.by_id[T1].next_row > 0
    messages: dict[Input, Any] = {
        Input.GRANT: (grant(), DECODE1),
        Input.ABORT: Abort(T1),
        Input.MOVE: (last_move() if later else first_move(), PREFILL1),
        Input.BAD_MOVE: (replace(last_move(), start_row=7, count=3), PREFILL1),
        Input.DROP: PREFILL1,
        Input.COPY_OK: CopyDone(copy, CopyResult.OK, "", 99),
        Input.COPY_REFUSED: CopyDone(copy, CopyResult.NOT_STARTED, "refused", 99),
        Input.COPY_UNKNOWN: CopyDone(copy, CopyResult.UNKNOWN, "CUDA error", 99),
        Input.SOURCE_BACK: PREFILL1,
        Input.SOURCE_DIED: None,
        Input.DEST_BACK: None,
        Input.DEST_DIED: None,
    }
    return messages[what]


COPIES = (Input.COPY_OK, Input.COPY_REFUSED, Input.COPY_UNKNOWN)


def step(writer: WriterDriver, what: Input) -> list[Effect]:
    """Apply the input by the table alone, then collect the effects."""
    transfers = writer.machine.transfers
    message = message_for(writer, what)
    if what in COPIES and writer.copies:
        transfers.step_copy(message, what, writer.now)
    else:
        transfers.step(transfers.by_id[T1], what, message, writer.now)
    return writer.tick()


@dataclass(frozen=True)
class Outcome:
    """`after` None: the transfer is forgotten."""

    after: State | None
    decode: tuple[type, ...] = ()
    prefill: tuple[type, ...] = ()
    copies: int = 0
    """Started by this input."""


IMPOSSIBLE = None
NOTHING_COPIED = dict.fromkeys(COPIES, IMPOSSIBLE)
FAILED = Outcome(None, decode=(TransferFailed,), prefill=(SourceReleased,))
BROKEN = Outcome(State.ENDING, decode=(TransferBroken,))

# One copy, of the first Move, is outstanding in MOVING and ENDING.
EXPECTED: dict[State, dict[Input, Outcome | None]] = {
    State.GRANTED: {
        **NOTHING_COPIED,
        Input.GRANT: Outcome(State.GRANTED),
        Input.ABORT: Outcome(None, decode=(AbortAck,)),
        Input.MOVE: Outcome(State.MOVING, decode=(Started,), copies=1),
        Input.BAD_MOVE: FAILED,
        Input.DROP: FAILED,
        Input.SOURCE_BACK: FAILED,
        Input.SOURCE_DIED: IMPOSSIBLE,
        Input.DEST_BACK: Outcome(None, decode=(TransferFailed,)),
        Input.DEST_DIED: Outcome(None, decode=(TransferFailed,)),
    },
    State.WAITING: {
        **NOTHING_COPIED,
        Input.GRANT: Outcome(State.MOVING, decode=(Started,), copies=1),
        Input.ABORT: Outcome(State.WAITING, decode=(AbortAck,)),
        Input.MOVE: Outcome(State.WAITING),
        Input.BAD_MOVE: Outcome(None, prefill=(SourceReleased,)),
        Input.DROP: Outcome(None, prefill=(SourceReleased,)),
        Input.SOURCE_BACK: Outcome(None, prefill=(SourceReleased,)),
        Input.SOURCE_DIED: Outcome(None, prefill=(SourceReleased,)),
        Input.DEST_BACK: IMPOSSIBLE,
        Input.DEST_DIED: IMPOSSIBLE,
    },
    State.MOVING: {
        Input.GRANT: Outcome(State.MOVING),
        Input.ABORT: Outcome(State.ENDING),
        Input.MOVE: Outcome(State.MOVING, copies=1),
        Input.BAD_MOVE: BROKEN,
        Input.DROP: BROKEN,
        Input.COPY_OK: Outcome(State.MOVING),
        Input.COPY_REFUSED: FAILED,
        Input.COPY_UNKNOWN: BROKEN,
        Input.SOURCE_BACK: BROKEN,
        Input.SOURCE_DIED: BROKEN,
        Input.DEST_BACK: BROKEN,
        Input.DEST_DIED: BROKEN,
    },
    State.ENDING: {
        **dict.fromkeys(Input, Outcome(State.ENDING)),
        Input.COPY_OK: Outcome(None, decode=(AbortAck,), prefill=(SourceReleased,)),
        Input.COPY_REFUSED: Outcome(None, decode=(AbortAck,), prefill=(SourceReleased,)),
    },
}

# Both Moves are here, with the handoff: prefill has no more part in it.
WHOLE: list[tuple[State, Input, Outcome]] = [
    (State.WAITING, Input.GRANT, Outcome(State.MOVING, decode=(Started,), copies=2)),
    (State.WAITING, Input.SOURCE_BACK, Outcome(None, prefill=(SourceReleased,))),
    (State.WAITING, Input.SOURCE_DIED, Outcome(None, prefill=(SourceReleased,))),
    (State.MOVING, Input.SOURCE_BACK, Outcome(State.MOVING)),
    (State.MOVING, Input.SOURCE_DIED, Outcome(State.MOVING)),
    (State.MOVING, Input.COPY_OK, Outcome(State.MOVING)),
    (State.MOVING, Input.COPY_REFUSED, BROKEN),
    (State.MOVING, Input.COPY_UNKNOWN, BROKEN),
    (State.ENDING, Input.COPY_OK, Outcome(State.ENDING)),
    (State.ENDING, Input.COPY_REFUSED, Outcome(State.ENDING)),
    (State.ENDING, Input.COPY_UNKNOWN, Outcome(State.ENDING)),
]


def test_every_pair_is_decided_and_no_other_is() -> None:
    assert set(Transfers.TABLE) == set(State) == set(EXPECTED)
    for state in State:
        assert set(Transfers.TABLE[state]) == set(Input) == set(EXPECTED[state])


def check(writer: WriterDriver, what: Input, expected: Outcome) -> None:
    effects = step(writer, what)
    assert kinds(sent(effects, Role.DECODE)) == expected.decode
    assert kinds(sent(effects, Role.PREFILL)) == expected.prefill
    assert len(pick(effects, StartCopy)) == expected.copies
    t = writer.machine.transfers.by_id.get(T1)
    assert (None if t is None else t.state) == expected.after


@pytest.mark.parametrize("what", list(Input), ids=lambda i: i.name)
@pytest.mark.parametrize("state", list(State), ids=lambda s: s.name)
def test_each_pair_does_what_is_documented(state: State, what: Input) -> None:
    writer = in_state(state)
    expected = EXPECTED[state][what]
    if expected is None:
        with pytest.raises(InvariantError):
            step(writer, what)
    else:
        check(writer, what, expected)


@pytest.mark.parametrize(("state", "what", "expected"), WHOLE, ids=lambda p: getattr(p, "name", ""))
def test_once_the_last_move_is_here(state: State, what: Input, expected: Outcome) -> None:
    check(in_state(state, whole=True), what, expected)


# --- what the transitions say ---------------------------------------------------


def test_parts_are_copied_and_land_when_the_last_copy_is_done() -> None:
    writer = WriterDriver()
    writer.hear(Role.DECODE, grant(pages=(9, 4, 2)))
    effects = writer.hear(Role.PREFILL, first_move())
    assert pick(effects, StartCopy) == [
        StartCopy(1, T1, PREFILL1, (5, 6), DECODE1, (9, 4), 0, 6),
    ]
    effects = writer.hear(Role.PREFILL, last_move())
    assert pick(effects, StartCopy) == [
        StartCopy(2, T1, PREFILL1, (6, 7), DECODE1, (4, 2), 6, 4),
    ]
    handed_ns = writer.now
    writer.now += 1
    assert sent(writer.end_copy(), Role.DECODE) == []
    writer.now = 7_777
    effects = writer.end_copy(started_ns=7_000)
    assert sent(effects, Role.PREFILL) == [SourceReleased(T1, landed=True)]
    moved = replace(HANDOFF, stamps=(*HANDOFF.stamps, handed_ns, 7_000, 7_777))
    assert sent(effects, Role.DECODE) == [Landed(T1, PROMPT_ROWS, moved)]


def test_parts_that_came_before_the_grant_are_copied_in_order() -> None:
    writer = in_state(State.WAITING, whole=True)
    effects = writer.hear(Role.DECODE, grant())
    assert [(c.start_row, c.count) for c in pick(effects, StartCopy)] == [(0, 6), (6, 4)]
    assert sent(effects, Role.DECODE) == [Started(T1)]


@pytest.mark.parametrize("result", [CopyResult.OK, CopyResult.NOT_STARTED, CopyResult.UNKNOWN])
@pytest.mark.parametrize("first", [CopyResult.OK, CopyResult.NOT_STARTED, CopyResult.UNKNOWN])
def test_a_copy_ends_once(first: CopyResult, result: CopyResult) -> None:
    # A success told after an unknown result would be taken for quiescence.
    writer = in_state(State.MOVING)
    copy = writer.copies[0].copy
    writer.end_copy(first)
    with pytest.raises(InvariantError, match="a copy ends once"):
        writer.feed(CopyDone(copy, result, "", 1))


def test_a_copy_that_was_never_started_cannot_end() -> None:
    with pytest.raises(InvariantError, match="a copy ends once"):
        WriterDriver().feed(CopyDone(1, CopyResult.OK, "", 1))
