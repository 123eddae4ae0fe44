"""Hello: who may hold the stream to us, and whose messages count (S4, S11, Reconnect)."""

from __future__ import annotations

from typing import Any

import pytest

from duplet_core.effects import (
    Close,
    Effect,
    Event,
    InstanceDied,
    LifelineUp,
    OtherVersion,
    Received,
    Send,
    SetHealth,
    StreamClosed,
    StreamOpened,
)
from duplet_core.errors import InvariantError, Reason
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_core.link import Link
from duplet_core.messages import Abort, AbortAck, End, Grant, Hello, Landed
from tests.core.drivers import DecodeDriver, FrontDriver, PrefillDriver, WriterDriver
from tests.core.samples import (
    DECODE1,
    DECODE2,
    HANDOFF,
    LB1,
    LB2,
    STRANGER,
    T1,
    T2,
    WRITER1,
    WRITER2,
    admit,
    counted,
    grant,
    hello,
    pick,
    sent,
    submit,
    whole_move,
)


def refusal(effects: list[Effect]) -> Reason | None:
    closes = pick(effects, Close)
    assert len(closes) <= 1
    return closes[0].reason if closes else None


def lb_says(driver: DecodeDriver | PrefillDriver, stream: int, said: Hello) -> Reason | None:
    return refusal(driver.feed(Received(Role.LB, stream, said)))


# --- what an acceptor refuses -------------------------------------------------


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_of_the_protocol_is_refused(version: int) -> None:
    decode = DecodeDriver(connected=False)
    said = hello(Role.LB, LB1, 1, version=version)
    effects = decode.feed(Received(Role.LB, 1, said))
    assert refusal(effects) is Reason.VERSION_MISMATCH
    assert decode.machine.instance_of(Role.LB) is None
    assert sent(effects, Role.LB) == [], "no Hello of ours to a peer we cannot understand"
    assert counted(effects, "hellos_refused") == 1


def test_a_dialer_refuses_another_version_too() -> None:
    decode = DecodeDriver(connected=False)
    decode.feed(LifelineUp(Role.KVPROXY, WRITER1))
    decode.feed(StreamOpened(Role.KVPROXY, 1))
    said = hello(Role.KVPROXY, WRITER1, 1, to=DECODE1, version=PROTOCOL_VERSION + 1)
    effects = decode.feed(Received(Role.KVPROXY, 1, said))
    assert refusal(effects) is Reason.VERSION_MISMATCH
    assert decode.machine.links[Role.KVPROXY].pending is None


def protocol_health(effects: list[Effect]) -> list[SetHealth]:
    return [h for h in pick(effects, SetHealth) if h.name.startswith("protocol.")]


@pytest.mark.parametrize("on_lifeline", [False, True])
@pytest.mark.parametrize(
    ("driver", "peer"),
    [(WriterDriver, Role.PREFILL), (WriterDriver, Role.DECODE), (DecodeDriver, Role.LB)],
)
def test_health_says_that_a_peer_of_another_version_was_refused(
    driver: type[Any], peer: Role, on_lifeline: bool
) -> None:
    """Until one comes that speaks ours; while one has the stream, nothing is missing."""
    machine = driver(connected=False)
    name = f"protocol.{peer}"
    words = f"{peer} speaks transfer protocol 2, its peer speaks {PROTOCOL_VERSION}"

    def refuse(number: int) -> list[SetHealth]:
        if on_lifeline:
            event: Event = OtherVersion(peer, 2)
        else:
            event = Received(peer, number, hello(peer, STRANGER, number, version=2))
        effects: list[Effect] = machine.feed(event)
        assert counted(effects, "hellos_refused") == 1
        return protocol_health(effects)

    assert refuse(100) == [SetHealth(name, False, words, for_ready=False)]
    spoken = f"{peer} speaks transfer protocol {PROTOCOL_VERSION}"
    assert protocol_health(machine.connect(peer)) == [
        SetHealth(name, True, spoken, for_ready=False)
    ]
    assert refuse(101) == []
    assert protocol_health(machine.lose(peer)) == []
    assert refuse(102) == [SetHealth(name, False, words, for_ready=False)]
    assert protocol_health(machine.connect(peer)) == [
        SetHealth(name, True, spoken, for_ready=False)
    ]


def test_whom_we_dial_is_told_by_its_own_condition() -> None:
    decode = DecodeDriver(connected=False)
    assert protocol_health(decode.feed(OtherVersion(Role.KVPROXY, 2))) == []
    assert protocol_health(decode.connect(Role.KVPROXY)) == []


def peer_health(effects: list[Effect]) -> list[tuple[bool, str]]:
    return [(h.ok, h.detail) for h in pick(effects, SetHealth) if h.name.startswith("peer.")]


@pytest.mark.parametrize(
    ("driver", "peer"),
    [(DecodeDriver, Role.KVPROXY), (PrefillDriver, Role.KVPROXY), (FrontDriver, Role.DECODE)],
)
def test_health_says_why_a_peer_refuses_us(driver: type[Any], peer: Role) -> None:
    """Also where there never was a stream: a peer of another version is not just away."""
    machine = driver(connected=False)
    if peer is Role.KVPROXY:
        machine.feed(LifelineUp(peer, WRITER1))
    for number in (1, 2):
        machine.feed(StreamOpened(peer, number))
        why = "FAILED_PRECONDITION: it speaks transfer protocol 3, its peer speaks 2"
        effects = machine.feed(StreamClosed(peer, number, why))
        assert peer_health(effects) == [(False, f"no stream to {peer}: {why}")]
        assert machine.machine.links[peer].pending is None
    # One that ends without words was not there before, either: nothing new to tell.
    machine.feed(StreamOpened(peer, 3))
    assert peer_health(machine.feed(StreamClosed(peer, 3))) == []


def test_health_says_why_a_stream_that_counted_is_gone() -> None:
    decode = DecodeDriver()
    closed = StreamClosed(Role.KVPROXY, decode.stream(Role.KVPROXY), "UNAVAILABLE: it stops")
    assert peer_health(decode.feed(closed)) == [
        (False, "no stream to kvproxy: UNAVAILABLE: it stops")
    ]


def test_another_role_is_refused() -> None:
    decode = DecodeDriver(connected=False)
    assert lb_says(decode, 1, hello(Role.PREFILL, LB1, 1)) is Reason.PEER_PROTOCOL


def test_a_hello_for_our_predecessor_is_refused() -> None:
    decode = DecodeDriver(connected=False)
    assert lb_says(decode, 1, hello(Role.LB, LB1, 1, to=DECODE2)) is Reason.OTHER_INSTANCE
    assert lb_says(decode, 2, hello(Role.LB, LB1, 2, to=DECODE1)) is None


def test_streams_of_one_instance_grow_in_number() -> None:
    decode = DecodeDriver(connected=False)
    assert lb_says(decode, 11, hello(Role.LB, LB1, 5)) is None
    assert lb_says(decode, 12, hello(Role.LB, LB1, 5)) is Reason.STALE_STREAM
    assert lb_says(decode, 13, hello(Role.LB, LB1, 4)) is Reason.STALE_STREAM
    assert decode.stream(Role.LB) == 11, "a refused Hello supersedes nothing"
    decode.feed(StreamClosed(Role.LB, 11))
    assert lb_says(decode, 14, hello(Role.LB, LB1, 5)) is Reason.STALE_STREAM
    assert lb_says(decode, 15, hello(Role.LB, LB1, 6)) is None
    assert decode.stream(Role.LB) == 15


def test_the_same_instance_supersedes_its_older_stream() -> None:
    decode = DecodeDriver(connected=False)
    lb_says(decode, 1, hello(Role.LB, LB1, 1))
    effects = decode.feed(Received(Role.LB, 2, hello(Role.LB, LB1, 2)))
    (close,) = pick(effects, Close)
    assert (close.stream, close.reason) == (1, Reason.SUPERSEDED)
    assert decode.stream(Role.LB) == 2
    # The old stream's end, reported later, ends nothing.
    decode.feed(StreamClosed(Role.LB, 1))
    assert decode.stream(Role.LB) == 2


def test_another_instance_supersedes_nobody() -> None:
    decode = DecodeDriver(connected=False)
    lb_says(decode, 1, hello(Role.LB, LB1, 1))
    assert lb_says(decode, 2, hello(Role.LB, LB2, 9)) is Reason.OTHER_INSTANCE
    assert decode.machine.instance_of(Role.LB) == LB1
    decode.feed(StreamClosed(Role.LB, 1))
    assert lb_says(decode, 3, hello(Role.LB, LB2, 10)) is None


def test_without_a_lifeline_nobody_speaks_to_the_writer() -> None:
    writer = WriterDriver(connected=False)
    said = hello(Role.DECODE, DECODE1, 1)
    assert refusal(writer.feed(Received(Role.DECODE, 1, said))) is Reason.NO_LIFELINE
    writer.feed(LifelineUp(Role.DECODE, DECODE2, 16, 4))
    again = hello(Role.DECODE, DECODE1, 2)
    assert refusal(writer.feed(Received(Role.DECODE, 2, again))) is Reason.NO_LIFELINE
    writer.feed(LifelineUp(Role.DECODE, DECODE1, 16, 4))
    third = hello(Role.DECODE, DECODE1, 3)
    assert refusal(writer.feed(Received(Role.DECODE, 3, third))) is None


def test_the_dead_are_not_heard_any_more() -> None:
    writer = WriterDriver()
    old_stream = writer.stream(Role.DECODE)
    effects = writer.bury(Role.DECODE)
    assert refusal(effects) is Reason.PEER_DIED
    # What its sockets still hold: messages, another Hello, another lifeline.
    buffered = writer.feed(Received(Role.DECODE, old_stream, grant()))
    assert counted(buffered, "stale_messages") == 1
    assert writer.machine.transfers.by_id == {}
    writer.feed(LifelineUp(Role.DECODE, DECODE1, 16, 4))
    assert writer.machine.links[Role.DECODE].watched is None
    late = writer.feed(Received(Role.DECODE, 99, hello(Role.DECODE, DECODE1, 99)))
    assert refusal(late) is Reason.PEER_DIED


# --- a dialer's streams -------------------------------------------------------


def test_a_dialer_without_a_lifeline_says_nothing() -> None:
    decode = DecodeDriver(connected=False)
    effects = decode.feed(StreamOpened(Role.KVPROXY, 1))
    assert refusal(effects) is Reason.NO_LIFELINE
    assert sent(effects, Role.KVPROXY) == []
    decode.feed(StreamClosed(Role.KVPROXY, 1))
    decode.feed(LifelineUp(Role.KVPROXY, WRITER1))
    effects = decode.feed(StreamOpened(Role.KVPROXY, 2))
    assert sent(effects, Role.KVPROXY) == [hello(Role.DECODE, DECODE1, 2, to=WRITER1)]


def dialing(stream: int = 3) -> DecodeDriver:
    """Our Hello to the first writer is out, not answered."""
    decode = DecodeDriver(connected=False)
    decode.feed(LifelineUp(Role.KVPROXY, WRITER1))
    decode.feed(StreamOpened(Role.KVPROXY, stream))
    return decode


def test_only_the_answer_to_the_pending_stream_counts() -> None:
    decode = dialing(stream=3)
    said = hello(Role.KVPROXY, WRITER1, 2, to=DECODE1)
    assert refusal(decode.feed(Received(Role.KVPROXY, 2, said))) is Reason.STALE_STREAM
    assert decode.machine.links[Role.KVPROXY].pending == 3
    other_number = hello(Role.KVPROXY, WRITER1, 2, to=DECODE1)
    refused = decode.feed(Received(Role.KVPROXY, 3, other_number))
    assert refusal(refused) is Reason.STALE_STREAM
    assert decode.machine.links[Role.KVPROXY].pending is None
    decode.feed(StreamClosed(Role.KVPROXY, 3))
    decode.feed(StreamOpened(Role.KVPROXY, 4))
    answer = hello(Role.KVPROXY, WRITER1, 4, to=DECODE1)
    assert refusal(decode.feed(Received(Role.KVPROXY, 4, answer))) is None
    assert decode.machine.instance_of(Role.KVPROXY) == WRITER1


def test_an_answer_from_an_instance_that_is_not_watched_is_refused() -> None:
    decode = dialing()
    answer = hello(Role.KVPROXY, WRITER2, 3, to=DECODE1)
    assert refusal(decode.feed(Received(Role.KVPROXY, 3, answer))) is Reason.NO_LIFELINE


def test_a_newer_lifeline_voids_the_hello_on_its_way_to_the_older_instance() -> None:
    # The list in that Hello was of the older instance's transfers.
    decode = dialing()
    decode.feed(LifelineUp(Role.KVPROXY, WRITER2))
    answer = hello(Role.KVPROXY, WRITER1, 3, to=DECODE1)
    assert refusal(decode.feed(Received(Role.KVPROXY, 3, answer))) is Reason.NO_LIFELINE


def test_an_answer_after_its_sender_died_is_refused() -> None:
    decode = dialing()
    decode.feed(InstanceDied(Role.KVPROXY, WRITER1))
    answer = hello(Role.KVPROXY, WRITER1, 3, to=DECODE1)
    assert refusal(decode.feed(Received(Role.KVPROXY, 3, answer))) is Reason.PEER_DIED


def test_messages_before_the_answering_hello_do_not_count() -> None:
    decode = dialing()
    effects = decode.feed(Received(Role.KVPROXY, 3, AbortAck(T1)))
    assert counted(effects, "stale_messages") == 1
    assert decode.machine.links[Role.KVPROXY].pending == 3


def test_one_dialed_stream_at_a_time() -> None:
    with pytest.raises(InvariantError, match="one dialed stream"):
        dialing().feed(StreamOpened(Role.KVPROXY, 4))
    with pytest.raises(InvariantError, match="one dialed stream"):
        DecodeDriver().feed(StreamOpened(Role.KVPROXY, 4))


def test_a_stream_to_a_peer_that_dials_is_our_fault() -> None:
    with pytest.raises(InvariantError, match="which dials"):
        DecodeDriver().feed(StreamOpened(Role.LB, 4))


def test_a_pending_stream_that_ends_may_be_followed_by_another() -> None:
    decode = dialing()
    decode.feed(StreamClosed(Role.KVPROXY, 3))
    effects = decode.feed(StreamOpened(Role.KVPROXY, 4))
    assert [type(e) for e in effects if isinstance(e, Send)] == [Send]


# --- what a stream may carry --------------------------------------------------


def test_a_second_hello_ends_the_stream() -> None:
    decode = DecodeDriver()
    stream = decode.stream(Role.LB)
    decode.hear(Role.LB, admit())
    effects = decode.feed(Received(Role.LB, stream, hello(Role.LB, LB1, 9)))
    assert refusal(effects) is Reason.PEER_PROTOCOL
    assert decode.machine.instance_of(Role.LB) is None
    assert sent(effects, Role.KVPROXY) == [Abort(T1)], "its requests end with it"


def test_a_message_that_this_peer_may_not_send_ends_the_stream() -> None:
    for driver in (DecodeDriver(), PrefillDriver()):
        effects = driver.hear(Role.LB, Grant(T1, (0,), 1))
        assert refusal(effects) is Reason.PEER_PROTOCOL
        assert driver.machine.instance_of(Role.LB) is None


def test_messages_of_an_older_stream_are_dropped_and_counted() -> None:
    # The fault this rule removes: an old ABORT_ACK, delivered late, frees a page too early.
    decode = DecodeDriver()
    old = decode.stream(Role.KVPROXY)
    decode.hear(Role.LB, admit())
    decode.lose(Role.KVPROXY)
    decode.connect(Role.KVPROXY)
    for message in (AbortAck(T1), Landed(T1, 10, HANDOFF)):
        effects = decode.feed(Received(Role.KVPROXY, old, message))
        assert counted(effects, "stale_messages") == 1
    assert T1 in decode.transfers.by_transfer


def test_an_event_for_another_machine_is_our_fault() -> None:
    for driver in (DecodeDriver(), PrefillDriver(), WriterDriver()):
        with pytest.raises(InvariantError, match="unknown event Submit"):
            driver.feed(submit())


def test_a_requests_end_by_another_lb_life_is_not_heard() -> None:
    decode = DecodeDriver()
    decode.hear(Role.LB, admit("r1", T1))
    decode.hear(Role.LB, End("r1", T2, Reason.CANCELLED))
    assert T1 in decode.transfers.by_transfer


def test_a_link_remembers_the_dead_and_the_newest_in_bounded_room() -> None:
    link = Link(Role.LB, DECODE1, dials=False, needs_lifeline=False)
    for n in range(1_000):
        instance = InstanceId(f"lb-{n:04}")
        assert link.check_hello(n, hello(Role.LB, instance, 1)) is None
        link.accept(n, hello(Role.LB, instance, 1))
        assert link.bury(instance) == n
        link.close(n)
    assert link.is_dead(InstanceId("lb-0999"))
    assert len(link._dead) == len(link._newest) == 64


def test_death_of_a_stranger_ends_no_stream() -> None:
    writer = WriterDriver()
    writer.bury(Role.DECODE, STRANGER)
    assert writer.machine.instance_of(Role.DECODE) == DECODE1


def test_a_superseded_dialers_transfers_are_decided_before_its_hello_is_answered() -> None:
    # Prefill's last Move may be lost with the old stream: its transfer ends, then it is heard.
    writer = WriterDriver()
    writer.hear(Role.PREFILL, whole_move())
    effects = writer.connect(Role.PREFILL, held=(T1,))
    assert [type(m).__name__ for m in sent(effects, Role.PREFILL)] == ["Hello", "SourceReleased"]


def test_what_stood_behind_a_message_that_cut_its_stream_is_not_heard() -> None:
    """Messages come together: those behind the one that ended the stream are there already."""
    writer = WriterDriver()
    number = writer.stream(Role.DECODE)
    effects = writer.feed(Received(Role.DECODE, number, grant(T1, (0, 1, 99))))
    assert refusal(effects) is Reason.PEER_PROTOCOL
    for rest in (grant(T2), Abort(T1)):
        effects = writer.feed(Received(Role.DECODE, number, rest))
        assert counted(effects, "stale_messages") == 1
        assert sent(effects, Role.DECODE) == []
    assert writer.machine.transfers.by_id == {}
    assert writer.hear(Role.PREFILL, whole_move(T2)) == [], "it waits: there is no grant"
    # A new stream lists what decode granted on the old one; nothing of it may be written.
    effects = writer.connect(Role.DECODE, held=(T1, T2))
    assert [m.transfer for m in sent(effects, Role.DECODE) if isinstance(m, AbortAck)] == [T1, T2]
    assert writer.copies == []


def test_a_batch_of_grant_abort_and_grant_again_permits_nothing_after_its_ack() -> None:
    """In the order in which they were said, also when all three come as one before any Move."""
    writer = WriterDriver()
    said = [*sent(writer.hear(Role.DECODE, grant(T1)), Role.DECODE)]
    said += sent(writer.hear(Role.DECODE, Abort(T1)), Role.DECODE)
    said += sent(writer.hear(Role.DECODE, grant(T2)), Role.DECODE)
    assert said == [AbortAck(T1)]
    assert writer.hear(Role.PREFILL, whole_move(T1)) == [], "it waits for a grant that is gone"
    writer.hear(Role.PREFILL, whole_move(T2))
    assert [copy.transfer for copy in writer.copies] == [T2]
