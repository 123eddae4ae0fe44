"""Connections and peers that are not what they should be, on every port of a unit; the streams
that run meanwhile get their rows."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from duplet.decode.v1 import decode_pb2
from duplet_client import AsyncClient
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_core.messages import Hello
from duplet_runtime.server import HANDSHAKE_MS, PEER_MESSAGE_BYTES, peer_channel_options
from duplet_wire.streams import CODECS
from tests.e2e.live_unit import LiveUnit, live_unit, until
from tests.e2e.raw_calls import failure_of
from tests.e2e.streams import Ask, Load, assert_same, known_spec, read_all

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKS = [Ask(seed, max_rows=60) for seed in (1, 2, 3)]
IDLE_CONNECTIONS = 3000
SOCKETS = ("lb", "prefill.sock", "decode.sock", "kvproxy.sock")
JUNK = {
    "zeros": bytes(1000),
    "text": b"hello?\r\n" * 20,
    "http1": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http1 post": b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + bytes(5000),
    "tls": bytes.fromhex("16030100f1010000ed0303") + bytes(230),
    "http2 preface and no settings": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
}
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
"""A preface and an empty SETTINGS."""
HTTP2_ABUSE = {
    "DATA of 16 MiB on a stream that is not open": bytes.fromhex("ffffff000000000001"),
    "HEADERS of 16 KiB of nonsense": bytes.fromhex("004000010000000001") + b"\x7f\xff\xff" * 5461,
    "many pings": bytes.fromhex("0000080600000000000000000000000000") * 5000,
    "many settings": bytes.fromhex("000000040000000000") * 5000,
    "resets of streams that never were": bytes.fromhex("00000403000000000700000000") * 5000,
}


@dataclass(frozen=True)
class Place:
    """A unit with streams that run, whose rows are known."""

    unit: LiveUnit
    load: Load

    def path(self, name: str) -> Path:
        return self.unit.run_dir / name

    async def connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if name == "lb":
            host, _, port = self.unit.listen.rpartition(":")
            return await asyncio.open_connection(host, int(port))
        return await asyncio.open_unix_connection(self.path(name))

    def fds(self, role: Role) -> int:
        return len(os.listdir(f"/proc/{self.unit.pid(role)}/fd"))

    def pids(self) -> list[int]:
        return [self.unit.pid(role) for role in Role]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[Place]:
    """At the end the same processes run and every stream had the rows that it should."""
    async with live_unit() as unit, AsyncClient(unit.listen) as client:
        spec = await known_spec(client)
        alone = await read_all(client, spec, ASKS)
        async with Load(unit.listen, spec, ASKS) as load:
            place = Place(unit, load)
            pids = place.pids()
            yield place
            await load.wait_new_successes()
        for reference, done in zip(alone, load.done, strict=True):
            for stream in done:
                assert_same(stream, reference)
        assert place.pids() == pids, "a service died"
        await unit.wait_idle()


async def assert_closed(reader: asyncio.StreamReader) -> None:
    """The other end closes, whatever it says first."""
    with suppress(ConnectionError):
        await reader.read(-1)


# --- bytes ------------------------------------------------------------


@pytest.mark.parametrize("name", SOCKETS)
async def test_junk_is_closed(place: Place, name: str) -> None:
    pairs = []
    for data in JUNK.values():
        reader, writer = await place.connect(name)
        writer.write(data)
        pairs.append((reader, writer))
    for reader, writer in pairs:
        await assert_closed(reader)
        writer.close()
    await place.load.wait_new_successes()


@pytest.mark.parametrize("name", SOCKETS)
async def test_abuse_of_http2_harms_its_own_connection(place: Place, name: str) -> None:
    writers = []
    for data in HTTP2_ABUSE.values():
        _, writer = await place.connect(name)
        writer.write(HTTP2 + data)
        with suppress(ConnectionError):
            await writer.drain()
        writers.append(writer)
    await place.load.wait_new_successes()
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("name", SOCKETS)
async def test_half_open_connections_are_closed(place: Place, name: str) -> None:
    """Nothing, half a preface, and an end of writing; the server ends them by itself."""
    silent, half, shut = [await place.connect(name) for _ in range(3)]
    half[1].write(b"PRI * HTTP/2.0\r\n")
    shut[1].write_eof()
    async with asyncio.timeout(4 * HANDSHAKE_MS / 1000):
        for reader, writer in (silent, half, shut):
            await assert_closed(reader)
            writer.close()


async def test_thousands_of_idle_connections(place: Place) -> None:
    """They cost lb little, keep nobody out, and leave nothing behind."""
    before = place.fds(Role.LB)
    pairs = [await place.connect("lb") for _ in range(IDLE_CONNECTIONS)]
    await place.load.wait_new_successes()
    assert rss_mib(place.unit.pid(Role.LB)) < 400
    async with AsyncClient(place.unit.listen) as late:
        assert (await late.unit()).spec is not None
    for _, writer in pairs:
        writer.close()

    async def gone() -> bool:
        return place.fds(Role.LB) < before + 50

    await until(gone, "lb's descriptors are back")


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


# --- lifelines ------------------------------------------------------------

GOOD_REGISTRATION = b'{"role":"decode","instance":"%s","version":1,"fds":["io"],"pool":""}'


@contextmanager
def lifeline(place: Place) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(place.path("lifeline.sock")))
        sock.settimeout(20)
        yield sock


async def test_junk_on_the_lifeline_is_closed(place: Place) -> None:
    """Junk, junk with descriptors, descriptors of nothing, too many, and long silence."""
    before = place.fds(Role.KVPROXY)
    with socket.socket() as nothing:
        fd = nothing.fileno()
        messages: list[tuple[bytes, list[int]]] = [
            (b"junk", []),
            (b"{}", []),
            (b"null", [fd]),
            (bytes(20_000), []),
            (b"x", [fd] * 5),
            (b"x", [fd] * 100),
            (GOOD_REGISTRATION % (b"a" * 32), []),
            (GOOD_REGISTRATION % (b"a" * 32), [fd]),
            (GOOD_REGISTRATION.replace(b'"version":1', b'"version":99') % (b"a" * 32), [fd]),
        ]
        for data, fds in messages:
            with lifeline(place) as sock:
                socket.send_fds(sock, [data], fds)
                assert await asyncio.to_thread(sock.recv, 100) == b"", data[:50]
    with lifeline(place) as silent:
        assert await asyncio.to_thread(silent.recv, 100) == b""

    async def same() -> bool:
        return place.fds(Role.KVPROXY) <= before

    await until(same, "kvproxy's descriptors are back")


async def test_many_lifeline_connections(place: Place) -> None:
    """More than kvproxy takes: the others are closed at once, these when they say nothing."""
    with ExitStack() as stack:
        socks = [stack.enter_context(lifeline(place)) for _ in range(100)]
        for sock in socks:
            assert await asyncio.to_thread(sock.recv, 100) == b""


# --- peers ------------------------------------------------------------

METHODS = {
    (Role.PREFILL, Role.LB): "/duplet.prefill.v1.PrefillPeer/Connect",
    (Role.DECODE, Role.LB): "/duplet.decode.v1.DecodePeer/Connect",
    (Role.KVPROXY, Role.PREFILL): "/duplet.kvproxy.v1.KvProxy/ConnectPrefill",
    (Role.KVPROXY, Role.DECODE): "/duplet.kvproxy.v1.KvProxy/ConnectDecode",
}
STRANGER = InstanceId("f" * 32)
UNKNOWN_BRANCH = b"\xfa\x7f\x01a"
"""An envelope with a field that nobody knows, and nothing else."""


async def answer_to(place: Place, acceptor: Role, peer: Role, first: bytes) -> tuple[str, str]:
    """(code, reason) with which a stream ends that begins with these bytes."""
    options = peer_channel_options()
    async with grpc.aio.insecure_channel(place.unit.addresses[acceptor], options) as channel:
        method: Any = channel.stream_stream(METHODS[acceptor, peer])
        call = method(timeout=20)
        await call.write(first)
        failure = await failure_of(call)
    assert len(failure.reasons) == 1, failure
    return failure.code.name, failure.reasons[0]


@pytest.mark.parametrize(("acceptor", "peer"), list(METHODS))
async def test_strangers_and_malformed_hellos(place: Place, acceptor: Role, peer: Role) -> None:
    hello = Hello(peer, STRANGER, PROTOCOL_VERSION, 1)
    codec = CODECS[peer, acceptor]

    def said(**changes: Any) -> bytes:
        return codec.encode(replace(hello, **changes)).SerializeToString()  # type: ignore[no-any-return]

    # The peer's own stream is not a stranger's to take, and a writer's must be watched.
    refused = (
        ("UNAVAILABLE", "NO_LIFELINE")
        if acceptor is Role.KVPROXY
        else ("FAILED_PRECONDITION", "OTHER_INSTANCE")
    )
    odd = ("INVALID_ARGUMENT", "PEER_PROTOCOL")
    cases: list[tuple[bytes, tuple[str, str]]] = [
        (said(), refused),
        (
            said(version=PROTOCOL_VERSION + 1),
            ("FAILED_PRECONDITION", "VERSION_MISMATCH"),
        ),
        (said(to_instance=STRANGER), ("FAILED_PRECONDITION", "OTHER_INSTANCE")),
        (said(role=Role.KVPROXY if acceptor is not Role.KVPROXY else Role.LB), odd),
        (said(instance="not an id"), odd),
        (said(held=("x",)), odd),
        (b"\xff\xff\xff", odd),
        (b"", odd),
        (UNKNOWN_BRANCH, odd),
    ]
    for first, expected in cases:
        assert await answer_to(place, acceptor, peer, first) == expected, first
    await place.load.wait_new_successes()


async def test_a_message_over_the_limit_ends_its_own_stream(place: Place) -> None:
    """gRPC itself answers, before anything of ours sees it."""
    options = peer_channel_options()
    address = place.unit.addresses[Role.DECODE]
    async with grpc.aio.insecure_channel(address, options[2:]) as channel:
        method: Any = channel.stream_stream(METHODS[Role.DECODE, Role.LB])
        call = method(timeout=20)
        with suppress(grpc.aio.AioRpcError):
            await call.write(
                decode_pb2.ConnectRequest().SerializeToString() + bytes(PEER_MESSAGE_BYTES + 1)
            )
        assert (await failure_of(call)).code is grpc.StatusCode.RESOURCE_EXHAUSTED
