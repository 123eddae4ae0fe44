"""Each of the three processes is stopped and killed while KV moves. Nothing hangs, nothing is
written once the writer is dead, and memory comes back."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kv_move_unit import OwnerProcess
from duplet_memory.cuda_driver import open_devices

CHILD = Path(__file__).with_name("mover_child.py")
PAGES = 1024
POOL_BYTES = PAGES * 36 * 2 * 16 * 2048
LIMIT_S = 60


class MoverChild:
    """The mover's process. Owns it and its pipes."""

    def __init__(self, source: OwnerProcess, dest: OwnerProcess) -> None:
        fds = [source.pool_fd, dest.pool_fd]
        texts = [owner.description.to_json() for owner in (source, dest)]
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *texts, *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):
            # A log line.
            line = self.process.stdout.readline()
        assert line, f"the mover ended with {self.process.wait(LIMIT_S)}"
        answer: dict[str, Any] = json.loads(line)
        assert "failed" not in answer, answer
        return answer

    def go_on(self) -> None:
        """Wait for copies that were started after now."""
        before = self.read()["ok"]
        while self.read()["ok"] < before + 300:
            pass

    def finish(self) -> tuple[list[int], list[int]]:
        """Stop, unmap; free bytes of each GPU before and after."""
        assert self.process.stdin is not None
        self.process.stdin.write("stop\n")
        self.process.stdin.flush()
        answer = self.read()
        while "after" not in answer:
            answer = self.read()
        return answer["before"], answer["after"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


@pytest.fixture
def owners() -> Iterator[tuple[OwnerProcess, OwnerProcess]]:
    devices = open_devices()
    layout = {"arrangement": "page-major", "page_rows": 16, "pages": PAGES}
    pair = [OwnerProcess(d.uuid, "cumem-fd", **layout) for d in (devices[0], devices[-1])]
    for owner in pair:
        owner.wait_ready()
        owner.ask(do="fill")
    yield pair[0], pair[1]
    for owner in pair:
        owner.close()


@pytest.fixture
def mover(owners: tuple[OwnerProcess, OwnerProcess]) -> Iterator[MoverChild]:
    child = MoverChild(*owners)
    child.read()
    yield child
    child.close()


def wait_dead(owner: OwnerProcess) -> None:
    """The kernel's word: its pidfd turns readable."""
    readable, _, _ = select.select([owner.pidfd], [], [], LIMIT_S)
    assert readable


def drop_descriptors(owner: OwnerProcess) -> None:
    """Ours would keep the memory of a dead owner too."""
    os.close(owner.pool_fd)
    owner.pool_fd = -1


@pytest.mark.parametrize("index", [0, 1], ids=["source", "dest"])
def test_a_stopped_owner_changes_nothing(
    owners: tuple[OwnerProcess, OwnerProcess], mover: MoverChild, index: int
) -> None:
    owners[index].process.send_signal(signal.SIGSTOP)
    mover.go_on()
    readable, _, _ = select.select([owners[index].pidfd], [], [], 0)
    assert not readable, "stopped is not dead"
    owners[index].process.send_signal(signal.SIGCONT)
    mover.go_on()
    before, after = mover.finish()
    assert all(b <= a for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("index", [0, 1], ids=["source", "dest"])
def test_a_dead_owner_keeps_its_memory_until_we_unmap(
    owners: tuple[OwnerProcess, OwnerProcess], mover: MoverChild, index: int
) -> None:
    owners[index].process.kill()
    wait_dead(owners[index])
    drop_descriptors(owners[index])
    # A mapping outlives its exporter: copies go on, and succeed.
    mover.go_on()
    before, after = mover.finish()
    at = (0, len(before) - 1)[index]
    assert after[at] - before[at] >= POOL_BYTES, (before, after)


def test_a_dead_mover_writes_nothing_more(
    owners: tuple[OwnerProcess, OwnerProcess], mover: MoverChild
) -> None:
    source, dest = owners
    pages = list(range(-(-1500 // 16)))
    mover.go_on()
    mover.process.kill()
    mover.process.wait(LIMIT_S)
    dest.ask(do="fill", poison=True)
    first = dest.ask(do="digest", pages=pages, rows=1500, repeats=1)["digests"]
    source.ask(do="digest", pages=pages, rows=1500, repeats=1)
    assert dest.ask(do="digest", pages=pages, rows=1500, repeats=1)["digests"] == first
    assert len(set(first)) == 2, "full pages and the last one hold poison alone"


def test_a_stopped_mover_goes_on_later(
    owners: tuple[OwnerProcess, OwnerProcess], mover: MoverChild
) -> None:
    mover.process.send_signal(signal.SIGSTOP)
    assert owners[1].ask(do="digest", pages=[0], rows=16, repeats=1)["digests"]
    mover.process.send_signal(signal.SIGCONT)
    mover.go_on()
    mover.finish()
