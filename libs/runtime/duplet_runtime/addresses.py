"""Addresses that a server is told to listen on: judged before gRPC sees them.

gRPC takes a port modulo 65,536 and says of an address that it cannot bind only that.
"""

from __future__ import annotations

import socket

MOST_PORT = 65535


def check_listen(address: str) -> str:
    """`address` itself, when it is HOST:PORT or unix:PATH; port 0 leaves the choice to the kernel.

    Raises:
        ValueError: it is neither; the text says what is wrong.
    """
    if address.startswith("unix:"):
        if address == "unix:":
            raise ValueError("unix: names no path")
        return address
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise ValueError(f"{address!r} is not HOST:PORT")
    if int(port) > MOST_PORT:
        raise ValueError(f"{address!r}: port {port} is above {MOST_PORT}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{address!r}: an IPv6 address is written [ADDRESS]:PORT")
    return address


def check_free(address: str) -> None:
    """Find out whether a server could listen on a checked HOST:PORT; a unix:PATH is replaced.

    Raises:
        OSError: somebody has it, or it is no address of this machine.
    """
    if address.startswith("unix:"):
        return
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
