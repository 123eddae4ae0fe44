"""Decode's table: every input in every state, with the state, pages and messages after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from duplet_core import engine
from duplet_core.decode_state import Input, State
from duplet_core.decode_transfers import Transfers
from duplet_core.effects import Effect
from duplet_core.errors import InvariantError, Reason
from duplet_core.ids import Role
from duplet_core.ledger import PageState
from duplet_core.messages import (
    Abort,
    AbortAck,
    Accepted,
    End,
    Failed,
    Finished,
    Landed,
    Started,
    TransferBroken,
    TransferFailed,
)
from tests.core.drivers import DecodeDriver
from tests.core.samples import (
    HANDOFF,
    PROMPT_ROWS,
    ROW,
    T1,
    admit,
    kinds,
    sent,
    to_engine,
)

PAGES = 4


def in_state(state: State) -> DecodeDriver:
    """A machine with one transfer, brought there by events alone."""
    decode = DecodeDriver()
    decode.hear(Role.LB, admit())
    if state in (State.VERIFYING, State.RUNNING, State.STOPPING):
        decode.hear(Role.KVPROXY, Landed(T1, PROMPT_ROWS, HANDOFF))
    if state in (State.RUNNING, State.STOPPING):
        decode.say(engine.Verified(1, T1, True, ""))
    if state in (State.STOPPING, State.QUARANTINED):
        decode.hear(Role.LB, End("r1", T1, Reason.CANCELLED))
    assert decode.transfers.by_transfer[T1].state is state
    return decode


MESSAGES: dict[Input, Any] = {
    Input.STARTED: Started(T1),
    Input.LANDED: Landed(T1, PROMPT_ROWS, HANDOFF),
    Input.FAILED: TransferFailed(T1, "copy refused"),
    Input.BROKEN: TransferBroken(T1, "copy failed"),
    Input.ACK: AbortAck(T1),
    Input.WRITER_LOST: None,
    Input.WRITER_DIED: None,
    Input.END: End("r1", T1, Reason.CANCELLED),
    Input.DEADLINE: None,
    Input.VERIFIED: engine.Verified(1, T1, True, ""),
    Input.MISMATCH: engine.Verified(1, T1, False, "page 2"),
    Input.ENGINE_END: (True, engine.StepDone(1, (), b"", ((1, True),), 20, 21)),
    Input.ENGINE_FAILED: engine.SeqFailed(1, "out of memory"),
    Input.STOPPED: engine.Stopped(1, None),
}


def step(decode: DecodeDriver, what: Input) -> list[Effect]:
    """Apply the input by the table alone, then collect the effects."""
    t = decode.transfers.by_transfer[T1]
    decode.transfers.step(t, what, MESSAGES[what], decode.now)
    return decode.tick()


@dataclass(frozen=True)
class Outcome:
    """`after` None: the transfer is forgotten and its pages are free."""

    after: State | None
    lb: tuple[type, ...] = ()
    writer: tuple[type, ...] = ()
    engine: tuple[type, ...] = ()


IMPOSSIBLE = None
GONE = Outcome(None)
PAGES_IN = {
    State.GRANTED: PageState.GRANTED,
    State.VERIFYING: PageState.LIVE,
    State.RUNNING: PageState.LIVE,
    State.STOPPING: PageState.LIVE,
    State.QUARANTINED: PageState.QUARANTINED,
    None: PageState.FREE,
}
WRITER_SAYS = (
    Input.STARTED,
    Input.LANDED,
    Input.FAILED,
    Input.BROKEN,
    Input.ACK,
    Input.WRITER_LOST,
    Input.WRITER_DIED,
)


def same(state: State, *inputs: Input) -> dict[Input, Outcome | None]:
    return dict.fromkeys(inputs, Outcome(state))


EXPECTED: dict[State, dict[Input, Outcome | None]] = {
    State.GRANTED: {
        Input.STARTED: Outcome(State.GRANTED),
        Input.LANDED: Outcome(State.VERIFYING, engine=(engine.Verify,)),
        Input.FAILED: Outcome(None, lb=(Failed,)),
        Input.BROKEN: Outcome(State.QUARANTINED, lb=(Failed,), writer=(Abort,)),
        Input.ACK: Outcome(State.GRANTED),
        Input.WRITER_LOST: Outcome(State.QUARANTINED, lb=(Failed,), writer=(Abort,)),
        Input.WRITER_DIED: Outcome(None, lb=(Failed,)),
        Input.END: Outcome(State.QUARANTINED, writer=(Abort,)),
        Input.DEADLINE: Outcome(State.QUARANTINED, lb=(Failed,), writer=(Abort,)),
        Input.VERIFIED: IMPOSSIBLE,
        Input.MISMATCH: IMPOSSIBLE,
        Input.ENGINE_END: IMPOSSIBLE,
        Input.ENGINE_FAILED: IMPOSSIBLE,
        Input.STOPPED: IMPOSSIBLE,
    },
    State.VERIFYING: {
        **same(State.VERIFYING, *WRITER_SAYS),
        Input.END: Outcome(State.STOPPING, engine=(engine.Stop,)),
        Input.DEADLINE: IMPOSSIBLE,
        Input.VERIFIED: Outcome(State.RUNNING, lb=(Accepted,), engine=(engine.Start,)),
        Input.MISMATCH: Outcome(State.STOPPING, lb=(Failed,), engine=(engine.Stop,)),
        Input.ENGINE_END: IMPOSSIBLE,
        Input.ENGINE_FAILED: Outcome(State.STOPPING, lb=(Failed,)),
        Input.STOPPED: IMPOSSIBLE,
    },
    State.RUNNING: {
        **same(State.RUNNING, *WRITER_SAYS),
        Input.END: Outcome(State.STOPPING, engine=(engine.Stop,)),
        Input.DEADLINE: IMPOSSIBLE,
        Input.VERIFIED: IMPOSSIBLE,
        Input.MISMATCH: IMPOSSIBLE,
        Input.ENGINE_END: Outcome(State.STOPPING, lb=(Finished,)),
        Input.ENGINE_FAILED: Outcome(State.STOPPING, lb=(Failed,)),
        Input.STOPPED: IMPOSSIBLE,
    },
    State.STOPPING: {
        **same(State.STOPPING, *WRITER_SAYS),
        Input.END: Outcome(State.STOPPING),
        Input.DEADLINE: IMPOSSIBLE,
        Input.VERIFIED: Outcome(State.STOPPING),
        Input.MISMATCH: Outcome(State.STOPPING),
        Input.ENGINE_END: Outcome(State.STOPPING),
        Input.ENGINE_FAILED: Outcome(State.STOPPING),
        Input.STOPPED: GONE,
    },
    State.QUARANTINED: {
        Input.STARTED: Outcome(State.QUARANTINED),
        Input.LANDED: GONE,
        Input.FAILED: GONE,
        Input.BROKEN: Outcome(State.QUARANTINED),
        Input.ACK: GONE,
        Input.WRITER_LOST: Outcome(State.QUARANTINED),
        Input.WRITER_DIED: GONE,
        Input.END: Outcome(State.QUARANTINED),
        Input.DEADLINE: IMPOSSIBLE,
        Input.VERIFIED: IMPOSSIBLE,
        Input.MISMATCH: IMPOSSIBLE,
        Input.ENGINE_END: IMPOSSIBLE,
        Input.ENGINE_FAILED: IMPOSSIBLE,
        Input.STOPPED: IMPOSSIBLE,
    },
}


def test_every_pair_is_decided_and_no_other_is() -> None:
    assert set(Transfers.TABLE) == set(State) == set(EXPECTED)
    for state in State:
        assert set(Transfers.TABLE[state]) == set(Input) == set(EXPECTED[state])


@pytest.mark.parametrize("what", list(Input), ids=lambda i: i.name)
@pytest.mark.parametrize("state", list(State), ids=lambda s: s.name)
def test_each_pair_does_what_is_documented(state: State, what: Input) -> None:
    decode = in_state(state)
    expected = EXPECTED[state][what]
    if expected is None:
        with pytest.raises(InvariantError):
            step(decode, what)
        return
    effects = step(decode, what)
    assert kinds(sent(effects, Role.LB)) == expected.lb
    assert kinds(sent(effects, Role.KVPROXY)) == expected.writer
    assert kinds(to_engine(effects)) == expected.engine
    t = decode.transfers.by_transfer.get(T1)
    assert (None if t is None else t.state) == expected.after
    assert decode.pages(PAGES_IN[expected.after]) == (16 if expected.after is None else PAGES)
    assert decode.pages(PageState.FREE) == (16 if expected.after is None else 16 - PAGES)
    over = expected.after in (None, State.STOPPING, State.QUARANTINED)
    assert (len(decode.transfers.by_key) == 0) is over, "an ended request's id is free again"
    open_seq = expected.after in (State.VERIFYING, State.RUNNING, State.STOPPING)
    assert (1 in decode.transfers.by_seq) is open_seq


# --- the same inputs as the events that carry them ----------------------------


def test_what_the_transitions_say() -> None:
    decode = in_state(State.GRANTED)
    effects = decode.hear(Role.KVPROXY, Landed(T1, PROMPT_ROWS, HANDOFF))
    verify = engine.Verify(1, T1, (0, 1, 2), PROMPT_ROWS, HANDOFF.digests)
    assert to_engine(effects) == [verify]
    effects = decode.say(engine.Verified(1, T1, True, ""))
    start = engine.Start(1, (0, 1, 2, 3), ROW, PROMPT_ROWS, 6, admit().sampling)
    assert to_engine(effects) == [start]
    assert sent(effects, Role.LB) == [Accepted("r1", T1, 1, ROW)]
    decode.say(engine.StepDone(1, (1,), ROW, (), 30, 31))
    effects = decode.say(engine.StepDone(2, (1,), ROW, ((1, False),), 40, 41))
    (rows, finished) = sent(effects, Role.LB)
    assert type(rows).__name__ == "StepRows", "rows leave before the end"
    now = decode.now
    stamps = (*HANDOFF.stamps, now, now, 31, 41)
    told = Finished("r1", T1, False, 3, 1, stamps, admitted_ns=1_000, step_gaps_ns=(10,))
    assert finished == told
    decode.say(engine.Stopped(1, None))
    assert decode.pages(PageState.FREE) == 16


@pytest.mark.parametrize(
    ("what", "reason", "detail"),
    [
        (Input.FAILED, Reason.TRANSFER_FAILED, "copy refused"),
        (Input.BROKEN, Reason.TRANSFER_FAILED, "copy failed"),
        (Input.WRITER_LOST, Reason.WRITER_LOST, "the stream to kvproxy ended"),
        (Input.WRITER_DIED, Reason.WRITER_LOST, "kvproxy has exited"),
        (Input.DEADLINE, Reason.TRANSFER_DEADLINE, "the KV did not land in time"),
    ],
)
def test_a_failed_transfer_says_why(what: Input, reason: Reason, detail: str) -> None:
    effects = step(in_state(State.GRANTED), what)
    assert sent(effects, Role.LB) == [Failed("r1", T1, reason, detail)]


def test_a_step_after_the_end_is_not_told_to_lb() -> None:
    decode = in_state(State.STOPPING)
    effects = decode.say(engine.StepDone(5, (1,), ROW, ((1, True),), 30, 31))
    assert sent(effects, Role.LB) == []


@pytest.mark.parametrize("ok", [True, False])
def test_a_check_that_crossed_the_end_is_counted(ok: bool) -> None:
    decode = in_state(State.VERIFYING)
    decode.hear(Role.LB, End("r1", T1, Reason.CANCELLED))
    decode.say(engine.Verified(1, T1, ok, "page 0"))
    decode.say(engine.Stopped(1, None))
    assert (decode.transfers.kv_checks, decode.transfers.kv_mismatches) == (1, int(not ok))
    assert decode.pages(PageState.FREE) == 16


@pytest.mark.parametrize("kv_ok", [True, False])
def test_the_check_at_the_end_of_a_stream_is_counted(kv_ok: bool) -> None:
    decode = in_state(State.STOPPING)
    decode.say(engine.Stopped(1, kv_ok))
    assert (decode.transfers.kv_checks, decode.transfers.kv_mismatches) == (2, int(not kv_ok))


@pytest.mark.parametrize(
    "message",
    [
        engine.Verified(9, T1, True, ""),
        engine.SeqFailed(9, ""),
        engine.Stopped(9, None),
        engine.StepDone(1, (9,), ROW, (), 1, 2),
        engine.StepDone(1, (), b"", ((9, True),), 1, 2),
        engine.ChunkDone(1, 1, (), None, False, 1, 2),
    ],
)
def test_the_engine_speaks_of_open_sequences_and_of_decode_only(message: Any) -> None:
    with pytest.raises(InvariantError):
        in_state(State.RUNNING).say(message)
