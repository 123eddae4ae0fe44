from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from duplet_core.effects import Received, StreamClosed, StreamOpened
from duplet_core.errors import InvariantError, Reason, RemoteProtocolError
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.messages import Abort, Drop, Hello, Message
from duplet_runtime.health import Health
from duplet_runtime.peers import MAX_HALF_OPEN, Acceptor, Dialer
from duplet_runtime.server import (
    create_server,
    peer_channel_options,
    peer_server_options,
    public_server_options,
    running_server,
)

METHOD = "/t.Peer/Stream"
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Hello, Abort, Drop)}


def encode(message: Message) -> bytes:
    return type(message).__name__.encode() + b" " + msgspec.json.encode(message)


def decode(proto: bytes) -> Message:
    name, _, body = proto.partition(b" ")
    if name.decode() not in KINDS:
        raise RemoteProtocolError("no such message")
    message: Message = msgspec.json.decode(body, type=KINDS[name.decode()])
    return message


def hello(number: int = 1) -> Hello:
    return Hello(Role.DECODE, InstanceId("d" * 32), 1, number)


def abort(number: int) -> Abort:
    return Abort(TransferId(f"{number:032x}"))


def method(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(METHOD)


def make_dialer(address: str, take: Callable[[Any], None], **more: Any) -> Dialer[bytes]:
    return Dialer(Role.KVPROXY, address, method, encode, decode, take, **more)


def make_acceptor(
    take: Callable[[Any], None], fatal: Callable[[BaseException], None], **more: Any
) -> Acceptor[bytes]:
    return Acceptor(Role.DECODE, encode, decode, take, fatal, **more)


def raise_it(error: BaseException) -> None:
    raise error


@asynccontextmanager
async def serving(acceptor: Acceptor[bytes], address: str) -> AsyncIterator[None]:
    async def stream(_requests: Any, context: Any) -> None:
        await acceptor.serve(context)

    health = Health([])
    server = create_server(peer_server_options(), health, raise_it)
    handler: Any = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("t.Peer", {"Stream": handler}),)
    )
    async with running_server(server, [address], health, [], 5):
        try:
            yield
        finally:
            acceptor.close_all(Reason.DRAINING, "test over")


@asynccontextmanager
async def dialing(dialer: Dialer[bytes]) -> AsyncIterator[None]:
    task = asyncio.create_task(dialer.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def address(run_dir: Path) -> str:
    return f"unix:{run_dir}/p.sock"


async def test_messages_go_both_ways_in_order(record: Any, address: str) -> None:
    near, far = record(), record()
    acceptor = make_acceptor(far.take, raise_it)
    dialer = make_dialer(address, near.take)
    async with serving(acceptor, address), dialing(dialer):
        await near.until(lambda r: r == [StreamOpened(Role.KVPROXY, 1)])
        dialer.send(1, hello())
        for number in range(200):
            dialer.send(1, abort(number))
        await far.until(lambda r: len(r) == 201)
        assert far[0] == Received(Role.DECODE, 1, hello())
        assert [event.message for event in far[1:]] == [abort(n) for n in range(200)]
        for number in range(200):
            acceptor.send(1, abort(number))
        await near.until(lambda r: len(r) == 201)
        assert near[1:] == [Received(Role.KVPROXY, 1, abort(n)) for n in range(200)]
    assert near[-1] == StreamClosed(Role.KVPROXY, 1)
    await far.until(lambda r: r[-1] == StreamClosed(Role.DECODE, 1))
    assert len(near) == len(far) == 202


async def test_a_service_that_leaves_says_its_last_words(record: Any, address: str) -> None:
    near, far = record(), record()
    acceptor = make_acceptor(far.take, raise_it)

    def greet(event: Any) -> None:
        near.take(event)
        if event == StreamOpened(Role.KVPROXY, 1):
            dialer.send(1, hello())

    dialer = make_dialer(address, greet)
    async with serving(acceptor, address), dialing(dialer):
        await far.until(lambda r: len(r) == 1)
        for number in range(100):
            acceptor.send(1, abort(number))
        acceptor.close_all(Reason.DRAINING, "the service stops")
        await near.until(lambda r: StreamClosed(Role.KVPROXY, 1) in r)
        await far.until(lambda r: r[-1] == StreamClosed(Role.DECODE, 1))
    said = [event.message for event in near if isinstance(event, Received)]
    assert said == [abort(number) for number in range(100)]


async def test_close_ends_a_stream_once_and_it_is_redialed(record: Any, address: str) -> None:
    near, far = record(), record()
    acceptor = make_acceptor(far.take, raise_it)

    def greet(event: Any) -> None:
        near.take(event)
        if isinstance(event, StreamOpened):
            dialer.send(event.stream, hello(event.stream))

    dialer = make_dialer(address, greet)
    async with serving(acceptor, address), dialing(dialer):
        await far.until(lambda r: len(r) == 1)
        acceptor.close(1, Reason.SUPERSEDED, "for the test")
        acceptor.close(1, Reason.SUPERSEDED, "again")
        acceptor.send(1, abort(1))
        await far.until(lambda r: len(r) == 3)
        assert far[1:] == [StreamClosed(Role.DECODE, 1), Received(Role.DECODE, 2, hello(2))]
        dialer.close(2, Reason.STALE_STREAM, "for the test")
        dialer.send(2, abort(1))
        await far.until(lambda r: len(r) == 5)
        assert far[3:] == [StreamClosed(Role.DECODE, 2), Received(Role.DECODE, 3, hello(3))]
        acceptor.send(1, abort(1))
        dialer.send(2, abort(1))
        acceptor.send(3, abort(3))
        await near.until(lambda r: r[-1] == Received(Role.KVPROXY, 3, abort(3)))
    assert near == [
        StreamOpened(Role.KVPROXY, 1),
        StreamClosed(Role.KVPROXY, 1),
        StreamOpened(Role.KVPROXY, 2),
        StreamClosed(Role.KVPROXY, 2),
        StreamOpened(Role.KVPROXY, 3),
        Received(Role.KVPROXY, 3, abort(3)),
        StreamClosed(Role.KVPROXY, 3),
    ]


async def test_a_dialer_says_why_its_stream_was_refused(record: Any, address: str) -> None:
    """In words that tell the status: a peer of another version is not just away."""
    near = record()

    def refuse(event: Any) -> None:
        if isinstance(event, Received):
            acceptor.close(event.stream, Reason.VERSION_MISMATCH, "decode speaks 2, its peer 3")

    def greet(event: Any) -> None:
        near.take(event)
        if isinstance(event, StreamOpened):
            dialer.send(event.stream, hello(event.stream))

    acceptor = make_acceptor(refuse, raise_it)
    dialer = make_dialer(address, greet)
    async with serving(acceptor, address), dialing(dialer):
        await near.until(lambda r: len(r) >= 4)
    assert near.whys[:2] == ["FAILED_PRECONDITION: decode speaks 2, its peer 3"] * 2


async def test_dialer_waits_for_a_peer_and_for_its_successor(record: Any, address: str) -> None:
    near = record()
    dialer = make_dialer(address, near.take)
    async with dialing(dialer):
        async with serving(make_acceptor(record().take, raise_it), address):
            await near.until(lambda r: StreamOpened(Role.KVPROXY, 1) in r)
        await near.until(lambda r: StreamClosed(Role.KVPROXY, 1) in r)
        async with serving(make_acceptor(record().take, raise_it), address):
            await near.until(lambda r: StreamOpened(Role.KVPROXY, 2) in r)
    assert near == [kind(Role.KVPROXY, n) for n in (1, 2) for kind in (StreamOpened, StreamClosed)]


@asynccontextmanager
async def calling(acceptor: Acceptor[bytes], address: str) -> AsyncIterator[Any]:
    """A bare client of the acceptor's method."""
    async with (
        serving(acceptor, address),
        grpc.aio.insecure_channel(address, options=peer_channel_options()) as channel,
    ):
        yield method(channel)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("first", "detail"), [(b"junk", "no such message"), (encode(abort(1)), "Abort before Hello")]
)
async def test_bad_first_message(record: Any, address: str, first: bytes, detail: str) -> None:
    far = record()
    async with calling(make_acceptor(far.take, raise_it), address) as call_peer:
        call = call_peer()
        await call.write(first)
        assert await status_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, detail)
    assert far == []


async def test_malformed_message_ends_its_stream_only(record: Any, address: str) -> None:
    far = record()
    async with calling(make_acceptor(far.take, raise_it), address) as call_peer:
        calls = []
        for number in (1, 2):
            calls.append(call_peer())
            await calls[-1].write(encode(hello()))
            await far.until(lambda r, count=number: len(r) == count)
        good, bad = calls
        await bad.write(b"junk")
        assert (await status_of(bad))[0] == grpc.StatusCode.INVALID_ARGUMENT
        await far.until(lambda r: len(r) == 3)
        await good.write(encode(abort(7)))
        await far.until(lambda r: len(r) == 4)
        good.cancel()
    assert far[2:4] == [StreamClosed(Role.DECODE, 2), Received(Role.DECODE, 1, abort(7))]


async def test_malformed_answer_closes_the_dialers_stream(record: Any, address: str) -> None:
    near, far = record(), record()

    def odd(message: Message) -> bytes:
        return b"junk"

    acceptor: Acceptor[bytes] = Acceptor(Role.DECODE, odd, decode, far.take, raise_it)
    dialer = make_dialer(address, near.take)
    async with serving(acceptor, address), dialing(dialer):
        await near.until(lambda r: len(r) == 1)
        dialer.send(1, hello())
        await far.until(lambda r: len(r) == 1)
        acceptor.send(1, abort(1))
        await near.until(lambda r: len(r) == 2)
        assert near[1] == StreamClosed(Role.KVPROXY, 1)
        await far.until(lambda r: len(r) == 2)
        assert far[1] == StreamClosed(Role.DECODE, 1)


async def test_half_open_streams_end_and_are_bounded(record: Any, address: str) -> None:
    far = record()
    acceptor = make_acceptor(far.take, raise_it, hello_limit_s=0.3)
    async with calling(acceptor, address) as call_peer:
        calls = [call_peer() for _ in range(MAX_HALF_OPEN + 1)]
        answers = [await status_of(call) for call in calls]
    codes = [code for code, _ in answers]
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 1
    assert codes.count(grpc.StatusCode.INVALID_ARGUMENT) == MAX_HALF_OPEN
    assert far == []


async def read_to_end(call: Any) -> int:
    count = 0
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            count += 1
    return count


async def test_peer_that_does_not_read_loses_its_stream(record: Any, address: str) -> None:
    far = record()
    acceptor = make_acceptor(far.take, raise_it, outbox=50)
    async with calling(acceptor, address) as call_peer:
        call = call_peer()
        await call.write(encode(hello()))
        await far.until(lambda r: len(r) == 1)
        for number in range(51):
            acceptor.send(1, abort(number))
        await far.until(lambda r: len(r) == 2)
        assert far[1] == StreamClosed(Role.DECODE, 1)
        assert await read_to_end(call) < 50
        assert (await status_of(call))[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_close_while_a_write_is_stuck(record: Any, address: str) -> None:
    far = record()
    acceptor = make_acceptor(far.take, raise_it)
    long = replace(hello(), spec="x" * 500_000)
    async with calling(acceptor, address) as call_peer:
        call = call_peer()
        await call.write(encode(hello()))
        await far.until(lambda r: len(r) == 1)
        for _ in range(100):
            acceptor.send(1, long)
        assert await call.read() == encode(long)
        acceptor.close(1, Reason.SUPERSEDED, "for the test")
        await far.until(lambda r: len(r) == 2)
        assert await read_to_end(call) < 99
        assert await status_of(call) == (grpc.StatusCode.ABORTED, "for the test")


async def test_dialers_outbox_is_bounded(record: Any, address: str) -> None:
    near = record()
    dialer = make_dialer(address, near.take, outbox=50)
    async with serving(make_acceptor(record().take, raise_it), address), dialing(dialer):
        await near.until(lambda r: len(r) == 1)
        for number in range(51):
            dialer.send(1, abort(number))
        await near.until(lambda r: len(r) == 2)
        assert near[1] == StreamClosed(Role.KVPROXY, 1)


async def test_error_of_the_event_taker_is_fatal(record: Any, address: str) -> None:
    def take(event: Any) -> None:
        raise InvariantError("wrong state")

    fatal = record()
    acceptor = make_acceptor(take, fatal.take)
    near = record()
    dialer = make_dialer(address, near.take)

    async def stream(_requests: Any, context: Any) -> None:
        with suppress(InvariantError):
            await acceptor.serve(context)

    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("t.Peer", {"Stream": handler}),)
    )
    server.add_insecure_port(address)
    await server.start()
    async with dialing(dialer):
        await near.until(lambda r: len(r) == 1)
        dialer.send(1, hello())
        await fatal.until(lambda r: len(r) >= 1)
        assert isinstance(fatal[0], InvariantError)
    await server.stop(None)

    broken = make_dialer(address, take)
    async with serving(make_acceptor(record().take, raise_it), address):
        with pytest.raises(InvariantError):
            await broken.run()


CHILD = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from test_runtime_peers import make_acceptor, raise_it, serving

async def main():
    async with serving(make_acceptor(lambda event: None, raise_it), sys.argv[1]):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def start_child(address: str) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).parent)
    return subprocess.Popen([sys.executable, "-c", CHILD, address, here])


async def test_stopped_peer_is_noticed(record: Any, address: str) -> None:
    child = start_child(address)
    try:
        near = record()
        dialer = make_dialer(address, near.take)
        async with dialing(dialer):
            await near.until(lambda r: len(r) == 1)
            dialer.send(1, hello())
            os.kill(child.pid, signal.SIGSTOP)
            await near.until(lambda r: StreamClosed(Role.KVPROXY, 1) in r)
            os.kill(child.pid, signal.SIGCONT)
            await near.until(lambda r: StreamOpened(Role.KVPROXY, 2) in r)
    finally:
        child.kill()
        child.wait()


def test_peers_take_longer_messages_than_clients_may_send() -> None:
    """Else a request that lb has taken could end the stream that all requests share."""
    name = "grpc.max_receive_message_length"
    client = dict(public_server_options())[name]
    for options in (peer_server_options(), peer_channel_options()):
        assert int(dict(options)[name]) >= int(client) + 65_536
