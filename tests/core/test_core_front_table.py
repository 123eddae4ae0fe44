"""lb's table: every input in every state, with the state and messages after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from duplet_core.effects import Cancel, Effect, Ended, Rows
from duplet_core.errors import InvariantError, Reason
from duplet_core.front import FrontMachine
from duplet_core.front_state import Input, State
from duplet_core.ids import Role
from duplet_core.messages import (
    Accepted,
    Credit,
    End,
    Failed,
    Finished,
    Handed,
    Refused,
    StoppedAtOnce,
)
from tests.core.drivers import FrontDriver
from tests.core.samples import ROW, T1, kinds, pick, sent, submit

FINISHED = Finished("r1", T1, True, 3, 1, (1, 2, 3))


def in_state(state: State) -> FrontDriver:
    """A machine with one request, brought there by events alone."""
    front = FrontDriver()
    if state is State.QUEUED:
        front.hear(Role.DECODE, Credit(16, 16, 0, 0))
    front.feed(submit())
    if state is State.HANDED:
        front.hear(Role.PREFILL, Handed("r1", T1))
    if state is State.STREAMING:
        front.hear(Role.DECODE, Accepted("r1", T1, 1, ROW))
    assert front.machine.requests[T1].state is state
    return front


MESSAGES: dict[Input, Any] = {
    Input.CANCEL: Cancel(T1, Reason.CANCELLED),
    Input.DEADLINE: None,
    Input.REFUSED: Refused("r1", T1, Reason.OVERLOADED, "full"),
    Input.FAILED: Failed("r1", T1, Reason.KV_MISMATCH, "page 2"),
    Input.STOPPED_AT_ONCE: StoppedAtOnce("r1", T1, (1, 2, 3)),
    Input.HANDED: Handed("r1", T1),
    Input.ACCEPTED: Accepted("r1", T1, 1, ROW),
    Input.ROWS: ROW,
    Input.FINISHED: FINISHED,
    Input.PREFILL_LOST: None,
    Input.DECODE_LOST: None,
}


def step(front: FrontDriver, what: Input) -> list[Effect]:
    """Apply the input by the table alone, then collect the effects."""
    machine = front.machine
    request = machine.requests[T1]
    machine.TABLE[request.state][what](machine, request, MESSAGES[what], front.now)
    return front.tick()


@dataclass(frozen=True)
class Ending:
    """The client hears this; where peers know the request, both hear End with this reason."""

    reason: Reason | None
    detail: str = ""
    finished: Finished | None = None


@dataclass(frozen=True)
class Stays:
    after: State
    rows: bytes | None = None


IMPOSSIBLE = None
CANCELLED = Ending(Reason.CANCELLED)
LATE = Ending(Reason.DEADLINE, "the request's deadline passed")
NO_PREFILL = Ending(Reason.PREFILL_LOST, "the stream to prefill ended")
NO_DECODE = Ending(Reason.DECODE_LOST, "the stream to decode ended")

EXPECTED: dict[State, dict[Input, Ending | Stays | None]] = {
    State.QUEUED: {
        **dict.fromkeys(Input, IMPOSSIBLE),
        Input.CANCEL: CANCELLED,
        Input.DEADLINE: LATE,
        Input.PREFILL_LOST: NO_PREFILL,
        Input.DECODE_LOST: NO_DECODE,
    },
    State.PENDING: {
        Input.CANCEL: CANCELLED,
        Input.DEADLINE: LATE,
        Input.REFUSED: Ending(Reason.OVERLOADED, "full"),
        Input.FAILED: Ending(Reason.KV_MISMATCH, "page 2"),
        Input.STOPPED_AT_ONCE: Ending(None, "", Finished("r1", T1, True, 0, 0, (1, 2, 3))),
        Input.HANDED: Stays(State.HANDED),
        Input.ACCEPTED: Stays(State.STREAMING, ROW),
        Input.ROWS: Stays(State.PENDING),
        Input.FINISHED: Stays(State.PENDING),
        Input.PREFILL_LOST: NO_PREFILL,
        Input.DECODE_LOST: NO_DECODE,
    },
    State.HANDED: {
        Input.CANCEL: CANCELLED,
        Input.DEADLINE: LATE,
        Input.REFUSED: Ending(Reason.OVERLOADED, "full"),
        Input.FAILED: Ending(Reason.KV_MISMATCH, "page 2"),
        Input.STOPPED_AT_ONCE: Stays(State.HANDED),
        Input.HANDED: Stays(State.HANDED),
        Input.ACCEPTED: Stays(State.STREAMING, ROW),
        Input.ROWS: Stays(State.HANDED),
        Input.FINISHED: Stays(State.HANDED),
        Input.PREFILL_LOST: Stays(State.HANDED),
        Input.DECODE_LOST: NO_DECODE,
    },
    State.STREAMING: {
        Input.CANCEL: CANCELLED,
        Input.DEADLINE: LATE,
        Input.REFUSED: Stays(State.STREAMING),
        Input.FAILED: Ending(Reason.KV_MISMATCH, "page 2"),
        Input.STOPPED_AT_ONCE: Stays(State.STREAMING),
        Input.HANDED: Stays(State.STREAMING),
        Input.ACCEPTED: Stays(State.STREAMING),
        Input.ROWS: Stays(State.STREAMING, ROW),
        Input.FINISHED: Ending(None, "", FINISHED),
        Input.PREFILL_LOST: Stays(State.STREAMING),
        Input.DECODE_LOST: NO_DECODE,
    },
}


def test_every_pair_is_decided_and_no_other_is() -> None:
    assert set(FrontMachine.TABLE) == set(State) == set(EXPECTED)
    for state in State:
        assert set(FrontMachine.TABLE[state]) == set(Input) == set(EXPECTED[state])


@pytest.mark.parametrize("what", list(Input), ids=lambda i: i.name)
@pytest.mark.parametrize("state", list(State), ids=lambda s: s.name)
def test_each_pair_does_what_is_documented(state: State, what: Input) -> None:
    front = in_state(state)
    expected = EXPECTED[state][what]
    if expected is None:
        with pytest.raises(InvariantError):
            step(front, what)
        return
    effects = step(front, what)
    told = sent(effects, Role.PREFILL), sent(effects, Role.DECODE)
    if isinstance(expected, Stays):
        assert front.machine.requests[T1].state is expected.after
        assert told == ([], [])
        assert pick(effects, Ended) == []
        rows = [] if expected.rows is None else [Rows(T1, expected.rows)]
        assert pick(effects, Rows) == rows
        return
    ended = Ended(T1, expected.reason, expected.detail, expected.finished)
    assert pick(effects, Ended) == [ended]
    assert front.machine.requests == {}
    end = End("r1", T1, expected.reason)
    assert told == (([], []) if state is State.QUEUED else ([end], [end]))
    assert kinds(effects)[0] is Ended, "the client hears first"
    # Nothing of it is left behind: late messages about it change nothing.
    for late in (MESSAGES[Input.ACCEPTED], MESSAGES[Input.FAILED], FINISHED):
        assert front.hear(Role.DECODE, late) == []
