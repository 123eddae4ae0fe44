from __future__ import annotations

import socket
import urllib.request

import pytest

from duplet_core.errors import InvariantError
from duplet_runtime.metrics import MAX_COUNTERS, Metrics


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def test_counters_and_gauges_are_served() -> None:
    metrics = Metrics("decode")
    free = [3]
    metrics.gauge("pages_free", "Pages nobody has.", lambda: free[0])
    metrics.count("aborts")
    metrics.count("aborts", 4)
    port = free_port()
    metrics.serve(port)
    free[0] = 9
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    metrics.close()
    assert "duplet_decode_aborts_total 5.0" in text
    assert "duplet_decode_pages_free 9.0" in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_port_zero_serves_nothing() -> None:
    metrics = Metrics("lb")
    metrics.serve(0)
    metrics.close()


def test_names_made_of_data_are_a_bug() -> None:
    metrics = Metrics("lb")
    for number in range(MAX_COUNTERS):
        metrics.count(f"n{number}")
    with pytest.raises(InvariantError):
        metrics.count("one_more")
