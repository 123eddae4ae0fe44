from __future__ import annotations

import socket
import urllib.request

import pytest

from duplet_core.errors import InvariantError
from duplet_runtime.metrics import MAX_COUNTERS, MAX_HISTOGRAMS, Metrics


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


def test_times_land_in_the_bucket_that_holds_them() -> None:
    metrics = Metrics("prefill")
    for seconds in (40e-6, 450e-6, 450e-6, 2.0):
        metrics.observe("admission_seconds", seconds)
    read = metrics.registry.get_sample_value
    name = "duplet_prefill_admission_seconds"
    for bound, count in (("5e-05", 1), ("0.0004", 1), ("0.0005", 3), ("1.0", 3), ("+Inf", 4)):
        assert read(f"{name}_bucket", {"le": bound}) == count, bound
    assert read(f"{name}_sum") == pytest.approx(2.00094)


def test_names_made_of_data_are_a_bug() -> None:
    metrics = Metrics("lb")
    for number in range(MAX_COUNTERS):
        metrics.count(f"n{number}")
    with pytest.raises(InvariantError):
        metrics.count("one_more")
    for number in range(MAX_HISTOGRAMS):
        metrics.observe(f"n{number}_seconds", 0.001)
    with pytest.raises(InvariantError):
        metrics.observe("one_more_seconds", 0.001)
