"""Prefill's table: every input in every state, with the state, pages and messages after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from duplet_core import engine
from duplet_core.effects import Effect
from duplet_core.errors import InvariantError, Reason
from duplet_core.ids import Role, TransferId
from duplet_core.messages import (
    Drop,
    End,
    Failed,
    Handoff,
    Move,
    SourceReleased,
    StoppedAtOnce,
)
from duplet_core.prefill_jobs import Jobs
from duplet_core.prefill_state import Input, State
from tests.core.drivers import PrefillDriver
from tests.core.samples import (
    DIGESTS,
    PREFILL_CONFIG,
    PROMPT_ROWS,
    ROW,
    T1,
    WRITER1,
    chunk,
    kinds,
    last_chunk,
    prefill,
    sent,
    to_engine,
)

BIG = TransferId("fills-the-pool")
SEQ = 1
END = End("r1", T1, Reason.CANCELLED)


def in_state(state: State, *, moved: bool = True) -> PrefillDriver:
    """A machine with one transfer, brought there by events alone; `moved`: a part has left."""
    driver = PrefillDriver()
    if state is State.QUEUED:
        driver.hear(Role.LB, prefill("big", BIG, PREFILL_CONFIG.pages * PREFILL_CONFIG.page_rows))
        driver.hear(Role.LB, prefill())
    else:
        driver.hear(Role.LB, prefill())
        if moved:
            driver.say(chunk(SEQ))
    if state is State.HANDED:
        driver.say(last_chunk(SEQ, after_first=moved, stopped=not moved))
    if state in (State.STOPPING, State.OWED):
        driver.hear(Role.LB, END)
    if state is State.OWED:
        driver.say(engine.Stopped(SEQ, None))
    assert driver.machine.jobs.by_transfer[T1].state is state
    return driver


MESSAGES: dict[Input, Any] = {
    Input.END: END,
    Input.CHUNK: chunk(SEQ, rows=8),
    Input.LAST_CHUNK: last_chunk(SEQ, after_first=True),
    Input.ENGINE_FAILED: engine.SeqFailed(SEQ, "out of memory"),
    Input.STOPPED: engine.Stopped(SEQ, None),
    Input.RELEASED: SourceReleased(T1, landed=False),
    Input.WRITER_LOST: None,
    Input.WRITER_DIED: None,
}


def step(driver: PrefillDriver, what: Input) -> list[Effect]:
    """Apply the input by the table alone, then collect the effects."""
    jobs = driver.machine.jobs
    jobs.step(jobs.by_transfer[T1], what, MESSAGES[what], driver.now)
    return driver.tick()


@dataclass(frozen=True)
class Outcome:
    """`after` None: the transfer is forgotten and its pages are free."""

    after: State | None
    lb: tuple[type, ...] = ()
    writer: tuple[type, ...] = ()
    engine: tuple[type, ...] = ()


IMPOSSIBLE = None
GONE = Outcome(None)
BROKE = Outcome(State.STOPPING, lb=(Failed,), engine=(engine.Stop,))

# A part of the prompt is with the writer, which owes a SourceReleased.
EXPECTED: dict[State, dict[Input, Outcome | None]] = {
    State.QUEUED: {
        **dict.fromkeys(Input, IMPOSSIBLE),
        Input.END: GONE,
    },
    State.COMPUTING: {
        Input.END: Outcome(State.STOPPING, writer=(Drop,), engine=(engine.Stop,)),
        Input.CHUNK: Outcome(State.COMPUTING, writer=(Move,)),
        Input.LAST_CHUNK: Outcome(State.HANDED, writer=(Move,)),
        Input.ENGINE_FAILED: Outcome(State.STOPPING, lb=(Failed,), writer=(Drop,)),
        Input.STOPPED: IMPOSSIBLE,
        Input.RELEASED: BROKE,
        Input.WRITER_LOST: BROKE,
        Input.WRITER_DIED: BROKE,
    },
    State.HANDED: {
        Input.END: Outcome(State.OWED, writer=(Drop,)),
        Input.CHUNK: IMPOSSIBLE,
        Input.LAST_CHUNK: IMPOSSIBLE,
        Input.ENGINE_FAILED: IMPOSSIBLE,
        Input.STOPPED: IMPOSSIBLE,
        Input.RELEASED: GONE,
        Input.WRITER_LOST: Outcome(State.HANDED),
        Input.WRITER_DIED: GONE,
    },
    State.STOPPING: {
        Input.END: Outcome(State.STOPPING),
        Input.CHUNK: Outcome(State.STOPPING),
        Input.LAST_CHUNK: Outcome(State.OWED),
        Input.ENGINE_FAILED: Outcome(State.STOPPING),
        Input.STOPPED: Outcome(State.OWED),
        Input.RELEASED: Outcome(State.STOPPING),
        Input.WRITER_LOST: Outcome(State.STOPPING),
        Input.WRITER_DIED: Outcome(State.STOPPING),
    },
    State.OWED: {
        Input.END: Outcome(State.OWED),
        Input.CHUNK: IMPOSSIBLE,
        Input.LAST_CHUNK: IMPOSSIBLE,
        Input.ENGINE_FAILED: IMPOSSIBLE,
        Input.STOPPED: IMPOSSIBLE,
        Input.RELEASED: GONE,
        Input.WRITER_LOST: Outcome(State.OWED),
        Input.WRITER_DIED: GONE,
    },
}

# Nothing has left yet: no writer is told of an end, and none is waited for.
NOTHING_MOVED: list[tuple[State, Input, Outcome]] = [
    (State.COMPUTING, Input.END, Outcome(State.STOPPING, engine=(engine.Stop,))),
    (State.COMPUTING, Input.CHUNK, Outcome(State.COMPUTING, writer=(Move,))),
    (State.COMPUTING, Input.LAST_CHUNK, Outcome(State.HANDED, writer=(Move,))),
    (State.COMPUTING, Input.ENGINE_FAILED, Outcome(State.STOPPING, lb=(Failed,))),
    (State.HANDED, Input.END, GONE),
    (State.STOPPING, Input.STOPPED, GONE),
    (State.STOPPING, Input.LAST_CHUNK, GONE),
]


def test_every_pair_is_decided_and_no_other_is() -> None:
    assert set(Jobs.TABLE) == set(State) == set(EXPECTED)
    for state in State:
        assert set(Jobs.TABLE[state]) == set(Input) == set(EXPECTED[state])


def check(driver: PrefillDriver, what: Input, expected: Outcome) -> None:
    waiting = driver.machine.jobs.by_transfer[T1].state is State.QUEUED
    held = PREFILL_CONFIG.pages if waiting else 3
    effects = step(driver, what)
    assert kinds(sent(effects, Role.LB)) == expected.lb
    assert kinds(sent(effects, Role.KVPROXY)) == expected.writer
    assert kinds(to_engine(effects)) == expected.engine
    job = driver.machine.jobs.by_transfer.get(T1)
    assert (None if job is None else job.state) == expected.after
    if expected.after is None and not waiting:
        held = 0
    assert driver.free_pages == PREFILL_CONFIG.pages - held
    if not waiting:
        over = expected.after in (None, State.STOPPING, State.OWED)
        assert (len(driver.machine.jobs.by_key) == 0) is over, "an ended request's id is free"
        named = expected.after in (State.COMPUTING, State.STOPPING)
        assert (SEQ in driver.machine.jobs.by_seq) is named


@pytest.mark.parametrize("what", list(Input), ids=lambda i: i.name)
@pytest.mark.parametrize("state", list(State), ids=lambda s: s.name)
def test_each_pair_does_what_is_documented(state: State, what: Input) -> None:
    driver = in_state(state)
    expected = EXPECTED[state][what]
    if expected is None:
        with pytest.raises(InvariantError):
            step(driver, what)
    else:
        check(driver, what, expected)


@pytest.mark.parametrize(
    ("state", "what", "expected"), NOTHING_MOVED, ids=lambda p: getattr(p, "name", "")
)
def test_where_nothing_has_moved_no_writer_is_asked(
    state: State, what: Input, expected: Outcome
) -> None:
    check(in_state(state, moved=False), what, expected)


# --- what the transitions say ---------------------------------------------------


def test_parts_leave_as_they_are_computed() -> None:
    driver = PrefillDriver()
    effects = driver.hear(Role.LB, prefill())
    start = engine.Start(1, (0, 1, 2), ROW * PROMPT_ROWS, 0, 0, prefill().sampling)
    assert to_engine(effects) == [start]
    received_ns = driver.now
    driver.now += 100
    # Six rows end in the middle of a page, which therefore travels twice.
    assert sent(driver.say(chunk(1)), Role.KVPROXY) == [Move(T1, 0, 6, (0, 1))]
    handoff = Handoff(ROW, DIGESTS, (received_ns, received_ns, 12, 13, 14, 15))
    effects = driver.say(last_chunk(1, after_first=True))
    assert sent(effects, Role.KVPROXY) == [Move(T1, 6, 4, (1, 2), handoff)]
    assert driver.free_pages == 5
    driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False))
    assert driver.free_pages == 8


@pytest.mark.parametrize("moved", [True, False])
def test_a_stop_row_at_once_moves_nothing_more(moved: bool) -> None:
    driver = in_state(State.COMPUTING, moved=moved)
    effects = driver.say(last_chunk(SEQ, stopped=True, after_first=moved))
    assert sent(effects, Role.KVPROXY) == []
    assert sent(effects, Role.LB) == [
        StoppedAtOnce("r1", T1, (driver.now, driver.now, 12, 13, 14, 15))
    ]
    effects = driver.hear(Role.LB, End("r1", T1, None))
    assert sent(effects, Role.KVPROXY) == ([Drop(T1)] if moved else [])
    if moved:
        assert driver.free_pages == 5
        driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False))
    assert driver.free_pages == 8
    assert driver.machine.jobs.by_transfer == {}


@pytest.mark.parametrize("last", [True, False])
def test_a_computed_part_without_a_writer_fails_the_request(last: bool) -> None:
    driver = PrefillDriver()
    driver.hear(Role.LB, prefill())
    driver.lose(Role.KVPROXY)
    effects = driver.say(last_chunk(1) if last else chunk(1))
    assert sent(effects, Role.LB) == [
        Failed("r1", T1, Reason.WRITER_LOST, "the stream to kvproxy ended")
    ]
    if not last:
        driver.say(engine.Stopped(1, None))
    assert driver.free_pages == 8


@pytest.mark.parametrize("released_first", [True, False])
def test_pages_wait_for_both_the_engine_and_the_writer(released_first: bool) -> None:
    driver = in_state(State.STOPPING)
    events: list[Callable[[], object]] = [
        lambda: driver.hear(Role.KVPROXY, SourceReleased(T1, landed=False)),
        lambda: driver.say(engine.Stopped(SEQ, None)),
    ]
    first, second = events if released_first else reversed(events)
    first()
    assert driver.free_pages == 5
    second()
    assert driver.free_pages == 8


def test_a_transfer_stays_with_the_writer_of_its_first_move() -> None:
    driver = in_state(State.COMPUTING)
    assert driver.machine.jobs.by_transfer[T1].writer == WRITER1


@pytest.mark.parametrize(
    "message",
    [
        engine.SeqFailed(9, ""),
        engine.Stopped(9, None),
        chunk(9),
        engine.StepDone(1, (), b"", (), 1, 2),
    ],
)
def test_the_engine_speaks_of_open_sequences_and_of_prefill_only(message: Any) -> None:
    with pytest.raises(InvariantError):
        in_state(State.COMPUTING).say(message)
