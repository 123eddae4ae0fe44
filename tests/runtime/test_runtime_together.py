"""Messages that wait for a stream travel together, and arrive as if each had come by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from duplet_core.errors import Reason
from duplet_core.ids import Role, TransferId
from duplet_core.messages import Abort, AbortAck, Message, TransferFailed
from duplet_runtime.peer_stream import (
    OUTBOX_MESSAGES,
    TOGETHER_BYTES,
    TOGETHER_MESSAGES,
    PeerStream,
    StreamEnd,
)
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
