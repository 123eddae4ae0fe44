from __future__ import annotations

import socket

import pytest

from duplet_runtime.addresses import check_free, check_listen


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:50051", "localhost:0", "[::]:65535", "0.0.0.0:1", "unix:/run/x.sock"],
)
def test_addresses(address: str) -> None:
    assert check_listen(address) == address


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "is not HOST:PORT"),
        ("50051", "is not HOST:PORT"),
        (":50051", "is not HOST:PORT"),
        ("localhost:", "is not HOST:PORT"),
        ("localhost:http", "is not HOST:PORT"),
        ("127.0.0.1:-1", "is not HOST:PORT"),
        ("127.0.0.1:٣", "is not HOST:PORT"),
        ("127.0.0.1:65536", "port 65536 is above 65535"),
        ("127.0.0.1:115587", "port 115587 is above 65535"),
        ("::1:50051", "an IPv6 address is written"),
        ("unix:", "names no path"),
    ],
)
def test_what_is_no_address(address: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_listen(address)


def test_a_taken_and_a_foreign_address_are_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match="in use"):
            check_free(taken)
    check_free(taken)
    with pytest.raises(OSError, match="assign"):
        check_free("192.0.2.7:50051")
    check_free("unix:/nowhere/x.sock")
