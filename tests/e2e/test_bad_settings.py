"""A service that cannot start says why in one line, without a traceback, and exits with 2."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.live_unit import clean_environment

Start = Callable[[str, str], tuple[int, list[str]]]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    tmp_path.chmod(0o700)

    def start_service(role: str, setting: str) -> tuple[int, list[str]]:
        name, _, value = setting.partition("=")
        environment = clean_environment({"DUPLET_RUN_DIR": str(tmp_path), name: value})
        done = subprocess.run(
            [sys.executable, "-m", f"duplet_{role}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, [line for line in done.stderr.splitlines() if not _is_entry(line)]

    return start_service


def _is_entry(line: str) -> bool:
    """Whether the line is an ordinary entry of the log."""
    return line.startswith("{") and json.loads(line)["level"] in ("info", "warning")


@pytest.mark.parametrize(
    ("role", "setting", "told"),
    [
        ("lb", "DUPLET_LB_LISTEN=127.0.0.1:115587", "port 115587 is above 65535"),
        ("lb", "DUPLET_LB_LISTEN=nonsense", "'nonsense' is not HOST:PORT"),
        ("lb", "DUPLET_LB_LISTEN=192.0.2.7:50051", "listen: 192.0.2.7:50051: Cannot assign"),
        ("prefill", "DUPLET_PREFILL_MODEL=nosuch", "there is no model 'nosuch', but wren, tiny"),
        (
            "prefill",
            "DUPLET_PREFILL_MODEL=random:no",
            "there is no shape 'no', but s2-pro, s1-mini",
        ),
        ("decode", "DUPLET_DECODE_POOL_PAGES=1000000000000", "pool_pages: 1000000000000 pages"),
    ],
)
def test_bad_settings(start: Start, role: str, setting: str, told: str) -> None:
    code, lines = start(role, setting)
    assert code == 2
    assert told in lines[0]
    assert all(line.startswith("duplet") for line in lines), lines


@pytest.mark.parametrize("role", ["lb", "kvproxy"])
def test_a_taken_metrics_port(start: Start, taken_port: int, role: str) -> None:
    code, lines = start(role, f"DUPLET_METRICS_PORT={taken_port}")
    told = f"duplet {role}: metrics_port: 127.0.0.1:{taken_port}: Address already in use"
    assert (code, lines) == (2, [told])


def test_a_taken_public_port(start: Start, taken_port: int) -> None:
    code, lines = start("lb", f"DUPLET_LB_LISTEN=127.0.0.1:{taken_port}")
    told = f"duplet lb: listen: 127.0.0.1:{taken_port}: Address already in use"
    assert (code, lines) == (2, [told])


def test_gpu_transports_without_a_gpu(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, lines = start("kvproxy", "DUPLET_KVPROXY_TRANSPORTS=pages")
    assert code == 2
    (line,) = lines
    assert line.startswith("duplet kvproxy: no allowed transport works here (pages): ")
    assert "duplet doctor" in line
