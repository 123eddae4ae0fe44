"""Messages that wait for a stream travel together, and arrive as if each had come by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from duplet.kvproxy.v1 import kvproxy_pb2
from duplet_core.effects import Received, StreamClosed
from duplet_core.errors import Reason
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role, TransferId
from duplet_core.messages import Abort, AbortAck, Hello, Message, TransferFailed
from duplet_runtime.peer_stream import (
    OUTBOX_ANSWERS,
    OUTBOX_MESSAGES,
    TOGETHER_BYTES,
    TOGETHER_MESSAGES,
    PeerStream,
    StreamEnd,
)
from duplet_runtime.peers import Acceptor
from duplet_runtime.server import PEER_MESSAGE_BYTES
from duplet_wire.streams import CODECS

NEAR = CODECS[Role.KVPROXY, Role.DECODE]
FAR = CODECS[Role.DECODE, Role.KVPROXY]


def ack(number: int) -> AbortAck:
    return AbortAck(TransferId(f"{number:032x}"))


def failed(number: int, size: int) -> TransferFailed:
    return TransferFailed(TransferId(f"{number:032x}"), "x" * size)


async def written(messages: Sequence[Message], together: bool = True) -> list[Any]:
    """The envelopes that go out when all of `messages` wait."""
    stream: PeerStream[Any] = PeerStream(1, NEAR.decode, OUTBOX_MESSAGES, together)
    envelopes: list[Any] = []

    async def read() -> object:
        return await asyncio.get_running_loop().create_future()

    async def write(envelope: Any) -> None:
        envelopes.append(type(envelope).FromString(envelope.SerializeToString()))

    for message in messages:
        stream.put(NEAR.encode(message))
    stream.finish_when_sent(None, "all is said")
    async with asyncio.timeout(30):
        await stream.run(read, write, lambda message: pytest.fail(str(message)))
        await stream.settle()
    return envelopes


async def heard(
    envelopes: Sequence[Any], codec: Any, take: Callable[[PeerStream[Any], Message], None]
) -> StreamEnd:
    """Let a stream read `envelopes`; how it ends."""
    stream: PeerStream[Any] = PeerStream(1, codec.decode, OUTBOX_MESSAGES, True)
    coming = iter(envelopes)

    async def read() -> object:
        envelope = next(coming, None)
        if envelope is None:
            stream.finish(None, "all was read")
        return envelope

    async def write(_: Any) -> None:
        pytest.fail("nothing to say")

    async with asyncio.timeout(30):
        end = await stream.run(read, write, lambda message: take(stream, message))
        await stream.settle()
    return end


def count_parts(envelopes: Sequence[Any]) -> list[int]:
    return [1 + len(envelope.more) for envelope in envelopes]


async def test_what_waits_goes_together_and_arrives_in_order() -> None:
    messages = [ack(number) for number in range(TOGETHER_MESSAGES + 5)]
    envelopes = await written(messages)
    assert count_parts(envelopes) == [TOGETHER_MESSAGES, 5]
    got: list[Message] = []
    end = await heard(envelopes, FAR, lambda _, message: got.append(message))
    assert end.reason is None
    assert got == messages


async def test_large_messages_go_alone() -> None:
    half = TOGETHER_BYTES // 2
    sizes = (TOGETHER_BYTES, 10, half, half, half - 200, 10, 2 * TOGETHER_BYTES)
    envelopes = await written([failed(number, size) for number, size in enumerate(sizes)])
    assert count_parts(envelopes) == [1, 2, 3, 1]


async def test_peers_without_the_field_get_each_message_by_itself() -> None:
    assert count_parts(await written([ack(1), ack(2)], together=False)) == [1, 1]
    assert not CODECS[Role.LB, Role.DECODE].together, "lb's peers"


async def test_nothing_is_heard_behind_the_end_of_a_stream() -> None:
    (envelope,) = await written([ack(1), ack(2), ack(3)])
    got: list[Message] = []

    def take(stream: PeerStream[Any], message: Message) -> None:
        got.append(message)
        if message == ack(2):
            stream.finish(Reason.SUPERSEDED, "in the middle")

    assert (await heard([envelope], FAR, take)).reason is Reason.SUPERSEDED
    assert got == [ack(1), ack(2)]


async def test_more_within_more_and_an_empty_part_are_refused() -> None:
    nested, part, empty = (FAR.encode(Abort(TransferId("a" * 32))) for _ in range(3))
    part.more.append(empty)
    nested.more.append(part)
    empty.more.add()
    for envelope, detail in ((nested, "one of these has more"), (empty, "is empty")):
        got: list[Message] = []
        end = await heard([envelope], NEAR, lambda _, message, got=got: got.append(message))  # type: ignore[misc]
        assert end.reason is Reason.PEER_PROTOCOL
        assert detail in end.detail
        assert got == [Abort(TransferId("a" * 32))]


async def test_more_than_a_peer_ever_sends_together_is_refused_unheard() -> None:
    """What comes as one is acted on in one turn of the loop, so it has a bound."""
    (most,) = await written([ack(number) for number in range(TOGETHER_MESSAGES)])
    got: list[Message] = []
    assert (await heard([most], FAR, lambda _, message: got.append(message))).reason is None
    assert len(got) == TOGETHER_MESSAGES
    most.more.append(NEAR.encode(ack(TOGETHER_MESSAGES)))
    million = type(most).FromString(b"\x7a\x00" * 1_000_000)
    for envelope, count in ((most, TOGETHER_MESSAGES), (million, 1_000_000)):
        end = await heard([envelope], FAR, lambda _, message: pytest.fail(str(message)))
        assert end.reason is Reason.PEER_PROTOCOL
        assert f"{count} messages behind one, most are {TOGETHER_MESSAGES - 1}" in end.detail


def test_messages_within_messages_without_end_are_no_message() -> None:
    """protobuf's parser refuses what it would have to descend into for ever."""
    deep = b""
    for _ in range(2000):
        size = len(deep)
        length = bytes([size]) if size < 128 else bytes([128 | size & 127, size >> 7])
        deep = b"\x7a" + length + deep
    with pytest.raises(DecodeError):
        kvproxy_pb2.ConnectDecodeRequest.FromString(deep)


@pytest.mark.parametrize("first", [Hello, Abort])
async def test_a_batch_that_begins_a_stream_is_heard_from_its_hello_on(first: type[Any]) -> None:
    """At a real acceptor: a Hello lets what follows in, and nothing but a Hello does; a second
    one, and whatever stands behind it, is not acted on."""
    hello = Hello(Role.DECODE, InstanceId("d" * 32), PROTOCOL_VERSION, 1)
    words: list[Message] = [hello, Abort(TransferId("a" * 32)), hello, Abort(TransferId("b" * 32))]
    envelope, *more = [FAR.encode(word) for word in words[0 if first is Hello else 1 :]]
    for part in more:
        envelope.more.append(part)
    events: list[Any] = []

    def take(event: Any) -> None:
        events.append(event)
        if len(events) == 3:  # as core does with a second Hello
            acceptor.close(1, Reason.PEER_PROTOCOL, "second hello on a stream")

    acceptor: Acceptor[Any] = Acceptor(
        Role.DECODE,
        NEAR.encode,
        NEAR.decode,
        take,
        lambda error: pytest.fail(str(error)),
        together=True,
    )
    context = FakeContext(envelope)
    with pytest.raises(grpc.aio.AbortError):
        await acceptor.serve(context)  # type: ignore[arg-type]
    if first is Hello:
        assert events == [*(Received(Role.DECODE, 1, word) for word in words[:3]), events[-1]]
        assert events[-1] == StreamClosed(Role.DECODE, 1)
    else:
        assert events == []
        assert "Abort before Hello" in context.status


class FakeContext:
    """A call that brings one envelope and no more."""

    def __init__(self, envelope: Any) -> None:
        self._coming = [envelope]
        self.status = ""

    async def read(self) -> Any:
        if self._coming:
            return self._coming.pop()
        return await asyncio.get_running_loop().create_future()

    async def write(self, _: Any) -> None:
        pytest.fail("nothing to say")

    async def abort_with_status(self, status: Any) -> None:
        self.status = status.details
        raise grpc.aio.AbortError


def test_all_that_a_hello_may_list_can_wait_to_be_answered() -> None:
    ids = tuple(TransferId(f"{number:032x}") for number in range(1000))
    listed = FAR.encode(Hello(Role.DECODE, InstanceId("d" * 32), PROTOCOL_VERSION, 1, held=ids))
    assert PEER_MESSAGE_BYTES / (listed.ByteSize() / 1000) < OUTBOX_ANSWERS
