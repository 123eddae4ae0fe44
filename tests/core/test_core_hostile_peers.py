"""Peers that say anything that the wire lets through, in any order: their stream may end, a
request may fail, but the machine's own state stays right and nothing is raised."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_core import engine
from duplet_core.decode import DecodeMachine
from duplet_core.effects import Close, Effect
from duplet_core.errors import Reason, RemoteProtocolError
from duplet_core.front import FrontMachine
from duplet_core.ids import Role, TransferId
from duplet_core.messages import (
    Abort,
    AbortAck,
    Accepted,
    Admit,
    Credit,
    Drop,
    End,
    Failed,
    Finished,
    Grant,
    Handed,
    Landed,
    Leaving,
    Message,
    Move,
    Prefill,
    Refused,
    Refusing,
    Route,
    SourceReleased,
    Started,
    StepRows,
    StoppedAtOnce,
    TransferBroken,
    TransferFailed,
)
from duplet_core.prefill import PrefillMachine
from duplet_core.writer import WriterMachine
from duplet_wire.streams import CODECS
from tests.core.drivers import DecodeDriver, Driver, FrontDriver, PrefillDriver, WriterDriver
from tests.core.samples import HANDOFF, PAGE_ROWS, ROW, SAMPLING, pick, submit, to_engine

IDS = st.sampled_from([TransferId(letter * 32) for letter in "abc"])
NAMES = st.sampled_from(["r1", "r2", "r3"])
SMALL = st.integers(0, 20)
ROWS = st.integers(1, 20) | st.sampled_from([2**31, 2**32 - 1])
PAGES = st.lists(st.integers(0, 18) | st.just(2**32 - 1), max_size=6).map(tuple)
REASONS = st.sampled_from(list(Reason))
HANDOFFS = st.none() | st.just(HANDOFF)

PREFILLS = st.builds(
    lambda name, transfer, rows: Prefill(name, transfer, ROW * rows, rows, SAMPLING),
    NAMES,
    IDS,
    st.integers(1, 60),
)
STEPS = st.lists(SMALL, min_size=1, max_size=4).map(
    lambda ids: StepRows(1, tuple(ids), ROW * len(ids))
)
CREDITS = st.builds(Credit, SMALL, SMALL, SMALL, SMALL, st.none() | REASONS)
FINISHED = st.builds(Finished, NAMES, IDS, st.booleans(), SMALL, SMALL, st.just((1, 2, 3)))
ENDS = st.builds(End, NAMES, IDS, st.none() | REASONS)
FAILED = st.builds(Failed, NAMES, IDS, REASONS, st.just(""))

SAYS: dict[tuple[Role, Role], st.SearchStrategy[Any]] = {
    (Role.LB, Role.PREFILL): PREFILLS | ENDS,
    (Role.LB, Role.DECODE): st.builds(Admit, NAMES, IDS, ROWS, ROWS, st.just(SAMPLING)) | ENDS,
    (Role.PREFILL, Role.LB): st.one_of(
        FAILED,
        st.builds(StoppedAtOnce, NAMES, IDS, st.just((1, 2, 3)), SMALL),
        st.builds(Handed, NAMES, IDS),
        st.builds(Refusing, st.none() | REASONS),
    ),
    (Role.DECODE, Role.LB): st.one_of(
        CREDITS,
        st.builds(Refused, NAMES, IDS, REASONS, st.just("")),
        FAILED,
        st.builds(Accepted, NAMES, IDS, SMALL, st.just(ROW)),
        STEPS,
        FINISHED,
    ),
    (Role.PREFILL, Role.KVPROXY): st.builds(Move, IDS, SMALL, ROWS, PAGES, HANDOFFS)
    | st.builds(Drop, IDS),
    (Role.DECODE, Role.KVPROXY): st.builds(Grant, IDS, PAGES, ROWS) | st.builds(Abort, IDS),
    (Role.KVPROXY, Role.PREFILL): st.builds(SourceReleased, IDS, st.booleans()),
    (Role.KVPROXY, Role.DECODE): st.one_of(
        st.builds(Started, IDS),
        st.builds(Landed, IDS, ROWS, st.just(HANDOFF)),
        st.builds(TransferFailed, IDS, st.just("")),
        st.builds(TransferBroken, IDS, st.just("")),
        st.builds(AbortAck, IDS),
        st.builds(Leaving),
        st.builds(Route, st.just("shm")),
    ),
}


def over_the_wire(speaker: Role, hearer: Role, message: Message) -> Message | None:
    """The message as it arrives; None when the wire's checks stop it."""
    proto = CODECS[speaker, hearer].encode(message)
    try:
        return CODECS[hearer, speaker].decode(proto)
    except RemoteProtocolError:
        return None


def hear(driver: Driver[Any], peer: Role, message: Message) -> list[Effect]:
    """Let the machine hear it, and connect again where that ended the stream."""
    arrived = over_the_wire(peer, driver.machine.ROLE, message)
    if arrived is None:
        return []
    effects = driver.hear(peer, arrived)
    for close in pick(effects, Close):
        assert close.reason is Reason.PEER_PROTOCOL
        assert close.detail
    if driver.machine.links[peer].current is None:
        reconnect(driver, peer)
    return effects


def reconnect(driver: Driver[Any], peer: Role) -> None:
    if isinstance(driver, FrontDriver) and peer is Role.DECODE:
        driver.connect(peer, credit=Credit(16, 16, 4, 0))
    else:
        driver.connect(peer)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_prefill_survives_lb_and_kvproxy(data: st.DataObject) -> None:
    driver = PrefillDriver()
    running: list[engine.Start] = []
    for _ in range(data.draw(st.integers(1, 15))):
        peer = data.draw(st.sampled_from([Role.LB, Role.KVPROXY]))
        said = data.draw(SAYS[peer, Role.PREFILL])
        for order in to_engine(hear(driver, peer, said)):
            if isinstance(order, engine.Start):
                running.append(order)
            elif isinstance(order, engine.Stop):
                running = [start for start in running if start.seq != order.seq]
                driver.say(engine.Stopped(order.seq, None))
        assert driver.free_pages >= 0
    assert all(len(start.pages) * PAGE_ROWS >= len(start.rows) // len(ROW) for start in running)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_decode_survives_lb_and_kvproxy(data: st.DataObject) -> None:
    driver = DecodeDriver()
    for _ in range(data.draw(st.integers(1, 15))):
        peer = data.draw(st.sampled_from([Role.LB, Role.KVPROXY]))
        said = data.draw(SAYS[peer, Role.DECODE])
        for order in to_engine(hear(driver, peer, said)):
            if isinstance(order, engine.Stop):
                driver.say(engine.Stopped(order.seq, None))
        driver.transfers.ledger.check()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_kvproxy_survives_prefill_and_decode(data: st.DataObject) -> None:
    driver = WriterDriver()
    for _ in range(data.draw(st.integers(1, 15))):
        ends = data.draw(st.booleans())
        if ends and driver.copies:
            driver.end_copy()
        peer = data.draw(st.sampled_from([Role.PREFILL, Role.DECODE]))
        hear(driver, peer, data.draw(SAYS[peer, Role.KVPROXY]))
        for copy in driver.copies:
            assert len(copy.source_pages) == len(copy.dest_pages)
            assert all(page < 16 for page in copy.source_pages + copy.dest_pages)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_lb_survives_prefill_and_decode(data: st.DataObject) -> None:
    driver = FrontDriver()
    for _ in range(data.draw(st.integers(1, 15))):
        if data.draw(st.booleans()):
            driver.feed(submit(data.draw(NAMES), data.draw(IDS)))
        peer = data.draw(st.sampled_from([Role.PREFILL, Role.DECODE]))
        hear(driver, peer, data.draw(SAYS[peer, Role.LB]))
    assert set(driver.machine.requests) <= {TransferId(letter * 32) for letter in "abc"}


@pytest.mark.parametrize(("speaker", "hearer"), list(SAYS))
def test_something_of_every_peer_gets_through(speaker: Role, hearer: Role) -> None:
    """Else these tests would show nothing."""

    @given(SAYS[speaker, hearer])
    @settings(max_examples=30, deadline=None, database=None)
    def arrives(message: Message) -> None:
        arrived.add(over_the_wire(speaker, hearer, message))

    arrived: set[Message | None] = set()
    arrives()
    assert len(arrived - {None}) >= 3


@pytest.mark.parametrize(("speaker", "hearer"), list(SAYS))
def test_everything_that_a_machine_hears_is_said(speaker: Role, hearer: Role) -> None:
    machines = (DecodeMachine, FrontMachine, PrefillMachine, WriterMachine)
    (machine,) = [machine for machine in machines if machine.ROLE is hearer]

    @given(SAYS[speaker, hearer])
    @settings(max_examples=300, deadline=None, database=None)
    def say(message: Message) -> None:
        said.add(type(message))

    said: set[type] = set()
    say()
    assert said == {kind for peer, kind in machine._HANDLERS if peer is speaker}
