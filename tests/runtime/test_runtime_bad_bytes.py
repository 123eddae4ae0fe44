"""Bytes that are no message, and clients that read nothing: each harms its own call alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from duplet.decode.v1 import decode_pb2
from duplet_core.effects import Received, StreamClosed, StreamOpened
from duplet_core.errors import Reason, Unavailable
from duplet_core.ids import Role
from duplet_core.messages import Hello
from duplet_runtime import status
from duplet_runtime.health import Health
from duplet_runtime.peers import Acceptor, Dialer
from duplet_runtime.server import (
    create_server,
    peer_channel_options,
    public_server_options,
    running_server,
)
from duplet_wire.streams import CODECS

JUNK = b"\xff\xff\xff\xff\xff"
"""No protobuf: a varint that does not end."""
HELLO = Hello(Role.LB, "a" * 32, 1, 1)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(run_dir: Path, handlers: dict[str, Any]) -> AsyncIterator[grpc.aio.Channel]:
    """A guarded server of `/t.T/…` and a channel to it; nothing may be fatal to the server."""
    fatal: list[BaseException] = []
    health = Health([])
    server = create_server(public_server_options(), health, fatal.append)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    address = f"unix:{run_dir}/t.sock"
    options = [
        *peer_channel_options(),
        # A client that reads nothing lets no more than this in.
        ("grpc.http2.lookahead_bytes", 1),
        ("grpc.http2.bdp_probe", 0),
    ]
    async with (
        running_server(server, [address], health, [], 5),
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        yield channel
    assert fatal == []


async def reason_of(call: Any) -> tuple[grpc.StatusCode, list[str]]:
    """The status of a call that ended, and the reasons of its ErrorInfos."""
    code, details = await call.code(), await call.details()
    error = grpc.aio.AioRpcError(
        code, await call.initial_metadata(), await call.trailing_metadata(), details
    )
    found = rpc_status.from_call(error)
    infos = []
    for detail in found.details if found else []:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            infos.append(info.reason)
    return code, infos


@pytest.mark.parametrize("packed", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_packed_request_is_not_unpacked(run_dir: Path, packed: grpc.Compression) -> None:
    """Its length is looked at afterwards only, and a megabyte may hold a gigabyte."""

    async def never(_request: Any, _context: Any) -> None:
        pytest.fail("the handler was called")

    handlers: dict[str, Any] = {"Say": grpc.unary_unary_rpc_method_handler(never)}
    async with serving(run_dir, handlers) as channel:
        method: Any = channel.unary_unary("/t.T/Say")
        call = method(bytes(10_000), compression=packed)
        code, _ = await reason_of(call)
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_request_that_is_no_message_is_refused(run_dir: Path) -> None:
    async def never(_request: Any, _context: Any) -> None:
        pytest.fail("the handler was called")

    parse = decode_pb2.ConnectRequest.FromString
    handlers: dict[str, Any] = {
        "One": grpc.unary_unary_rpc_method_handler(never, parse),
        "Many": grpc.unary_stream_rpc_method_handler(never, parse),
    }
    async with serving(run_dir, handlers) as channel:
        kinds: tuple[Any, ...] = (
            channel.unary_unary("/t.T/One"),
            channel.unary_stream("/t.T/Many"),
        )
        for call in (kind(JUNK, timeout=10) for kind in kinds):
            expected = (grpc.StatusCode.INVALID_ARGUMENT, ["INVALID_REQUEST"])
            assert await reason_of(call) == expected


async def test_junk_on_a_peer_stream_ends_that_stream(
    run_dir: Path, record: Callable[[], Any]
) -> None:
    """The acceptor's service lives on: the next stream is taken."""
    codec = CODECS[Role.DECODE, Role.LB]
    far, fatal = record(), record()
    acceptor: Acceptor[Any] = Acceptor(Role.LB, codec.encode, codec.decode, far.take, fatal.take)

    async def connect(_requests: Any, context: Any) -> None:
        await acceptor.serve(context)

    parse = decode_pb2.ConnectRequest.FromString
    answer = decode_pb2.ConnectResponse.SerializeToString
    handlers = {"Connect": grpc.stream_stream_rpc_method_handler(connect, parse, answer)}
    hello = CODECS[Role.LB, Role.DECODE].encode(HELLO).SerializeToString()
    async with serving(run_dir, handlers) as channel:
        for number, first in enumerate((JUNK, hello, b"")):
            connecting: Any = channel.stream_stream("/t.T/Connect")
            call = connecting()
            await call.write(first)
            if first == hello:
                await far.until(lambda r: len(r) == 1)
                await call.write(JUNK)
            expected = (grpc.StatusCode.INVALID_ARGUMENT, ["PEER_PROTOCOL"])
            assert await reason_of(call) == expected, number
    assert far == [Received(Role.LB, 2, HELLO), StreamClosed(Role.LB, 2)]
    assert fatal == []


async def test_junk_from_a_peer_that_was_dialed_ends_that_stream(
    run_dir: Path, record: Callable[[], Any]
) -> None:
    codec = CODECS[Role.LB, Role.DECODE]
    near = record()

    async def answer(_requests: Any, context: Any) -> None:
        await context.write(JUNK)
        await context.read()

    handlers: dict[str, Any] = {"Connect": grpc.stream_stream_rpc_method_handler(answer)}
    dialer: Dialer[Any] = Dialer(
        Role.DECODE,
        f"unix:{run_dir}/t.sock",
        lambda channel: channel.stream_stream(
            "/t.T/Connect",
            decode_pb2.ConnectRequest.SerializeToString,
            decode_pb2.ConnectResponse.FromString,
        ),
        codec.encode,
        codec.decode,
        near.take,
    )
    async with serving(run_dir, handlers):
        running = asyncio.create_task(dialer.run())
        await near.until(lambda r: len(r) == 4)
        running.cancel()
        await asyncio.wait({running})
    kinds = (StreamOpened, StreamClosed)
    assert near[:4] == [kind(Role.DECODE, number) for number in (1, 2) for kind in kinds]


async def test_a_handler_leaves_a_client_that_reads_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write is stuck and the status behind it: the handler leaves all the same, and a client
    that reads at last gets all that was written and then the status."""
    monkeypatch.setattr(status, "STATUS_LIMIT_S", 0.2)
    left = asyncio.Event()
    wrote = 0

    async def stream(_request: Any, context: Any) -> None:
        nonlocal wrote
        await context.send_initial_metadata(())
        try:
            async with asyncio.timeout(0.2):
                while True:
                    await context.write(bytes(10_000))
                    wrote += 1
        except TimeoutError:
            raise Unavailable(Reason.SLOW_READER, "reads nothing") from None

    async def watched(request: Any, context: Any) -> None:
        try:
            async with status.HandlerGuard(context, lambda error: pytest.fail(str(error))):
                await stream(request, context)
        finally:
            left.set()

    handlers: dict[str, Any] = {"Many": grpc.unary_stream_rpc_method_handler(watched)}
    async with serving(run_dir, handlers) as channel:
        many: Any = channel.unary_stream("/t.T/Many")
        call = many(b"")
        await left.wait()
        read = 0
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                read += 1
        assert read in (wrote, wrote + 1), "the write that was cut short may have arrived"
        assert await reason_of(call) == (grpc.StatusCode.ABORTED, ["SLOW_READER"])


async def test_clients_connections_are_bounded(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplet_runtime.server.PUBLIC_CONNECTIONS", 5)
    async with serving(run_dir, {}):
        pairs = [await asyncio.open_unix_connection(f"{run_dir}/t.sock") for _ in range(8)]
        # The server speaks first, or closes. One place is the channel's, if it has connected.
        greeted = [await reader.read(1) for reader, _ in pairs]
        for _, writer in pairs:
            writer.close()
    assert sum(data != b"" for data in greeted) <= 5
