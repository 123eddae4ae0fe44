"""gRPC options of the client's channel."""

from __future__ import annotations

from typing import Final

from duplet_pages.spec import MOST_REQUEST_BYTES

Options = list[tuple[str, int | str]]

_EVERY_CHANNEL: Final[Options] = [
    # As on lb.
    ("grpc.max_receive_message_length", MOST_REQUEST_BYTES),
    ("grpc.max_send_message_length", MOST_REQUEST_BYTES),
    # A machine that vanished is noticed in 30 s, also while a stream waits for its first row.
    # lb allows pings this often; a server that does not would end the connection.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A call is retried by whoever knows that it may be, not by the channel.
    ("grpc.enable_retries", 0),
    # An lb that restarts is met within a second, not after gRPC's 20.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def channel_options(address: str) -> Options:
    """Options of a channel to `address`, such as 'localhost:50050' or 'unix:/run/lb.sock'."""
    if address.startswith("unix:"):
        # A socket's path is no host name; some servers refuse it as :authority.
        return [*_EVERY_CHANNEL, ("grpc.default_authority", "localhost")]
    return list(_EVERY_CHANNEL)
