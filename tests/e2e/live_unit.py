"""A unit of real processes for tests, with a view into it.

Waiting is always for a fact: `until` asks again and again and gives up after a generous limit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from duplet_client import AsyncClient, GenerateError, Unit
from duplet_core.ids import Role
from duplet_unit.events import Event, EventKind
from duplet_unit.gpus import on_gpus
from duplet_unit.probe import is_serving
from duplet_unit.supervisor import Limits, Service, Supervisor
from duplet_unit.unit import (
    LISTEN_VARIABLE,
    RUN_DIR_VARIABLE,
    STAGES,
    free_local_addresses,
    owned_run_dir,
    unit_environment,
    unit_services,
)
from tests.last_words import LastWords

POLL_S = 0.03
LIMIT_S = 40.0
"""Far beyond what anything here takes, also on a loaded machine."""

QUICK = Limits(first_delay_s=0.05, longest_delay_s=0.2, poll_s=0.1, stopped_s=60.0)
SERVICES = (Role.LB, Role.PREFILL, Role.DECODE, Role.KVPROXY)
OWN_FAULTS = ("handler failed", "invariant broken", "event loop")

T = TypeVar("T")


async def until(ask: Callable[[], Awaitable[T]], what: str, limit_s: float = LIMIT_S) -> T:
    """Ask until the answer is true; returns it.

    Raises:
        AssertionError: it was not within `limit_s`; names `what` and the last answer.
    """
    answer: T | None = None
    try:
        async with asyncio.timeout(limit_s):
            while True:
                answer = await ask()
                if answer:
                    return answer
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {limit_s:g} s: {what}; last: {answer!r}") from None


TINY = {f"DUPLET_{service}_MODEL": "tiny" for service in ("PREFILL", "DECODE", "MONOLITH")}


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without anybody's Duplet settings, and what the test wants; a model that is quick."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("DUPLET_")}
    return {**unit_environment(base), **TINY, **extra}


class LiveUnit:
    """A running unit. Owned by `live_unit`, which starts and ends its processes."""

    def __init__(
        self,
        run_dir: Path,
        listen: str,
        services: list[Service],
        metrics: Mapping[str, str],
        limits: Limits,
    ) -> None:
        self.run_dir = run_dir
        self.listen = listen
        self.addresses = {service.name: service.address for service in services}
        self.events: list[Event] = []
        self.metrics = metrics
        self.supervisor = Supervisor(
            services, STAGES, run_dir / "logs", self.events.append, self._is_ready, limits
        )

    async def _is_ready(self, name: str) -> bool:
        return await is_serving(self.addresses[name], "ready")

    # --- processes -----------------------------------------------------------

    def pid(self, role: Role) -> int:
        """The service's (I/O) process."""
        pid = self.supervisor.pid(role)
        assert pid is not None, f"{role} does not run"
        return pid

    def engine_pid(self, role: Role) -> int:
        """The engine process of prefill or decode."""
        children = Path(f"/proc/{self.pid(role)}/task/{self.pid(role)}/children")
        pids = [int(pid) for pid in children.read_text().split()]
        assert len(pids) == 1, f"{role} has the children {pids}"
        return pids[0]

    def pids(self) -> set[int]:
        """Every process that belongs to this unit: its environment names the run directory."""
        return pids_of_run_dir(self.run_dir)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def log(self, role: Role) -> str:
        """All that the service has said."""
        return self.supervisor.log_path(role).read_text()

    def describe_failure(self) -> str:
        """Why it gave up, with the end of the log of who is to blame."""
        blamed = [str(event.service) for event in self.told("gave_up")]
        logs = "".join(self.supervisor.log_path(name).read_text()[-3000:] for name in blamed)
        return f"{self.supervisor.failure}\n{logs}"

    def complaints(self) -> list[str]:
        """Log lines that no fault from outside excuses: our own code went wrong."""
        return [
            line
            for role in SERVICES
            for line in self.log(role).splitlines()
            if any(f'"event": "{event}"' in line for event in OWN_FAULTS)
        ]

    def told(self, kind: EventKind, service: str | None = None) -> list[Event]:
        """The supervisor's events of a kind so far."""
        return [e for e in self.events if e.kind == kind and service in (None, e.service)]

    async def wait_told(self, kind: EventKind, service: str, count: int) -> Event:
        """Wait for the supervisor's `count`-th event of a kind about a service."""

        async def enough() -> bool:
            return len(self.told(kind, service)) >= count

        await until(enough, f"{kind} {service}, {count} times")
        return self.told(kind, service)[count - 1]

    # --- what it says ----------------------------------------------------------

    async def gauge(self, role: Role, name: str) -> float:
        """One of a service's Prometheus values; -1 while the service does not answer."""
        return await asyncio.to_thread(self._read_metric, role, f"duplet_{role}_{name}")

    def _read_metric(self, role: Role, full_name: str) -> float:
        try:
            with urllib.request.urlopen(f"http://{self.metrics[role]}/metrics") as answer:
                text = answer.read().decode()
        except OSError:
            return -1
        values = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
        return values[full_name]

    async def ask(self) -> Unit | None:
        """GetUnit; None while lb does not answer."""
        async with AsyncClient(self.listen) as client:
            try:
                return await client.unit()
            except GenerateError:
                return None

    async def wait_serving(self) -> None:
        """Every service is ready, lb knows both others and decode takes new work."""

        async def serves() -> bool:
            for role in SERVICES:
                if not await self._is_ready(role):
                    return False
            unit = await self.ask()
            return unit is not None and unit.credit is not None and not unit.credit.refusing

        await until(serves, "the unit serves")

    async def wait_idle(self) -> None:
        """Nothing runs and every page of both pools is free or cached, in the owners' books."""

        async def held() -> dict[str, float]:
            found = {"lb requests": await self.gauge(Role.LB, "requests")}
            for role in (Role.PREFILL, Role.DECODE):
                total = await self.gauge(role, "pages_total")
                found[f"{role} pages"] = total - await self.gauge(role, "pages_free")
                if role is Role.PREFILL:  # A voice stays, for the next request of its kind.
                    found[f"{role} pages"] -= await self.gauge(role, "pages_cached")
                found[f"{role} transfers"] = await self.gauge(role, "transfers")
                assert total != 0
            found["kvproxy transfers"] = await self.gauge(Role.KVPROXY, "transfers")
            return {what: value for what, value in found.items() if value != 0}

        last: dict[str, float] = {}

        async def idle() -> bool:
            last.clear()
            last.update(await held())
            return not last

        try:
            await until(idle, "all pages free")
        except AssertionError as error:
            raise AssertionError(f"{error}; still held: {last}") from None

    async def wait_pages_free(self) -> Unit:
        """lb's word for the same: decode's pages are all free in GetUnit. Returns the unit."""

        async def free() -> Unit | None:
            unit = await self.ask()
            if unit is None or unit.credit is None or unit.live_streams:
                return None
            states = {name: pages for name, pages in unit.pages.items() if pages}
            return unit if states == {"free": unit.credit.total_pages} else None

        unit = await until(free, "GetUnit tells all pages free")
        assert unit is not None
        return unit


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process while the context lasts; continue it in any case."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # It may have left meanwhile.
            os.kill(pid, signal.SIGCONT)


def pids_of_run_dir(run_dir: Path) -> set[int]:
    """Processes, this one excepted, whose environment names the run directory."""
    wanted = f"DUPLET_RUN_DIR={run_dir}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # Gone meanwhile, or another user's.
        if wanted in environment.split(b"\0"):
            found.add(int(entry.name))
    return found


def _placed(told: Mapping[str, str], service: Service, metrics: str) -> dict[str, str]:
    """What a service is told, with this unit's places."""
    shared = service.environment
    places = {
        **{name: shared[name] for name in (RUN_DIR_VARIABLE, LISTEN_VARIABLE)},
        "DUPLET_METRICS_PORT": metrics.rpartition(":")[2],
    }
    own = {name: places.get(name, value) for name, value in told.items()}
    return clean_environment({**own, "PYTHONPATH": shared["PYTHONPATH"]})


@asynccontextmanager
async def live_unit(
    settings: Mapping[str, str] | None = None,
    limits: Limits = QUICK,
    modules: Mapping[Role, str] | None = None,
    gpus: Sequence[str] = (),
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> AsyncIterator[LiveUnit]:
    """Start a unit, wait until it serves, and drain it afterwards; nothing of it is left.

    `modules`: what runs in a service's place, by the name of a module of these tests. `gpus`:
    prefill's and decode's; none: on the CPU. `environments`: by service, all that it is told,
    and this unit's places for those that it names; none: they share one, in which a copy check
    at the end of each stream is on: a write that came late would show.
    """
    listen, *addresses = free_local_addresses(1 + len(SERVICES))
    metrics = dict(zip(map(str, SERVICES), addresses, strict=True))
    # The tests' modules, and where the product's are if they are not installed.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = clean_environment(
        {
            "DUPLET_DECODE_RECHECK_AT_END": "true",
            **{
                f"DUPLET_{role.upper()}_METRICS_PORT": address.rpartition(":")[2]
                for role, address in metrics.items()
            },
            **(settings or {}),
            "PYTHONPATH": os.pathsep.join(paths),
        }
    )
    with owned_run_dir(None) as run_dir:
        services = unit_services(run_dir, listen, environment)
        if gpus:
            services = on_gpus(services, gpus)
        services = [
            replace(service, argv=(sys.executable, "-m", modules[Role(service.name)]))
            if modules and service.name in modules
            else service
            for service in services
        ]
        if environments is not None:
            services = [
                replace(s, environment=_placed(environments[s.name], s, metrics[s.name]))
                for s in services
            ]
        unit = LiveUnit(run_dir, listen, services, metrics, limits)
        running = asyncio.create_task(unit.supervisor.run())
        try:
            assert await unit.supervisor.wait_ready(), unit.describe_failure()
            await unit.wait_serving()
            with LastWords(run_dir / "logs"):
                yield unit
            assert not unit.complaints(), unit.complaints()[0][:3000]
        finally:
            unit.supervisor.drain()
            clean = await running
        assert clean, f"the unit did not end by itself: {unit.events[-1]}"
        assert unit.pids() == set(), "processes are left behind"
