"""The supervisor, with real processes that are short Python scripts.

Tests wait for the supervisor's events and for processes' ends, never for time to pass.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from duplet_unit.events import Event, EventKind
from duplet_unit.supervisor import Limits, Service, Supervisor, is_stopped

# Announces itself by a file, so that readiness is a fact of the child and not of the clock.
OBEDIENT = """
import pathlib, signal, sys
ready, order, name = (*map(pathlib.Path, sys.argv[1:3]), sys.argv[3])
def end(*_):
    with order.open("a") as file:
        file.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
ready.touch()
while True:
    signal.pause()
"""
DEAF = OBEDIENT.replace("signal.signal(signal.SIGTERM, end)", "signal.signal(15, signal.SIG_IGN)")

QUICK = Limits(first_delay_s=0.01, longest_delay_s=0.04, poll_s=0.01, stopped_s=0.05, settle_s=0.2)


class Story:
    """Collects events and lets a test wait for the next one of a kind."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.questions: Counter[str] = Counter()
        self._question = asyncio.Condition()
        self._queue: asyncio.Queue[Event] = asyncio.Queue(maxsize=1000)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._queue.put_nowait(event)

    async def note_question(self, name: str) -> None:
        async with self._question:
            self.questions[name] += 1
            self._question.notify_all()

    async def asked(self, name: str, times: int) -> None:
        """Wait until the service was asked so often whether it is ready."""
        async with self._question:
            await self._question.wait_for(lambda: self.questions[name] >= times)

    async def next(self, kind: EventKind, service: str | None = None) -> Event:
        while True:
            event = await self._queue.get()
            if event.kind == kind and service in (None, event.service):
                return event


def script(tmp_path: Path, name: str, body: str = OBEDIENT, *, watched: bool = False) -> Service:
    argv = (sys.executable, "-c", body, str(tmp_path / f"{name}.ready"), str(tmp_path / "order"))
    return Service(name, (*argv, name), os.environ, kill_when_stopped=watched)


@asynccontextmanager
async def supervised(
    tmp_path: Path, services: Sequence[Service], limits: Limits = QUICK
) -> AsyncIterator[tuple[Supervisor, Story, asyncio.Task[bool]]]:
    async def is_ready(name: str) -> bool:
        await story.note_question(name)
        return (tmp_path / f"{name}.ready").exists()

    story = Story()
    stages = [[service.name] for service in services]
    supervisor = Supervisor(services, stages, tmp_path, story, is_ready, limits)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, story, task
    finally:
        supervisor.kill()
        await task


async def test_drains_in_stages_and_says_so(tmp_path: Path) -> None:
    services = [script(tmp_path, name) for name in ("front", "middle", "back")]
    async with supervised(tmp_path, services) as (supervisor, story, task):
        assert await supervisor.wait_ready()
        kinds = [event.kind for event in story.events]
        assert kinds.index("unit_ready") > max(i for i, kind in enumerate(kinds) if kind == "ready")
        supervisor.drain()
        assert await task
    assert (tmp_path / "order").read_text().split() == ["front", "middle", "back"]
    stopped = [event for event in story.events if event.kind == "stopped"]
    assert [event.how for event in stopped] == ["exit code 0"] * 3
    assert story.events[-1] == Event("unit_stopped", detail="clean")


async def test_restarts_with_growing_delay(tmp_path: Path) -> None:
    async with supervised(tmp_path, [script(tmp_path, "one")]) as (supervisor, story, _):
        assert await supervisor.wait_ready()
        delays = []
        for number in range(1, 5):
            await story.next("ready")
            pid = supervisor.pid("one")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert (await story.next("exited")).how == "SIGKILL"
            restarting = await story.next("restarting")
            assert restarting.restarts == number
            delays.append(restarting.delay_s)
        assert delays == [0.01, 0.02, 0.04, 0.04]
        started = await story.next("started")
        assert started.pid is not None
        assert started.pid == supervisor.pid("one")


async def test_the_unit_is_ready_again_only_when_all_say_so(tmp_path: Path) -> None:
    services = [script(tmp_path, "front"), script(tmp_path, "back")]
    async with supervised(tmp_path, services) as (supervisor, story, _):
        assert await supervisor.wait_ready()
        await story.next("unit_ready")
        (tmp_path / "front.ready").unlink()  # The one that lives on lost what it depends on.
        pid = supervisor.pid("back")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await story.next("ready", "back")
        asked = story.questions["front"]
        await story.asked("front", asked + 3)
        assert [event.kind for event in story.events].count("unit_ready") == 1
        (tmp_path / "front.ready").touch()
        await story.next("unit_ready")


async def test_names_the_exit_code(tmp_path: Path) -> None:
    body = OBEDIENT.replace("    signal.pause()", "    sys.exit(7)")
    async with supervised(tmp_path, [script(tmp_path, "one", body)]) as (_, story, _task):
        assert (await story.next("exited")).how == "exit code 7"


async def test_gives_up_when_a_service_never_starts(tmp_path: Path) -> None:
    services = [
        script(tmp_path, "good"),
        script(tmp_path, "bad", "print('no such model'); raise SystemExit(3)"),
    ]
    async with supervised(tmp_path, services) as (supervisor, story, task):
        assert not await supervisor.wait_ready()
        assert not await task
    assert supervisor.failure == ("bad ended 3 times without becoming ready, last with exit code 3")
    assert [e.service for e in story.events if e.kind == "gave_up"] == ["bad"]
    assert supervisor.log_path("bad").read_text() == "no such model\n" * 3


async def test_bad_settings_are_told_after_one_more_try(tmp_path: Path) -> None:
    body = "import sys; print('{}'); print('duplet one: port: taken', file=sys.stderr); sys.exit(2)"
    async with supervised(tmp_path, [script(tmp_path, "one", body)]) as (supervisor, story, task):
        assert not await supervisor.wait_ready()
        assert not await task
        assert supervisor.is_hopeless
        assert supervisor.failure == ("one cannot start with its settings: duplet one: port: taken")
    assert [event.kind for event in story.events].count("started") == 2
    assert story.events[-1] == Event("unit_stopped", detail="gave up")


async def test_a_cause_that_passes_ends_no_unit(tmp_path: Path) -> None:
    """The port that was taken at the first start is free at the second."""
    body = (
        f"import pathlib, sys\nif not (mark := pathlib.Path({str(tmp_path / 'was')!r})).exists():\n"
        f"    mark.touch()\n    sys.exit(2)\n{OBEDIENT}"
    )
    async with supervised(tmp_path, [script(tmp_path, "one", body)]) as (supervisor, story, _):
        assert await supervisor.wait_ready()
        assert (await story.next("exited")).how == "exit code 2"


async def test_kills_a_stopped_service_that_must_not_be_stopped(tmp_path: Path) -> None:
    services = [script(tmp_path, "writer", watched=True)]
    async with supervised(tmp_path, services) as (supervisor, story, _):
        assert await supervisor.wait_ready()
        pid = supervisor.pid("writer")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        how = (await story.next("exited")).how
        assert how is not None
        assert how.startswith("SIGKILL (it was stopped for ")
        await story.next("ready")
        assert supervisor.pid("writer") != pid


async def test_leaves_other_stopped_services_alone(tmp_path: Path) -> None:
    services = [script(tmp_path, "writer", watched=True), script(tmp_path, "other")]
    async with supervised(tmp_path, services) as (supervisor, story, _):
        assert await supervisor.wait_ready()
        other, writer = supervisor.pid("other"), supervisor.pid("writer")
        assert other is not None
        assert writer is not None
        os.kill(other, signal.SIGSTOP)
        os.kill(writer, signal.SIGSTOP)
        await story.next("exited", "writer")  # Stopped later, so the limit is over for both.
        await story.next("ready", "writer")
        assert supervisor.pid("other") == other
        assert is_stopped(other)


async def test_a_deaf_service_is_killed_at_the_end(tmp_path: Path) -> None:
    services = [script(tmp_path, "front"), script(tmp_path, "deaf", DEAF)]
    async with supervised(tmp_path, services) as (supervisor, story, task):
        assert await supervisor.wait_ready()
        supervisor.drain()
        assert not await task
    assert story.events[-1] == Event("unit_stopped", detail="killed deaf")


async def test_the_first_stage_is_waited_for_and_kill_ends_the_wait(tmp_path: Path) -> None:
    services = [script(tmp_path, "deaf", DEAF), script(tmp_path, "back")]
    async with supervised(tmp_path, services) as (supervisor, story, task):
        assert await supervisor.wait_ready()
        supervisor.drain()
        await story.next("stopping", "deaf")
        supervisor.kill()
        assert not await task
    assert not [event for event in story.events if event.kind == "stopping"][1:]


def test_no_orphan_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, pathlib
from duplet_unit.supervisor import Supervisor, Service, Limits
async def is_ready(name): return True
def tell(event):
    if event.kind == "started": print(event.pid, flush=True)
service = Service("one", ("sleep", "1000"), {{"PATH": {os.environ["PATH"]!r}}})
asyncio.run(Supervisor([service], [["one"]], pathlib.Path({str(tmp_path)!r}), tell, is_ready).run())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        child_fd = os.pidfd_open(int(supervisor.stdout.readline()))
        try:
            supervisor.kill()
            readable, _, _ = select.select([child_fd], [], [], 30)
        finally:
            os.close(child_fd)
    assert readable, "the child outlived its supervisor"


def test_a_child_whose_parent_is_gone_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "duplet_unit.child", "1", "echo", "ran"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_gone_process_is_not_stopped() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not is_stopped(process.pid)
