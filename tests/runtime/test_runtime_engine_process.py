from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duplet_core.engine import Ready, Stop, Stopped
from duplet_core.errors import Reason, Unavailable
from duplet_pages.engine_config import EngineConfig
from duplet_runtime.engine_process import EngineProcess
from duplet_runtime.settings import SettingsError
from tests.descriptors import open_fds

ENGINE = """
import argparse, os, sys
from duplet_core.engine import Ready, SeqFailed, Shutdown, Stop, Stopped
from duplet_pages.engine_config import EngineConfig
from duplet_runtime.engine_link import BlockingLink
from duplet_runtime.fate import die_with_parent

die_with_parent()
parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--link-fd", type=int)
args = parser.parse_args()
config = EngineConfig.from_json(args.config)
if config.model in ("broken", "refused"):
    sys.exit(3 if config.model == "broken" else 2)
link = BlockingLink.from_fd(args.link_fd)
open_fds = len(os.listdir("/proc/self/fd")) - 1
pool = os.memfd_create("pool")
os.write(pool, b"kv")
link.send(Ready(str(open_fds), config.role, config.pool_pages, 16, 8), [pool])
while True:
    for message in link.wait():
        if isinstance(message, Stop):
            link.send(Stopped(message.seq, None))
        if isinstance(message, Shutdown):
            if config.model != "stubborn":
                sys.exit(0)
"""


@pytest.fixture
def start(record: Callable[[], Any], tmp_path: Path) -> Callable[[str], tuple[EngineProcess, Any]]:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)

    def start_engine(model: str) -> tuple[EngineProcess, Any]:
        told = record()
        config = EngineConfig(role="decode", model=model, pool_pages=77)
        command = (sys.executable, str(script))
        return EngineProcess.start(config, told.take, told.take, command), told

    return start_engine


async def test_life_of_an_engine(start: Any) -> None:
    before = open_fds()
    secret, other = os.pipe()
    os.set_inheritable(secret, True)
    engine, told = start("tiny")
    ready = await engine.ready()
    assert (ready.ready.pool, ready.ready.pages) == ("decode", 77)
    assert int(ready.ready.spec) == 4, "stdin, stdout, stderr and the link, nothing else"
    assert os.pread(ready.pool_fd, 10, 0) == b"kv"
    engine.link.send(Stop(5))
    await told.until(lambda r: list(r) == [Stopped(5, None)])
    assert await engine.stop() == 0
    assert list(told) == [Stopped(5, None)], "an exit that was asked for is not told"
    for fd in (ready.pool_fd, secret, other):
        os.close(fd)
    assert open_fds() <= before


async def test_exit_is_told_once(start: Any) -> None:
    engine, told = start("tiny")
    ready = await engine.ready()
    signal.pidfd_send_signal(engine.pidfd, signal.SIGKILL)
    await told.until(lambda r: list(r) == [-signal.SIGKILL])
    assert await engine.stop() == -signal.SIGKILL
    assert len(told) == 1
    os.close(ready.pool_fd)


async def test_exit_before_ready(start: Any) -> None:
    engine, told = start("broken")
    with pytest.raises(Unavailable) as caught:
        await engine.ready()
    assert caught.value.reason == Reason.ENGINE_FAILED
    assert caught.value.detail.endswith("exit code 3")
    assert await engine.stop() == 3
    assert list(told) == [], "whoever waits for Ready has heard it"


async def test_an_engine_that_refuses_its_settings_says_so(start: Any) -> None:
    engine, _ = start("refused")
    with pytest.raises(SettingsError, match="the engine cannot start with these settings"):
        await engine.ready()
    assert await engine.stop() == 2


async def test_engine_that_does_not_leave_is_killed(start: Any) -> None:
    engine, told = start("stubborn")
    ready = await engine.ready()
    assert isinstance(ready.ready, Ready)
    assert await engine.stop(limit_s=0.05) == -signal.SIGKILL
    assert list(told) == []
    os.close(ready.pool_fd)


def test_stopped_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed, the stopped child would read no end of file, and yet it dies."""
    child = (
        "import os, signal\n"
        "from duplet_runtime.fate import die_with_parent\n"
        "die_with_parent()\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        pidfd = os.pidfd_open(pid)
        while "T (stopped)" not in Path(f"/proc/{pid}/status").read_text():
            os.sched_yield()
        process.kill()
        process.stdout.read()  # ends when the child, which holds the pipe too, is dead
    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)
