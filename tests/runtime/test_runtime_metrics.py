from __future__ import annotations

import socket
import urllib.request

import pytest

from duplet_core.errors import InvariantError
from duplet_runtime.metrics import MAX_SERIES, Metrics


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
        metrics.histogram("admission_seconds", "Of what").observe(seconds)
    read = metrics.registry.get_sample_value
    name = "duplet_prefill_admission_seconds"
    for bound, count in (("5e-05", 1), ("0.0004", 1), ("0.0005", 3), ("1.0", 3), ("+Inf", 4)):
        assert read(f"{name}_bucket", {"le": bound}) == count, bound
    assert read(f"{name}_sum") == pytest.approx(2.00094)


def test_names_made_of_data_are_a_bug() -> None:
    metrics = Metrics("lb")
    for number in range(MAX_SERIES):
        metrics.counter("labelled", "By number", {"number": str(number)})
        metrics.histogram(f"n{number}_seconds", "Of what")
    for number in range(MAX_SERIES - 1):
        metrics.count(f"n{number}")
    metrics.count("n0")
    with pytest.raises(InvariantError):
        metrics.count("one_more")
    with pytest.raises(InvariantError):
        metrics.histogram("one_more_seconds", "Of what")
    with pytest.raises(InvariantError):
        metrics.counter("labelled", "By number", {"number": "one more"})
    with pytest.raises(InvariantError, match="has the labels"):
        metrics.counter("n0", "n0", {"number": "1"})


def test_series_of_one_name_are_told_apart_by_their_labels() -> None:
    metrics = Metrics("lb")
    for outcome, count in (("STOP", 2), ("DEADLINE", 3)):
        metrics.counter("ended", "By outcome", {"outcome": outcome}).add(count)
    metrics.histogram("wait_seconds", "Of what", (1.0, 2.0), {"of": "a"}).observe(1.5)
    metrics.histogram("wait_seconds", "Of what", (1.0, 2.0), {"of": "b"})
    read = metrics.registry.get_sample_value
    assert read("duplet_lb_ended_total", {"outcome": "STOP"}) == 2
    assert read("duplet_lb_ended_total", {"outcome": "DEADLINE"}) == 3
    assert read("duplet_lb_wait_seconds_bucket", {"of": "a", "le": "2.0"}) == 1
    assert read("duplet_lb_wait_seconds_count", {"of": "b"}) == 0
