from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_runtime import lifeline
from duplet_runtime.lifeline import LifelineClient, LifelinePeer, LifelineServer
from duplet_runtime.lifeline_wire import (
    MESSAGE_BYTES,
    Registration,
    is_pidfd,
    receive_registration,
    send_registration,
)
from duplet_runtime.lock import HeldLock, hold_lock
from tests.descriptors import open_fds

OWN = InstanceId("c" * 32)
DECODE = InstanceId("d" * 32)


@pytest.fixture
def path(run_dir: Path) -> Path:
    return run_dir / "lifeline.sock"


@pytest.fixture
async def lock(run_dir: Path) -> AsyncIterator[HeldLock]:
    held = await hold_lock(run_dir / "kvproxy.lock", print)
    yield held
    if held.fd >= 0:
        held.release()


@pytest.fixture
def child() -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], int]]]:
    """Starts processes that do nothing; gives each with a pidfd, which the test closes."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], int]:
        process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        started.append(process)
        return process, os.pidfd_open(process.pid)

    yield start
    for process in started:
        process.kill()
        process.wait()


def make_client(
    path: Path, told: Any, instance: InstanceId, fds: dict[str, int], **pool: Any
) -> Any:
    return LifelineClient(
        path,
        Role.DECODE,
        instance,
        fds,
        pool.get("text", ""),
        pool.get("fd"),
        lambda kvproxy: told.take("up", kvproxy),
        lambda kvproxy: told.take("died", kvproxy),
    )


@asynccontextmanager
async def running(client: LifelineClient) -> AsyncIterator[None]:
    task = asyncio.create_task(client.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_registration_then_death_of_every_process(
    path: Path, lock: HeldLock, record: Any, child: Any
) -> None:
    (io, io_fd), (engine, engine_fd) = child(), child()
    before = open_fds()
    near, far = record(), record()
    server = LifelineServer(path, lock, OWN, far.take, far.take, far.take)
    assert path.stat().st_mode & 0o777 == 0o600
    pool = os.memfd_create("pool")
    os.write(pool, b"kv")
    fds = {"io": io_fd, "engine": engine_fd}
    async with running(make_client(path, near, DECODE, fds, text="pages", fd=pool)):
        await near.until(lambda r: list(r) == [("up", OWN)])
        (peer,) = far
        assert (peer.role, peer.instance, peer.pool) == (Role.DECODE, DECODE, "pages")
        assert os.pread(peer.pool_fd, 10, 0) == b"kv"
        os.close(peer.pool_fd)
        os.close(pool)
    io.kill()
    io.wait()
    os.kill(engine.pid, signal.SIGSTOP)
    while "T (stopped)" not in Path(f"/proc/{engine.pid}/status").read_text():
        os.sched_yield()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(far) == 1, "the connection's end, one dead and one stopped process are no death"
    engine.kill()
    await far.until(lambda r: len(r) == 2)
    assert far[1] == (Role.DECODE, DECODE)
    server.close()
    assert open_fds() <= before
    os.close(io_fd)
    os.close(engine_fd)


async def test_stopped_process_is_not_dead_to_the_kernel(child: Any) -> None:
    process, pidfd = child()
    os.kill(process.pid, signal.SIGSTOP)
    while "T (stopped)" not in Path(f"/proc/{process.pid}/status").read_text():
        os.sched_yield()
    assert select.select([pidfd], [], [], 0)[0] == []
    process.kill()
    assert select.select([pidfd], [], [], 10)[0] == [pidfd]
    os.close(pidfd)


async def take_answer(sock: socket.socket) -> None:
    await wait_readable(sock)
    answer = receive_registration(sock)
    assert answer is not None
    assert answer[0].instance == OWN
    answer[1].close()


async def test_second_registration_replaces_the_socket_only(
    path: Path, lock: HeldLock, record: Any, child: Any
) -> None:
    process, pidfd = child()
    far = record()
    before = open_fds()
    server = LifelineServer(path, lock, OWN, far.take, far.take, far.take)
    with connect(path) as first, connect(path) as second:
        send_registration(first, Role.DECODE, DECODE, {"io": pidfd})
        await take_answer(first)
        send_registration(second, Role.DECODE, DECODE, {"io": pidfd})
        await take_answer(second)
        await wait_readable(first)
        assert receive_registration(first) is None
        process.kill()
        await far.until(lambda r: len(r) == 2)
    assert [type(entry) for entry in far] == [LifelinePeer, tuple]
    server.close()
    assert open_fds() <= before
    os.close(pidfd)


async def test_new_kvproxy_and_death_of_the_old(
    path: Path, record: Any, child: Any, run_dir: Path
) -> None:
    """The old one is stopped: its successor waits for the lock until it is killed."""
    near = record()
    _, pidfd = child()
    servers = [start_server_process(run_dir)]
    first = read_line(servers[0])
    async with running(make_client(path, near, DECODE, {"io": pidfd})):
        await near.until(lambda r: list(r) == [("up", first)])
        servers[0].send_signal(signal.SIGSTOP)
        servers.append(start_server_process(run_dir))
        assert read_line(servers[1]) == "waiting"
        assert list(near) == [("up", first)]
        servers[0].kill()
        second = await asyncio.to_thread(read_line, servers[1])
        await near.until(lambda r: len(r) == 3)
        assert sorted(near[1:]) == [("died", first), ("up", second)]
    for server in servers:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
    os.close(pidfd)


SERVER = """
import asyncio, secrets, sys
from pathlib import Path
from duplet_core.ids import InstanceId
from duplet_runtime.lifeline import LifelineServer
from duplet_runtime.lock import hold_lock

async def main():
    run_dir = Path(sys.argv[1])
    lock = await hold_lock(run_dir / "kvproxy.lock", lambda pid: print("waiting", flush=True))
    instance = InstanceId(secrets.token_hex(16))
    server = LifelineServer(
        run_dir / "lifeline.sock", lock, instance, lambda peer: True, lambda role, one: None,
        lambda role, version: None,
    )
    print(instance, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def start_server_process(run_dir: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SERVER, str(run_dir)], stdout=subprocess.PIPE)


def read_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    sock.connect(str(path))
    return sock


async def wait_readable(sock: socket.socket) -> None:
    await lifeline._readable(sock)


def message(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "role": "decode",
        "instance": DECODE,
        "version": PROTOCOL_VERSION,
        "fds": ["io"],
        "pool": "",
    }
    return msgspec.json.encode({**fields, **changes})


BAD: dict[str, tuple[bytes, list[str]]] = {
    "junk": (b"\xff{", ["pidfd"]),
    "too long": (b"x" * (MESSAGE_BYTES + 1), ["pidfd"]),
    "wrong version": (message(version=PROTOCOL_VERSION + 1), ["pidfd"]),
    "another shape": (
        msgspec.json.encode({"role": "prefill", "version": 9, "processes": []}),
        ["pidfd"],
    ),
    "wrong version of a stranger": (message(role="lb", version=9), ["pidfd"]),
    "unknown role": (message(role="cook"), ["pidfd"]),
    "role without lifeline": (message(role="lb"), ["pidfd"]),
    "missing descriptor": (message(fds=["io", "engine"]), ["pidfd"]),
    "no descriptor": (message(), []),
    "extra descriptor": (message(), ["pidfd", "pidfd"]),
    "too many descriptors": (message(), ["pidfd"] * 20),
    "no process": (message(fds=["pool"], pool="x"), ["pipe"]),
    "not a pidfd": (message(), ["pipe"]),
    "pool without text": (message(fds=["io", "pool"]), ["pidfd", "pipe"]),
    "text without pool": (message(pool="x"), ["pidfd"]),
    "same name twice": (message(fds=["io", "io"]), ["pidfd", "pidfd"]),
}
OTHER_VERSIONS = {
    "wrong version": [(Role.DECODE, PROTOCOL_VERSION + 1)],
    "another shape": [(Role.PREFILL, 9)],
}
"""What is told of them."""


@pytest.mark.parametrize("kind", list(BAD))
async def test_malformed_registration_costs_its_connection_only(
    kind: str, path: Path, lock: HeldLock, record: Any
) -> None:
    far, versions = record(), record()
    server = LifelineServer(path, lock, OWN, far.take, far.take, versions.take)
    text, kinds = BAD[kind]
    with ExitStack() as owned:
        source = {"pidfd": os.pidfd_open(os.getpid()), "pipe": os.open("/dev/null", os.O_RDONLY)}
        for fd in source.values():
            owned.callback(os.close, fd)
        before = open_fds()
        with connect(path) as sock:
            socket.send_fds(sock, [text], [source[name] for name in kinds])
            await wait_readable(sock)
            assert receive_registration(sock) is None
        assert open_fds() <= before
        assert far == []
        assert versions == OTHER_VERSIONS.get(kind, [])
        with connect(path) as sock:
            send_registration(sock, Role.DECODE, DECODE, {"io": source["pidfd"]})
            await far.until(lambda r: len(r) == 1)
    server.close()


async def test_silent_and_surplus_connections_are_closed(
    path: Path, lock: HeldLock, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "REGISTER_LIMIT_S", 0.05)
    monkeypatch.setattr(lifeline, "MAX_CONNECTIONS", 3)
    server = LifelineServer(path, lock, OWN, raise_it, raise_it, raise_it)
    with ExitStack() as owned:
        socks = [owned.enter_context(connect(path)) for _ in range(4)]
        for sock in reversed(socks):
            await wait_readable(sock)
            assert receive_registration(sock) is None
    server.close()


async def test_an_instance_that_was_refused_is_taken_when_it_comes_again(
    path: Path, lock: HeldLock, record: Any, child: Any
) -> None:
    """Such as one whose pool found no room to be mapped."""
    process, pidfd = child()
    before = open_fds()
    near, far = record(), record()
    refusals = iter([False, False, True])

    def take(peer: LifelinePeer) -> bool:
        far.take(peer)
        return next(refusals)

    server = LifelineServer(path, lock, OWN, take, far.take, far.take)
    async with running(make_client(path, near, DECODE, {"io": pidfd})):
        await near.until(lambda r: list(r) == [("up", OWN)])
        assert [type(entry) for entry in far] == [LifelinePeer] * 3
        process.kill()
        await far.until(lambda r: r[3:] == [(Role.DECODE, DECODE)])
    server.close()
    assert open_fds() <= before, "the refused one left something open"
    os.close(pidfd)


async def test_living_instances_are_bounded(
    path: Path, lock: HeldLock, record: Any, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "MAX_INSTANCES", 1)
    far = record()
    server = LifelineServer(path, lock, OWN, far.take, far.take, far.take)
    process, pidfd = child()
    other = InstanceId("e" * 32)
    with connect(path) as first, connect(path) as second:
        send_registration(first, Role.DECODE, DECODE, {"io": pidfd})
        await far.until(lambda r: len(r) == 1)
        send_registration(second, Role.DECODE, other, {"io": pidfd})
        await wait_readable(second)
        assert receive_registration(second) is None
    process.kill()
    await far.until(lambda r: len(r) == 2)
    with connect(path) as third:
        send_registration(third, Role.DECODE, other, {"io": os.pidfd_open(os.getpid())})
        await far.until(lambda r: len(r) == 3)
    server.close()
    os.close(pidfd)


def raise_it(*_: Any) -> NoReturn:
    raise AssertionError("not expected")


def test_what_is_a_pidfd(child: Any) -> None:
    process, pidfd = child()
    assert is_pidfd(pidfd)
    process.kill()
    process.wait()
    assert is_pidfd(pidfd), "also of a process that is dead"
    os.close(pidfd)
    with open("/dev/null", "rb") as file:
        assert not is_pidfd(file.fileno())


def test_registration_names_what_it_carries() -> None:
    decoded = msgspec.json.decode(message(), type=Registration)
    assert decoded.role is Role.DECODE


async def test_lock_needs_to_be_held(path: Path, lock: HeldLock) -> None:
    lock.release()
    with pytest.raises(AssertionError):
        LifelineServer(path, lock, OWN, raise_it, raise_it, raise_it)
