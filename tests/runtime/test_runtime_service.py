from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from duplet_runtime.lock import hold_lock

SERVICE = """
import asyncio, logging, os, sys
from typing import ClassVar
from duplet_core.errors import InvariantError
from duplet_core.ids import Role
from duplet_runtime.server import create_server, peer_server_options, running_server
from duplet_runtime.service import run_service
from duplet_runtime.settings import ServiceSettings, SettingsError, load_settings_or_exit

class Settings(ServiceSettings):
    role: ClassVar[Role] = Role.PREFILL

def broken():
    raise InvariantError("page in two states")

async def fail():
    raise ValueError("a task failed")

async def hang():
    try:
        await asyncio.Event().wait()
    finally:
        print("task ended", flush=True)

async def main(service):
    server = create_server(peer_server_options(), service.health, service.fail)
    address = service.settings.peer_address(Role.PREFILL)
    async with running_server(server, [address], service.health, [], 5):
        await work(service)

async def work(service):
    service.spawn(hang(), "hang")
    logging.getLogger("asyncio").warning("from the standard library")
    service.log.info("hello", request_id="r1", transfer="t1")
    kind = sys.argv[1]
    if kind == "task":
        service.spawn(fail(), "fail")
    if kind == "callback":
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    if kind == "invariant":
        asyncio.get_running_loop().call_soon(broken)
    if kind == "invariant in main":
        broken()
    if kind == "settings":
        raise SettingsError("metrics_port: taken")
    print("up", service.health.ok("ready"), flush=True)
    await service.draining.wait()
    print("draining", service.health.ok("ready"), flush=True)
    if kind == "slow":
        await asyncio.Event().wait()

sys.exit(run_service(load_settings_or_exit(Settings), main))
"""


@contextmanager
def start(run_dir: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, kind],
        env={"DUPLET_RUN_DIR": str(run_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_log(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    assert process.stderr is not None
    while (entry := json.loads(process.stderr.readline()))["event"] != event:
        pass
    found: dict[str, Any] = entry
    return found


def lines(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains(run_dir: Path, number: signal.Signals) -> None:
    with start(run_dir, "well") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up True\n"
        assert (run_dir / "prefill.sock").stat().st_mode & 0o777 == 0o600
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 0
    assert out == "draining False\ntask ended\n"
    logged = lines(err)
    assert {entry["service"] for entry in logged} == {"prefill"}
    assert len({entry["instance"] for entry in logged}) == 1
    (hello,) = (entry for entry in logged if entry["event"] == "hello")
    assert (hello["request_id"], hello["transfer"]) == ("r1", "t1")
    assert any(
        entry["event"] == "from the standard library" and entry["logger"] == "asyncio"
        for entry in logged
    )
    assert logged[-1]["event"] == "stopped"


def test_second_signal_does_not_wait(run_dir: Path) -> None:
    with start(run_dir, "slow") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up True\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining False\n"
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("kind", "code", "event", "detail"),
    [
        ("task", 1, "failed", "a task failed"),
        ("callback", 1, "failed", "ZeroDivisionError"),
        ("invariant", 70, "invariant broken", "page in two states"),
        ("invariant in main", 70, "invariant broken", "page in two states"),
    ],
)
def test_any_exception_is_fatal(
    run_dir: Path, kind: str, code: int, event: str, detail: str
) -> None:
    with start(run_dir, kind) as process:
        _, err = process.communicate()
    assert process.returncode == code
    assert detail in next(entry for entry in lines(err) if entry["event"] == event)["exception"]


def test_settings_that_turn_out_bad_are_a_line_and_exit_code_2(run_dir: Path) -> None:
    with start(run_dir, "settings") as process:
        _, stderr = process.communicate()
    assert process.returncode == 2
    *entries, last = stderr.splitlines()
    assert last == "duplet prefill: metrics_port: taken"
    assert all(json.loads(entry)["level"] in ("info", "warning") for entry in entries)


def test_second_instance_waits_for_the_first(run_dir: Path) -> None:
    with start(run_dir, "well") as first, start(run_dir, "well") as second:
        assert first.stdout is not None and second.stdout is not None
        starters = {first.stdout: first, second.stdout: second}
        (ready,), _, _ = select.select(list(starters), [], [])
        holder = starters.pop(ready)
        (waiter,) = starters.values()
        assert wait_for_log(waiter, "waiting for lock")["holder"] == str(holder.pid)
        holder.kill()
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "up True\n"
        waiter.send_signal(signal.SIGTERM)
        waiter.communicate()
        assert waiter.returncode == 0


def test_waiting_instance_can_be_stopped(run_dir: Path) -> None:
    with start(run_dir, "well") as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with start(run_dir, "well") as waiter:
            wait_for_log(waiter, "waiting for lock")
            waiter.send_signal(signal.SIGTERM)
            waiter.communicate()
            assert waiter.returncode == 0


def test_open_run_dir_is_refused(run_dir: Path) -> None:
    run_dir.chmod(0o755)
    with start(run_dir, "well") as process:
        _, err = process.communicate()
    assert process.returncode == 2
    assert err.startswith("duplet prefill: run_dir: ")
    assert "Traceback" not in err


async def test_lock_is_waited_for_and_the_wait_can_be_cancelled(
    tmp_path: Path, record: Any
) -> None:
    told = record()
    held = await hold_lock(tmp_path / "lock", told.take)
    assert not os.get_inheritable(held.fd)
    waiting = asyncio.create_task(hold_lock(tmp_path / "lock", told.take))
    await told.until(lambda r: len(r) == 1)
    assert told == [str(os.getpid())]
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    second = asyncio.create_task(hold_lock(tmp_path / "lock", told.take))
    held.release()
    (await second).release()
