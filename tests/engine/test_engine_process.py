"""Real engine processes on a real link."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from duplet_core.engine import (
    ChunkDone,
    FromEngine,
    Ready,
    Shutdown,
    StepDone,
    Stopped,
    ToEngine,
    Verified,
    Verify,
)
from duplet_core.ids import TransferId
from duplet_memory.layout import PoolDescription
from duplet_memory.plan import execute, plan_copy
from duplet_memory.pool import Pool, map_pool
from duplet_pages.engine_config import EngineConfig, EngineRole
from duplet_pages.spec import ModelSpec
from duplet_runtime.engine_link import encode_frame, read_from_engine, receive_some
from tests.engine.company import PLAIN, Request, random_prompt

LIMIT_S = 60.0


class Process:
    """The I/O process's side of one engine process. Owns the child and the socket."""

    def __init__(self, config: EngineConfig, *prefix: str) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(LIMIT_S)
        with theirs:
            command = [sys.executable, *(prefix or ("-m", "duplet_engine"))]
            options = ["--config", config.to_json(), "--link-fd", str(theirs.fileno())]
            self.child = subprocess.Popen(
                [*command, *options],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        self._reader = read_from_engine()
        self._waiting: list[tuple[FromEngine, tuple[int, ...]]] = []

    def send(self, message: ToEngine) -> None:
        self.sock.sendall(encode_frame(message))

    def receive(self) -> tuple[FromEngine, tuple[int, ...]]:
        while not self._waiting:
            data, fds = receive_some(self.sock)
            assert data, "the engine is gone"
            self._waiting += self._reader.feed(data, fds)
        return self._waiting.pop(0)

    def receive_ready(self) -> tuple[Ready, Pool]:
        ready, fds = self.receive()
        assert isinstance(ready, Ready)
        pool = map_pool(fds[0], PoolDescription.from_json(ready.pool))
        os.close(fds[0])
        return ready, pool

    def end(self) -> tuple[int, str]:
        """Exit code, and what stderr has beside the log, which is then in `logged`."""
        _, errors = self.child.communicate(timeout=LIMIT_S)
        lines = errors.decode().splitlines(keepends=True)
        self.logged = [json.loads(line) for line in lines if line.startswith("{")]
        return self.child.returncode, "".join(x for x in lines if not x.startswith("{"))

    def close(self) -> None:
        self.sock.close()
        self._reader.close()
        if self.child.poll() is None:
            self.child.kill()
        self.child.communicate()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.close()


def config(role: EngineRole, slots: int = 4) -> EngineConfig:
    return EngineConfig(role=role, model="tiny", pool_pages=64, slots=slots, recheck_at_end=True)


def test_a_request_through_two_engines(processes: list[Process]) -> None:
    prefill, decode = Process(config("prefill")), Process(config("decode"))
    processes += [prefill, decode]
    ready, source = prefill.receive_ready()
    other_ready, dest = decode.receive_ready()
    assert ModelSpec.from_json(ready.spec) == ModelSpec.from_json(other_ready.spec)
    assert (ready.pages, ready.page_rows, ready.slots) == (64, 16, 4)
    assert source.description.pool_id != dest.description.pool_id

    request = Request(random_prompt(np.random.default_rng(1), 100), PLAIN)
    prefill.send(request.prefill(1, range(20, 27)))
    done, _ = prefill.receive()
    assert isinstance(done, ChunkDone) and done.first_row
    pages = tuple(range(40, 49))
    plan = plan_copy(source.description, range(20, 27), dest.description, pages[:7], 0, 100)
    execute(plan, source.memory, dest.memory)
    transfer = TransferId("1" * 32)
    decode.send(Verify(1, transfer, pages[:7], 100, done.digests))
    assert decode.receive()[0] == Verified(1, transfer, ok=True, detail="")
    first = np.frombuffer(done.first_row, "<i4")
    decode.send(request.decode(1, pages, torch.from_numpy(first.copy()), 4))
    steps = 0
    while isinstance(message := decode.receive()[0], StepDone):
        steps += 1
    assert message == Stopped(1, kv_ok=True)
    assert 1 <= steps <= 3

    # Drains end with SIGTERM to the whole service: only the I/O process may act on it.
    prefill.child.send_signal(signal.SIGTERM)
    prefill.child.send_signal(signal.SIGINT)
    prefill.send(request.prefill(2, range(20, 27)))
    assert isinstance(prefill.receive()[0], ChunkDone)
    prefill.send(Shutdown())
    assert prefill.end() == (0, "")
    assert [line["event"] for line in prefill.logged] == ["products"]
    decode.sock.close()
    assert decode.end() == (1, "duplet_engine: the I/O process closed the link\n")
    source.close()
    dest.close()


def test_a_fault_of_the_whole_engine_ends_the_process(processes: list[Process]) -> None:
    decode = Process(config("decode", slots=1))
    processes.append(decode)
    decode.receive_ready()[1].close()
    request = Request(random_prompt(np.random.default_rng(1), 20), PLAIN)
    first = torch.zeros(11, dtype=torch.int64)
    decode.send(request.decode(1, range(8), first, 90))
    decode.send(request.decode(2, range(8, 16), first, 90))
    code, errors = decode.end()
    assert code != 0
    assert errors.startswith("Traceback")
    assert "InvariantError: more than 1 streams" in errors


def test_a_signal_that_ends_the_engine_leaves_the_line_that_it_was_at(
    processes: list[Process],
) -> None:
    decode = Process(config("decode"))
    processes.append(decode)
    decode.receive_ready()[1].close()
    decode.child.send_signal(signal.SIGSEGV)
    code, errors = decode.end()
    assert code == -signal.SIGSEGV
    assert errors.startswith("Fatal Python error: Segmentation fault")
    assert "process.py" in errors


def test_an_unknown_model_is_refused(processes: list[Process]) -> None:
    process = Process(EngineConfig(role="prefill", model="huge"))
    processes.append(process)
    code, errors = process.end()
    assert code == 2
    assert errors.startswith("duplet_engine: model is 'huge', there is 'wren', 'tiny'")
    assert errors.count("\n") == 1, "one line, no traceback"


PARENT = """
import subprocess, sys
command = [sys.executable, "-m", "duplet_engine", *sys.argv[1:]]
child = subprocess.Popen(command, pass_fds=[int(sys.argv[-1])])
print(child.pid, flush=True)
child.wait()
"""


def test_the_engine_dies_with_its_parent(processes: list[Process]) -> None:
    """The link stays open, so that only the kernel's signal can be the cause."""
    parent = Process(config("prefill"), "-c", PARENT)
    processes.append(parent)
    assert parent.child.stdout is not None
    pidfd = os.pidfd_open(int(parent.child.stdout.readline()))
    parent.receive_ready()[1].close()
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(0) == []
    parent.child.kill()
    assert poller.poll(LIMIT_S * 1000)
    os.close(pidfd)
