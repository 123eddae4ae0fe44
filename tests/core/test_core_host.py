"""The host's machine: two streams of one lb, one pool, prompts that go on in their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from duplet_core import engine
from duplet_core.effects import Close, Drain, Drained, Effect, Received
from duplet_core.errors import InvariantError, Reason
from duplet_core.host import HostMachine
from duplet_core.host_state import HostConfig, Input, State
from duplet_core.host_stays import Stays
from duplet_core.ids import InstanceId, Role
from duplet_core.messages import (
    Accepted,
    Admit,
    End,
    Failed,
    Finished,
    Hello,
    Prefill,
    Refused,
    StepRows,
    StoppedAtOnce,
)
from duplet_core.prefix import Match
from duplet_pages.prefix import RadixIndex
from tests.core.drivers import Driver
from tests.core.samples import (
    LB1,
    LB2,
    MAX_ROWS,
    PAGE_ROWS,
    PROMPT_ROWS,
    ROW,
    SAMPLING,
    SPEC,
    T1,
    T2,
    T3,
    admit,
    chunk,
    credits_sent,
    hello,
    kinds,
    last_chunk,
    pick,
    prefill,
    sent,
    to_engine,
)

HOST1 = InstanceId("host-1")
CONFIG = HostConfig(pages=10, page_rows=PAGE_ROWS, slots=3, longest_sequence=48, spec=SPEC)
STAY_PAGES = 4
DOORS = (Role.PREFILL, Role.DECODE)
END = End("r1", T1, Reason.CANCELLED)


class HostDriver(Driver[HostMachine]):
    """Its links are named by the role that the host plays; lb is at the other end of both."""

    def __init__(self, config: HostConfig = CONFIG) -> None:
        index = RadixIndex(config.page_rows, len(ROW) // 4)
        super().__init__(HostMachine(HOST1, config, index))
        for door in DOORS:
            self.open(door)

    def open(self, door: Role, lb: InstanceId = LB1) -> list[Effect]:
        self._last_stream += 1
        number = self._last_stream
        said = hello(Role.LB, lb, number, to=self.machine.instance)
        return self.feed(Received(door, number, said))

    def submit(self, *request: Any) -> list[Effect]:
        """Both halves, the Admit first."""
        effects = self.hear(Role.DECODE, admit(*request))
        return effects + self.hear(Role.PREFILL, prefill(*request))

    @property
    def stays(self) -> Stays:
        self.machine.stays.pages.check()
        return self.machine.stays

    @property
    def unused_pages(self) -> int:
        """Free pages and those that only the index holds."""
        pages = self.stays.pages
        held = {p for s in self.stays.by_transfer.values() for p in s.pages}
        return pages.total - len(held)


def in_state(state: State) -> HostDriver:
    driver = HostDriver()
    driver.hear(Role.DECODE, admit())
    if state is State.WAITING:
        # Another request computes the pages that this one begins with.
        driver.submit("r2", T2)
    if state is not State.ANNOUNCED:
        driver.hear(Role.PREFILL, prefill())
    if state in (State.RUNNING, State.STOPPING):
        driver.say(last_chunk(1))
    if state is State.STOPPING:
        driver.hear(Role.DECODE, END)
    assert driver.stays.by_transfer[T1].state is state
    return driver


STEP = engine.StepDone(1, (), b"", ((2, False),), 21, 22)
MESSAGES: dict[Input, Any] = {
    Input.ADMIT: admit(),
    Input.PREFILL: prefill(),
    Input.START: Match(),
    Input.END: END,
    Input.PREFILL_LOST: None,
    Input.CHUNK: chunk(1),
    Input.LAST_CHUNK: last_chunk(1),
    Input.ENGINE_END: (False, STEP),
    Input.ENGINE_FAILED: engine.SeqFailed(1, "out of memory"),
    Input.STOPPED: engine.Stopped(1, None),
}


@dataclass(frozen=True)
class Outcome:
    """`after` None: the request is forgotten and its pages are free."""

    after: State | None
    prefill: tuple[type, ...] = ()
    decode: tuple[type, ...] = ()
    engine: tuple[type, ...] = ()


IMPOSSIBLE = None
GONE = Outcome(None)
STOP = Outcome(State.STOPPING, engine=(engine.Stop,))
ENGINE_FAILED = Outcome(State.STOPPING, decode=(Failed,))
STAYS_STOPPING = Outcome(State.STOPPING)

EXPECTED: dict[State, dict[Input, Outcome | None]] = {
    State.ANNOUNCED: {
        **dict.fromkeys(Input, IMPOSSIBLE),
        Input.ADMIT: Outcome(State.ANNOUNCED),
        Input.PREFILL: Outcome(State.COMPUTING, engine=(engine.Start,)),
        Input.END: GONE,
        Input.PREFILL_LOST: GONE,
    },
    State.WAITING: {
        **dict.fromkeys(Input, IMPOSSIBLE),
        Input.START: Outcome(State.COMPUTING, engine=(engine.Start,)),
        Input.END: GONE,
        Input.PREFILL_LOST: GONE,
    },
    State.COMPUTING: {
        **dict.fromkeys(Input, IMPOSSIBLE),
        Input.END: STOP,
        Input.PREFILL_LOST: STOP,
        Input.CHUNK: Outcome(State.COMPUTING),
        Input.LAST_CHUNK: Outcome(State.RUNNING, decode=(Accepted,), engine=(engine.Start,)),
        Input.ENGINE_FAILED: ENGINE_FAILED,
    },
    State.RUNNING: {
        **dict.fromkeys(Input, IMPOSSIBLE),
        Input.END: STOP,
        Input.PREFILL_LOST: Outcome(State.RUNNING),
        Input.ENGINE_END: Outcome(State.STOPPING, decode=(Finished,)),
        Input.ENGINE_FAILED: ENGINE_FAILED,
    },
    State.STOPPING: {
        **dict.fromkeys(Input, STAYS_STOPPING),
        Input.ADMIT: IMPOSSIBLE,
        Input.PREFILL: IMPOSSIBLE,
        Input.START: IMPOSSIBLE,
        Input.LAST_CHUNK: GONE,
        Input.STOPPED: GONE,
    },
}


def step(driver: HostDriver, what: Input) -> list[Effect]:
    """Apply the input by the table alone, then collect the effects."""
    stays = driver.machine.stays
    stay = stays.by_transfer[T1]
    if what is Input.ADMIT and stay.admit is not None:  # as if the Prefill had come first
        stays.reserved -= stay.reserved
        stay.admit, stay.reserved = None, 0
    stays.step(stay, what, MESSAGES[what], driver.now)
    return driver.tick()


def test_every_pair_is_decided_and_no_other_is() -> None:
    assert set(Stays.TABLE) == set(State) == set(EXPECTED)
    for state in State:
        assert set(Stays.TABLE[state]) == set(Input) == set(EXPECTED[state])


@pytest.mark.parametrize("what", list(Input), ids=lambda i: i.name)
@pytest.mark.parametrize("state", list(State), ids=lambda s: s.name)
def test_each_pair_does_what_is_documented(state: State, what: Input) -> None:
    driver = in_state(state)
    expected = EXPECTED[state][what]
    if expected is None:
        with pytest.raises(InvariantError):
            step(driver, what)
        return
    effects = step(driver, what)
    assert kinds(sent(effects, Role.PREFILL)) == expected.prefill
    assert kinds(sent(effects, Role.DECODE)) == expected.decode
    assert kinds(to_engine(effects)) == expected.engine
    stay = driver.stays.by_transfer.get(T1)
    assert (None if stay is None else stay.state) == expected.after
    over = expected.after in (None, State.STOPPING)
    assert (("r1" in {key.request_id for key in driver.stays.by_key}) is over) is False
    beside = STAY_PAGES if state is State.WAITING else 0
    assert driver.stays.reserved == beside + (0 if expected.after is None else STAY_PAGES)
    if expected.after is None:
        assert driver.unused_pages == CONFIG.pages - beside


# --- one request -------------------------------------------------------------------


def test_a_prompt_goes_on_as_a_stream_in_the_same_pages() -> None:
    driver = HostDriver()
    start, *_ = to_engine(driver.submit())
    assert start == engine.Start(1, (0, 1, 2, 3), ROW * PROMPT_ROWS, 0, 0, SAMPLING)
    assert sent(driver.say(chunk(1)), Role.DECODE) == []
    effects = driver.say(last_chunk(1, after_first=True))
    assert sent(effects, Role.DECODE) == [Accepted("r1", T1, 2, ROW)]
    assert to_engine(effects) == [
        engine.Start(2, (0, 1, 2, 3), ROW, PROMPT_ROWS, MAX_ROWS, SAMPLING)
    ]
    landed_ns = driver.now
    effects = driver.say(engine.StepDone(1, (2,), ROW, ((2, False),), 20, 21))
    computed = (1_000, 1_000, 12, 13, 14, 15)
    stamps = (*computed, 15, 15, 15, landed_ns, landed_ns, 21, 21)
    assert sent(effects, Role.DECODE) == [
        StepRows(1, (2,), ROW),
        Finished("r1", T1, False, 2, 0, stamps, admitted_ns=1_000),
    ]
    driver.say(engine.Stopped(2, None))
    assert driver.stays.by_transfer == {}
    assert driver.unused_pages == CONFIG.pages


def test_the_halves_come_in_either_order() -> None:
    driver = HostDriver()
    assert to_engine(driver.hear(Role.PREFILL, prefill())) == []
    assert driver.stays.reserved == 0
    assert kinds(to_engine(driver.hear(Role.DECODE, admit()))) == (engine.Start,)


def test_a_stop_row_at_once_frees_the_pages() -> None:
    driver = in_state(State.COMPUTING)
    effects = driver.say(last_chunk(1, stopped=True))
    assert sent(effects, Role.PREFILL) == [StoppedAtOnce("r1", T1, (1_000, 1_000, 12, 13, 14, 15))]
    assert sent(effects, Role.DECODE) == []
    assert driver.stays.by_transfer == {}
    for door in DOORS:
        driver.hear(door, End("r1", T1, None))
    assert driver.unused_pages == CONFIG.pages


def test_late_halves_of_an_id_that_came_back_hurt_nobody() -> None:
    """lb ended T1 and uses its id for T2; on prefill's stream all of it comes late."""
    driver = HostDriver()
    driver.hear(Role.DECODE, admit())
    driver.hear(Role.DECODE, END)
    driver.hear(Role.DECODE, admit("r1", T2))
    late = driver.hear(Role.PREFILL, prefill())
    assert [m.reason for m in sent(late, Role.PREFILL) if isinstance(m, Failed)] == [
        Reason.DUPLICATE_REQUEST
    ]
    driver.hear(Role.PREFILL, END)
    assert kinds(to_engine(driver.hear(Role.PREFILL, prefill("r1", T2)))) == (engine.Start,)
    assert set(driver.stays.by_transfer) == {T2}


def test_a_prompt_whose_admit_was_refused_goes_with_its_end() -> None:
    driver = HostDriver()
    driver.hear(Role.PREFILL, prefill("r1", T1, 60))
    effects = driver.hear(Role.DECODE, admit("r1", T1, 60))
    assert [m.reason for m in sent(effects, Role.DECODE) if isinstance(m, Refused)] == [
        Reason.PROMPT_TOO_LONG
    ]
    driver.hear(Role.PREFILL, END)
    assert driver.stays.by_transfer == {}


def test_halves_that_disagree_end_the_stream_that_brought_the_second() -> None:
    driver = HostDriver()
    driver.hear(Role.DECODE, admit())
    effects = driver.hear(Role.PREFILL, prefill("r1", T1, PROMPT_ROWS + 1))
    (close,) = pick(effects, Close)
    assert (close.peer, close.reason) == (Role.PREFILL, Reason.PEER_PROTOCOL)
    assert "11 prompt rows, its Admit says 10" in close.detail
    assert driver.stays.by_transfer == {}


# --- pages, slots, credit -----------------------------------------------------------


def test_credit_counts_reserved_pages_and_slots() -> None:
    driver = HostDriver()
    credit = credits_sent(driver.hear(Role.DECODE, admit()))[-1]
    assert (credit.free_pages, credit.free_slots, credit.admits_seen) == (6, 2, 1)
    assert credit.census.granted_pages == STAY_PAGES
    driver.hear(Role.DECODE, admit("r2", T2))
    effects = driver.hear(Role.DECODE, admit("r3", T3))
    assert [m.reason for m in sent(effects, Role.DECODE) if isinstance(m, Refused)] == [
        Reason.OVERLOADED
    ]
    credit = credits_sent(effects)[-1]
    assert (credit.free_pages, credit.admits_seen) == (2, 3)


def test_cached_pages_are_shared_and_given_up_when_they_are_needed() -> None:
    driver = HostDriver()
    driver.submit()
    driver.say(last_chunk(1))
    effects = driver.submit("r2", T2)
    (start,) = to_engine(effects)
    assert isinstance(start, engine.Start)
    assert start.start_row == 8
    assert start.pages[:2] == (0, 1)
    assert start.pages[2:] == (4, 5)
    assert driver.stays.reserved == 2 * STAY_PAGES, "a shared page is reserved by each"
    driver.hear(Role.DECODE, END)
    driver.hear(Role.DECODE, End("r2", T2, None))
    driver.say(engine.Stopped(2, None))
    driver.say(engine.Stopped(3, None))
    assert (driver.stays.reserved, driver.stays.pages.free) == (0, CONFIG.pages - 2)
    driver.hear(Role.DECODE, admit("r3", T3, 1, 39))
    driver.hear(Role.PREFILL, prefill("r3", T3, 1))
    assert driver.stays.pages.free == 0
    assert len(driver.stays.by_transfer[T3].pages) == CONFIG.pages


def test_one_computes_a_prefix_and_the_others_wait_for_it() -> None:
    driver = HostDriver()
    driver.submit()
    assert to_engine(driver.submit("r2", T2)) == []
    (start,) = (
        m
        for m in to_engine(driver.say(last_chunk(1)))
        if isinstance(m, engine.Start)
        if not m.max_rows
    )
    assert start.start_row == 8


@pytest.mark.parametrize("how", ["cancel", "failure"])
def test_who_waits_for_a_prefix_computes_it_when_the_first_gives_up(how: str) -> None:
    driver = HostDriver()
    driver.submit()
    driver.submit("r2", T2)
    ends: dict[str, Callable[[], list[Effect]]] = {
        "cancel": lambda: driver.hear(Role.PREFILL, END),
        "failure": lambda: driver.say(engine.SeqFailed(1, "no")),
    }
    starts = [m for m in to_engine(ends[how]()) if isinstance(m, engine.Start)]
    assert [(s.start_row, s.pages) for s in starts] == [(0, (4, 5, 6, 7))]


# --- peers ------------------------------------------------------------------------


def test_each_link_says_the_role_that_it_plays() -> None:
    machine = HostMachine(HOST1, CONFIG)
    for number, door in enumerate(DOORS, 1):
        effects = machine.receive(Received(door, number, hello(Role.LB, LB1, number)), 0)
        (answer,) = (m for m in sent(effects, door) if isinstance(m, Hello))
        assert (answer.role, answer.instance, answer.spec) == (door, HOST1, SPEC)
        assert (answer.credit is not None) is (door is Role.DECODE)


def test_decodes_stream_carries_no_prefill_and_the_other_way_round() -> None:
    wrong: list[tuple[Role, Admit | Prefill]] = [
        (Role.DECODE, prefill()),
        (Role.PREFILL, admit()),
    ]
    for door, message in wrong:
        (close,) = pick(HostDriver().hear(door, message), Close)
        assert (close.peer, close.reason) == (door, Reason.PEER_PROTOCOL)


@pytest.mark.parametrize("door", DOORS)
def test_a_lost_stream_ends_what_needs_it(door: Role) -> None:
    driver = HostDriver()
    driver.submit()
    driver.say(last_chunk(1))
    driver.hear(Role.DECODE, admit("r2", T2))
    effects = driver.lose(door)
    assert T2 not in driver.stays.by_transfer
    if door is Role.DECODE:
        assert to_engine(effects) == [engine.Stop(2)]
    else:
        assert to_engine(effects) == []
        assert driver.stays.by_transfer[T1].state is State.RUNNING


def test_rows_of_an_lb_that_is_gone_are_not_told_to_the_next() -> None:
    driver = in_state(State.RUNNING)
    for door in DOORS:
        driver.lose(door)
        driver.open(door, LB2)
    effects = driver.say(engine.StepDone(1, (2,), ROW, (), 20, 21))
    assert sent(effects, Role.DECODE) == []
    driver.say(engine.Stopped(2, None))
    assert driver.unused_pages == CONFIG.pages


def test_drain_finishes_what_is_admitted_and_takes_nothing_new() -> None:
    driver = HostDriver()
    driver.hear(Role.DECODE, admit())
    effects = driver.feed(Drain())
    assert pick(effects, Drained) == []
    assert credits_sent(effects)[-1].refusing is Reason.DRAINING
    refused = driver.hear(Role.DECODE, admit("r2", T2))
    refused += driver.hear(Role.PREFILL, prefill("r2", T2))
    reasons = [m.reason for m in sent(refused, Role.DECODE) if isinstance(m, Refused)]
    reasons += [m.reason for m in sent(refused, Role.PREFILL) if isinstance(m, Failed)]
    assert reasons == [Reason.DRAINING] * 2
    assert kinds(to_engine(driver.hear(Role.PREFILL, prefill()))) == (engine.Start,)
    driver.say(last_chunk(1))
    driver.say(engine.StepDone(1, (2,), ROW, ((2, False),), 20, 21))
    assert kinds(pick(driver.say(engine.Stopped(2, None)), Drained)) == (Drained,)


@pytest.mark.parametrize(
    "message", [chunk(9), engine.Stopped(9, None), engine.Verified(1, T1, True, "")]
)
def test_the_engine_speaks_of_open_sequences(message: Any) -> None:
    with pytest.raises(InvariantError):
        in_state(State.RUNNING).say(message)
