"""gRPC servers and channels with the options that Duplet relies on."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from duplet_pages.spec import MOST_REQUEST_BYTES
from duplet_runtime.health import LIVE, Health
from duplet_runtime.settings import SettingsError
from duplet_runtime.status import GuardInterceptor

Options = list[tuple[str, int | str]]

PEER_MESSAGE_BYTES = 2 * MOST_REQUEST_BYTES
"""Longest message between peers. A prompt that lb has taken travels on with more around it, and
a message that is too long would end the stream that all requests share."""

KEEPALIVE_MS = 1000
KEEPALIVE_TIMEOUT_MS = 1500
"""A peer that is stopped, not dead, loses its streams after the sum of the two."""

PUBLIC_KEEPALIVE_MS = 20_000
PUBLIC_IDLE_MS = 300_000
"""A client's connection without a call is closed after this."""

PUBLIC_AGE_MS = 3_600_000
"""A client's connection is asked to end after this, and ended once the longest call had its time.
Nothing else ends a call whose client answers pings and never reads."""

PUBLIC_CONNECTIONS = 8192
RESERVED_FDS = 128
"""Descriptors that clients' connections leave for everything else; one more is closed at once."""

HANDSHAKE_MS = 5000
"""A connection that does not speak HTTP/2 by then is closed."""

MAX_STREAMS = 1024
"""Calls at once on one connection."""

_CLIENT_LENGTHS: Options = [
    ("grpc.max_receive_message_length", MOST_REQUEST_BYTES),
    ("grpc.max_send_message_length", MOST_REQUEST_BYTES),
]

_PEER_LENGTHS: Options = [
    ("grpc.max_receive_message_length", PEER_MESSAGE_BYTES),
    ("grpc.max_send_message_length", PEER_MESSAGE_BYTES),
]

_BOTH_ENDS: Options = [
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

_PEER_KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Without it a ping that is already under way has 60 s, whatever keepalive says.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
]

_SERVER: Options = [
    # With it, two servers would share one port in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Only messages as they are. gRPC unpacks before it looks at a length, in the thread that moves
    # everybody's bytes: a few packed megabytes took gigabytes, and all streams stood meanwhile.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    # Faster pings than a peer's or a client's end its connection (too_many_pings).
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
]


def peer_server_options() -> Options:
    """For a server that takes peer streams: connections live on, a stopped peer is noticed."""
    return [*_PEER_LENGTHS, *_BOTH_ENDS, *_SERVER, *_PEER_KEEPALIVE]


def public_server_options(longest_call_s: float = 300.0) -> Options:
    """For lb's public port: patient with clients, but their connections have bounds."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        *_CLIENT_LENGTHS,
        *_BOTH_ENDS,
        *_SERVER,
        ("grpc.keepalive_time_ms", PUBLIC_KEEPALIVE_MS),
        ("grpc.max_connection_idle_ms", PUBLIC_IDLE_MS),
        ("grpc.max_connection_age_ms", PUBLIC_AGE_MS),
        ("grpc.max_connection_age_grace_ms", round(longest_call_s * 1000) + HANDSHAKE_MS),
        (
            "grpc.max_allowed_incoming_connections",
            max(1, min(PUBLIC_CONNECTIONS, open_files - RESERVED_FDS)),
        ),
    ]


def peer_channel_options() -> Options:
    """For a channel to a peer on this machine."""
    return [
        *_PEER_LENGTHS,
        *_BOTH_ENDS,
        *_PEER_KEEPALIVE,
        # A Unix socket's path is no host name; some servers refuse it as :authority.
        ("grpc.default_authority", "localhost"),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Also the time that a connection attempt gets; a refused one is repeated at once.
        ("grpc.min_reconnect_backoff_ms", 1000),
    ]


def create_server(
    options: Options,
    health: Health,
    on_fatal: Callable[[BaseException], None],
    first: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """A server with guard and health; add servicers, then `start_server`.

    `first`: interceptors before the guard, which see to their own errors.
    Starts gRPC's threads: spawn child processes first.
    """
    server = grpc.aio.server(options=options, interceptors=[*first, GuardInterceptor(on_fatal)])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


async def start_server(
    server: grpc.aio.Server, addresses: Iterable[str], health: Health, services: Iterable[str]
) -> list[int]:
    """Listen on `addresses` and turn `live` on. `stop_server` must follow, also on failure.

    `services` are the full names that reflection tells, without health and reflection itself.
    A Unix address replaces a socket file left by a predecessor: hold the role's lock.

    Returns:
        The port of each address, as gRPC chose it (for Unix sockets a number without meaning).

    Raises:
        SettingsError: an address is taken or is none of this machine's.
    """
    names = (
        *services,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    ports = []
    for address in addresses:
        try:
            ports.append(server.add_insecure_port(address))
        except RuntimeError as error:
            raise SettingsError(f"cannot listen on {address}: {error}") from error
        if address.startswith("unix:"):
            Path(address.removeprefix("unix:")).chmod(0o600)
    await server.start()
    health.set(LIVE, True, "serving")
    return ports


async def stop_server(server: grpc.aio.Server, health: Health, grace_s: float) -> None:
    """Tell NOT_SERVING, then refuse new calls and give running ones `grace_s` to end.

    End peer streams first (`Acceptor.close_all`), for they last until they are ended.
    """
    health.shut_down()
    await server.stop(grace_s)


@asynccontextmanager
async def running_server(
    server: grpc.aio.Server,
    addresses: Iterable[str],
    health: Health,
    services: Iterable[str],
    grace_s: float,
) -> AsyncIterator[list[int]]:
    """`start_server`, and `stop_server` at the end; without grace when the body raised."""
    grace = 0.0
    try:
        yield await start_server(server, addresses, health, services)
        grace = grace_s
    finally:
        await stop_server(server, health, grace)
