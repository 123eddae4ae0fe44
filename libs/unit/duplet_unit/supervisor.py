"""Keeps a set of processes alive, and ends them in order.

One task a service: start it, watch it, and start it again with a growing delay when it ends
by itself. Services find each other, so they start in any order; they are stopped in stages,
front door first, so that streams can finish. A service that must not stay stopped (a stopped
writer proves nothing, only its exit does) is killed when the kernel shows it stopped for too
long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from duplet_runtime.fate import describe_exit
from duplet_runtime.settings import BAD_SETTINGS_EXIT
from duplet_unit.events import Event, OnEvent

COMPLAINT_BYTES = 65_536
"""A service that cannot start says why within so much of its log."""

IsReady = Callable[[str], Awaitable[bool]]
"""Asks once whether the named service serves; it must end by itself within about a second."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process to keep alive."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    address: str = ""
    """Where it serves; only reported."""
    kill_when_stopped: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Times of a supervisor, in seconds, and counts."""

    first_delay_s: float = 0.25
    """Before the first restart; doubled for every fast death in a row."""
    longest_delay_s: float = 10.0
    steady_s: float = 30.0
    """A process that lived so long was not a fast death."""
    failed_starts: int = 3
    """Deaths of a service that was never ready after which the unit gives up."""
    hopeless_code: int = BAD_SETTINGS_EXIT
    """Exit code of bad settings."""
    hopeless_starts: int = 2
    """Deaths by it, of a service that was never ready, after which the unit gives up: once more,
    because some causes pass (a port that another process leaves, a GPU's memory)."""
    poll_s: float = 0.1
    stopped_s: float = 3.0
    """How long a process may stay stopped where that is not allowed."""
    settle_s: float = 40.0
    """How long a stage after the first may take to end before it is killed."""


@dataclass(slots=True)
class _Keeper:
    """What the supervisor knows of one service."""

    service: Service
    process: asyncio.subprocess.Process | None = None
    """Owned by the service's task; None between two lives."""
    ready: bool = False
    """This life was ready once."""
    was_ready: bool = False
    """Any of its lives was."""
    told: bool = False
    """It was told to end: it gets no other life."""
    note: str = ""
    """Why the supervisor killed it, if it did."""
    log_start: int = 0
    """Where in its log this life begins, in bytes."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """No process runs and none will."""

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, if one runs; SIGKILL goes to its whole group."""
        if self.process is None or self.process.returncode is not None:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)
        except ProcessLookupError:
            pass  # It ended a moment ago; its task will see that.


class Supervisor:
    """Runs services until `drain` or `kill`, or until one of them never starts.

    Owns every process that it starts. Children lead their own process groups, so a terminal's
    Ctrl-C reaches the supervisor alone, and they die with it (`duplet_unit.child`).
    """

    def __init__(
        self,
        services: Sequence[Service],
        stages: Sequence[Sequence[str]],
        log_dir: Path,
        on_event: OnEvent,
        is_ready: IsReady,
        limits: Limits | None = None,
    ) -> None:
        """`stages` names the services in the order of their end; all of a stage end together."""
        self._keepers = {service.name: _Keeper(service) for service in services}
        self._stages = stages
        self._log_dir = log_dir
        self._on_event = on_event
        self._is_ready = is_ready
        self._limits = limits or Limits()
        self._stopping = asyncio.Event()
        self._killing = False
        self._settled = asyncio.Event()
        """The unit was ready once, or it ends."""
        self._was_ready = False
        self._died = asyncio.Event()
        """A process ended since the unit was last seen ready."""
        self._failure: str | None = None
        self._hopeless = False
        self._killed: list[str] = []

    @property
    def failure(self) -> str | None:
        """Why the unit gave up; None while it did not."""
        return self._failure

    @property
    def is_hopeless(self) -> bool:
        """The unit gave up because of a service's settings."""
        return self._hopeless

    def pid(self, name: str) -> int | None:
        """The named service's process, None between two lives."""
        process = self._keepers[name].process
        return process.pid if process is not None else None

    def log_path(self, name: str) -> Path:
        """Where the named service's output goes, all its lives in one file."""
        return self._log_dir / f"{name}.log"

    async def wait_ready(self) -> bool:
        """Wait until every service has been ready; False when the unit stopped before."""
        await self._settled.wait()
        return self._was_ready

    def drain(self) -> None:
        """End the unit in order; streams finish first."""
        self._stopping.set()
        self._settled.set()

    def kill(self) -> None:
        """End the unit now."""
        self._killing = True
        self.drain()
        for keeper in self._keepers.values():
            keeper.told = True
            self._kill(keeper, "killed by request")

    async def run(self) -> bool:
        """Keep the services until told to stop.

        Returns:
            True when all of them ended by themselves after being told; False when the unit
            gave up or a process had to be killed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for keeper in self._keepers.values():
                    group.create_task(self._keep(keeper))
                watcher = group.create_task(self._watch_unit())
                await self._stopping.wait()
                watcher.cancel()
                await self._end_in_stages()
        finally:
            self.drain()  # Wakes who waits, also when this ends with an exception.
            for keeper in self._keepers.values():
                keeper.signal(signal.SIGKILL)
                if keeper.process is not None:
                    await keeper.process.wait()
        clean = self._failure is None and not self._killed
        names = ", ".join(self._killed)
        how = "clean" if clean else "gave up"
        self._on_event(Event("unit_stopped", detail=f"killed {names}" if names else how))
        return clean

    async def _keep(self, keeper: _Keeper) -> None:
        """Give a service one life after another until it is told to end."""
        fast_deaths = 0
        while not keeper.told:
            began = time.monotonic()
            code = await self._live(keeper)
            how = describe_exit(code) + (f" ({keeper.note})" if keeper.note else "")
            if keeper.told:
                self._on_event(Event("stopped", keeper.service.name, how=how))
                break
            self._on_event(Event("exited", keeper.service.name, how=how))
            steady = keeper.was_ready and time.monotonic() - began >= self._limits.steady_s
            fast_deaths = 1 if steady else fast_deaths + 1
            if not keeper.was_ready and self._is_hopeless(code, fast_deaths):
                self._give_up(keeper, code, how, fast_deaths)
            if not self._stopping.is_set():
                await self._back_off(keeper, fast_deaths)
            if self._stopping.is_set():
                break  # A unit that ends gives nobody another life.
        keeper.gone.set()

    def _is_hopeless(self, code: int, deaths: int) -> bool:
        limits = self._limits
        hopeless = code == limits.hopeless_code and deaths >= limits.hopeless_starts
        return hopeless or deaths >= limits.failed_starts

    async def _live(self, keeper: _Keeper) -> int:
        """One life of one service: start, watch, reap. Returns its exit code."""
        service = keeper.service
        keeper.note = ""
        with self.log_path(service.name).open("ab") as log:
            keeper.log_start = log.tell()
            keeper.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "duplet_unit.child", str(os.getpid())),
                *service.argv,
                env=dict(service.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
            )
        self._on_event(Event("started", service.name, pid=keeper.process.pid))
        if keeper.told:  # The order to end came while the process was being made.
            keeper.signal(signal.SIGKILL if self._killing else signal.SIGTERM)
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(self._report_ready(keeper))]
            if service.kill_when_stopped:
                watchers.append(group.create_task(self._kill_when_stopped(keeper)))
            code = await keeper.process.wait()
            for watcher in watchers:
                watcher.cancel()
        keeper.process = None
        keeper.ready = False
        self._died.set()
        return code

    async def _report_ready(self, keeper: _Keeper) -> None:
        while True:
            if await self._is_ready(keeper.service.name):
                break
            await asyncio.sleep(self._limits.poll_s)
        keeper.ready = keeper.was_ready = True
        self._on_event(Event("ready", keeper.service.name, address=keeper.service.address))

    async def _watch_unit(self) -> None:
        """Say when all services are ready at once; anew after every death.

        A service that lives on is asked again too: it may have depended on the dead one.
        """
        addresses = {name: keeper.service.address for name, keeper in self._keepers.items()}
        while True:
            if not await self._are_ready():
                await asyncio.sleep(self._limits.poll_s)
                continue
            if not self._died.is_set():
                self._on_event(Event("unit_ready", addresses=addresses))
                self._was_ready = True
                self._settled.set()
                await self._died.wait()
            self._died.clear()

    async def _are_ready(self) -> bool:
        """One round of questions, once each life has been ready; the first no ends it."""
        if not all(keeper.ready for keeper in self._keepers.values()):
            return False
        for name in self._keepers:
            if not await self._is_ready(name):
                return False
        return True

    async def _kill_when_stopped(self, keeper: _Keeper) -> None:
        """Kill the process once it has been stopped (state T) for longer than the limit."""
        assert keeper.process is not None
        since: float | None = None
        while True:
            await asyncio.sleep(self._limits.poll_s)
            if not is_stopped(keeper.process.pid):
                since = None
                continue
            since = since or time.monotonic()
            stopped_s = time.monotonic() - since
            if stopped_s >= self._limits.stopped_s:
                self._kill(keeper, f"it was stopped for {stopped_s:.1f} s")
                return

    async def _back_off(self, keeper: _Keeper, fast_deaths: int) -> None:
        """Wait before the next life, unless the unit ends first."""
        limits = self._limits
        delay_s = min(limits.first_delay_s * 2 ** min(fast_deaths - 1, 20), limits.longest_delay_s)
        self._on_event(
            Event("restarting", keeper.service.name, restarts=fast_deaths, delay_s=delay_s)
        )
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            pass

    def _give_up(self, keeper: _Keeper, code: int, how: str, deaths: int) -> None:
        name = keeper.service.name
        times = "once" if deaths == 1 else f"{deaths} times"
        self._failure = f"{name} ended {times} without becoming ready, last with {how}"
        if code == self._limits.hopeless_code:
            self._hopeless = True
            self._failure = f"{name} cannot start with its settings: {self._complaints(keeper)}"
        self._on_event(Event("gave_up", keeper.service.name, how=how, detail=self._failure))
        self.drain()

    def _complaints(self, keeper: _Keeper) -> str:
        """What the service told the operator in this life: lines that are no log entries."""
        with self.log_path(keeper.service.name).open("rb") as log:
            log.seek(keeper.log_start)
            lines = log.read(COMPLAINT_BYTES).decode(errors="replace").splitlines()
        told = [line for line in lines if line.startswith("duplet")]
        return "; ".join(told) or "its log says why"

    async def _end_in_stages(self) -> None:
        for number, names in enumerate(self._stages):
            keepers = [self._keepers[name] for name in names]
            for keeper in keepers:
                if not keeper.told and not keeper.gone.is_set():
                    keeper.told = True
                    self._on_event(Event("stopping", keeper.service.name))
                    keeper.signal(signal.SIGTERM)
            await self._await_gone(keepers, bounded=number > 0)

    async def _await_gone(self, keepers: Sequence[_Keeper], *, bounded: bool) -> None:
        """Wait for a stage's end. The first has no bound here: its streams may be long."""
        try:
            async with asyncio.timeout(self._limits.settle_s if bounded else None):
                for keeper in keepers:
                    await keeper.gone.wait()
        except TimeoutError:
            for keeper in keepers:
                self._kill(keeper, f"it did not end within {self._limits.settle_s:g} s")
            for keeper in keepers:
                await keeper.gone.wait()

    def _kill(self, keeper: _Keeper, note: str) -> None:
        """SIGKILL the process and remember why. While the unit runs, its exit restarts it."""
        if keeper.process is None or keeper.process.returncode is not None:
            return
        keeper.note = note
        if keeper.told:
            self._killed.append(keeper.service.name)
        keeper.signal(signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether the kernel shows the process stopped by job control; False when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
