"""Faults on one unit under load, and what must be true after each.

A case's fault begins when some streams have rows and others wait for copies in flight, and is
over when its coroutine returns: what was stopped goes on, what died is being started again.
A *draining* case tells lb to take nothing new just before; after it there is no traffic, and
everything must come back all the same.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import SERVICES, LiveUnit, stopped
from tests.e2e.streams import Ask, Load, Stream, assert_clear_error, assert_prefix, is_prefix
from tests.faults.choked_stream import Choke, choked_socket
from tests.faults.error_times import ErrorTimes, Knowledge, measure, read_lines

HOLD_S = 3.5
"""How long a fault lasts that ends by itself: longer than a transfer's deadline here, and than
the keepalive that ends a stopped peer's streams."""

EXIT_FOR_PROOF = "exit code 75"
OVERDUE = '"event": "drain limit passed"'


@dataclass(slots=True)
class Scene:
    """A unit, what right rows are, and what was seen of it so far."""

    unit: LiveUnit
    spec: ModelSpec
    asks: list[Ask]
    reference: list[Stream]
    same_share: float = 1.0
    """Streams whose rows must be the reference's: on a GPU company may change a last bit."""
    rounds: int = 1
    """Requests that each client has had before a fault begins."""
    checks: dict[str, int] = field(default_factory=dict)
    """KV checks by decode's instance, as last told."""
    mismatches: int = 0
    lb_deaths_s: list[float] = field(default_factory=list)
    lb_awake_s: list[float] = field(default_factory=list)
    choke: Choke | None = None
    """Between lb and decode, while there is one."""

    @property
    def kv_checks(self) -> int:
        return sum(self.checks.values())

    async def observe(self) -> None:
        """Take lb's word on the checks."""
        told = await self.unit.ask()
        if told is None or not told.kv_checks:
            return
        decode = next(s.instance for s in told.services if s.name == Role.DECODE)
        self.checks[decode] = max(self.checks.get(decode, 0), told.kv_checks)
        self.mismatches = max(self.mismatches, told.kv_mismatches, self._logged_mismatches())

    def _logged_mismatches(self) -> int:
        """Of all of decode's lives."""
        return self.unit.log(Role.DECODE).count('"event": "kv mismatch"')


Fault = Callable[[Scene], Awaitable[None]]
Around = Callable[[Scene], AbstractAsyncContextManager[None]]


def at_once(scene: Scene) -> AbstractAsyncContextManager[None]:
    """Nothing to prepare."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    fault: Fault
    around: Around = at_once
    """Prepares the unit before the load and cleans up after it."""
    draining: bool = False
    coming: int = 1
    """So many requests must have copies ahead of them; while draining no others follow."""
    restarts_lb: bool = False
    """The fault itself gives the unit a new lb, which does not drain."""
    peaceful: bool = False
    """Draining, it costs no client anything: who leaves finishes what it has."""


def as_draining(case: Case) -> Case:
    return replace(case, name=f"draining: {case.name}", draining=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    seconds: float
    good: int
    errors: Counter[str]
    times: ErrorTimes


class Ear:
    """Hears what the unit says from now on, and tells what came of streams that met it."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._logs = {role: scene.unit.supervisor.log_path(role) for role in SERVICES}
        self._offsets = {role: path.stat().st_size for role, path in self._logs.items()}
        scene.lb_deaths_s.clear()
        scene.lb_awake_s.clear()

    def outcome(self, name: str, seconds: float, streams: list[Stream]) -> Outcome:
        """Of ended streams whose requests have ids of the client's."""
        scene = self._scene
        lines = read_lines(self._logs, self._offsets)
        errors = [stream.error for stream in streams if stream.error is not None]
        return Outcome(
            name=name,
            seconds=seconds,
            good=len(streams) - len(errors),
            errors=Counter(error.reason or error.code.name for error in errors),
            times=measure(streams, Knowledge(lines, scene.lb_deaths_s, scene.lb_awake_s)),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the unit."""

    name: str
    role: Role
    engine: bool = False

    def pid(self, unit: LiveUnit) -> int:
        return unit.engine_pid(self.role) if self.engine else unit.pid(self.role)


PARTS = (
    Part("lb", Role.LB),
    Part("prefill", Role.PREFILL),
    Part("prefill's engine", Role.PREFILL, engine=True),
    Part("decode", Role.DECODE),
    Part("decode's engine", Role.DECODE, engine=True),
    Part("kvproxy", Role.KVPROXY),
)


# --- faults -----------------------------------------------------------------------


async def stop(part: Part, scene: Scene) -> None:
    """Stopped for a while, then continued. It may leave by itself for what it withheld."""
    with stopped(part.pid(scene.unit)):
        await asyncio.sleep(HOLD_S)
    if part.role is Role.LB:
        scene.lb_awake_s.append(time.time())


async def end(part: Part, number: signal.Signals, scene: Scene) -> None:
    """Killed, or told to leave; the supervisor starts it again. Who is told to leave finishes what
    it has, and is done with that before its time is over, also while others go on."""
    exits = len(scene.unit.told("exited", part.role))
    overdue = scene.unit.log(part.role).count(OVERDUE)
    with watched_death(scene.unit.pid(part.role)) as death:
        os.kill(part.pid(scene.unit), number)
        died_s = await death
    if part.role is Role.LB:
        scene.lb_deaths_s.append(died_s)
    exited = await scene.unit.wait_told("exited", part.role, exits + 1)
    if number == signal.SIGTERM:
        assert exited.how == "exit code 0", exited
        assert scene.unit.log(part.role).count(OVERDUE) == overdue, f"{part.name}: drain overdue"


async def stop_then_kill_kvproxy(scene: Scene) -> None:
    """Moves are queued and deadlines pass while it is stopped; only its death proves anything."""
    pid = scene.unit.pid(Role.KVPROXY)
    with stopped(pid):
        await asyncio.sleep(HOLD_S)
        assert await scene.unit.gauge(Role.DECODE, "pages_quarantined") > 0
        await end(PARTS[-1], signal.SIGKILL, scene)


async def withhold_three(scene: Scene) -> None:
    """Three copies end UNKNOWN: red, then out with the code that says why."""
    unit = scene.unit
    exits = len(unit.told("exited", Role.KVPROXY))
    address = unit.addresses[Role.KVPROXY]
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="writer")
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(unit.pid(Role.KVPROXY), signal.SIGUSR1)
        # The process that says so lives: a health that is never red ends the stream instead.
        async with asyncio.timeout(60):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    exited = await unit.wait_told("exited", Role.KVPROXY, exits + 1)
    assert exited.how == EXIT_FOR_PROOF, exited


async def choke_decode(scene: Scene) -> None:
    """Nobody reads what decode says to lb; both live, and lb's own words still arrive."""
    assert scene.choke is not None
    scene.choke.close()
    await asyncio.sleep(HOLD_S)
    scene.choke.open()


@asynccontextmanager
async def choke_between(scene: Scene) -> AsyncIterator[None]:
    """lb, in a new life, reaches decode through a choke."""
    unit = scene.unit
    async with choked_socket(unit.run_dir / f"{Role.DECODE}.sock") as scene.choke:
        await end(PARTS[0], signal.SIGKILL, scene)
        await unit.wait_serving()
        yield


@contextmanager
def watched_death(pid: int) -> Iterator[asyncio.Future[float]]:
    """When (wall clock, s) the kernel says that the process has exited."""
    loop = asyncio.get_running_loop()
    died: asyncio.Future[float] = loop.create_future()
    pidfd = os.pidfd_open(pid)

    def tell() -> None:
        loop.remove_reader(pidfd)
        died.set_result(time.time())

    loop.add_reader(pidfd, tell)
    try:
        yield died
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _ended(part: Part, how: str, number: signal.Signals) -> Case:
    return Case(
        f"{part.name} {how}",
        partial(end, part, number),
        restarts_lb=part.role is Role.LB,
        peaceful=number == signal.SIGTERM,
    )


CASES = (
    *(Case(f"{part.name} stopped, continued", partial(stop, part)) for part in PARTS),
    *(_ended(part, "killed", signal.SIGKILL) for part in PARTS),
    *(_ended(part, "restarted", signal.SIGTERM) for part in PARTS if not part.engine),
    Case("kvproxy stopped, deadlines pass, killed", stop_then_kill_kvproxy),
    Case("decode's output stopped", choke_decode, around=choke_between),
    Case("three ends withheld", withhold_three, coming=7),
)
ALL_CASES = (*CASES, *map(as_draining, CASES))
PAUSES_AND_KILLS = tuple(
    case
    for case in CASES
    if case.name.endswith(("continued", " killed", "output stopped"))
    and not case.name.startswith("lb")
    and "deadlines" not in case.name
)
"""What a unit on two GPUs goes through, where each start takes long."""


# --- one case ---------------------------------------------------------------------


async def run_case(scene: Scene, case: Case) -> Outcome:
    """Do one fault and check everything after it.

    Raises:
        AssertionError: a client had wrong rows or an unclear error, a page did not come back,
        the unit does not serve, or our own code complained.
    """
    began = time.monotonic()
    async with case.around(scene):
        ear = Ear(scene)
        load = await _fault_under_load(scene, case)
    await _assert_unharmed(scene, load)
    if case.draining:
        await _open_again(scene, case)
    await scene.unit.wait_serving()
    await scene.observe()
    assert scene.mismatches == 0, f"{scene.mismatches} KV mismatches"
    streams = [stream for done in load.done for stream in done]
    outcome = ear.outcome(case.name, time.monotonic() - began, streams)
    if case.draining and case.peaceful:
        assert not outcome.errors, outcome.errors
    return outcome


async def _fault_under_load(scene: Scene, case: Case) -> Load:
    name = case.name.replace(" ", "-")
    async with Load(scene.unit.listen, scene.spec, scene.asks, name) as load:
        await load.wait_mixed(case.coming, scene.rounds)
        if case.draining:
            load.send_no_more()
            async with AsyncClient(scene.unit.listen) as client:
                assert await client.drain() > 0
        await scene.observe()  # A decode that dies takes its count with it.
        await case.fault(scene)
        if not case.draining:
            await load.wait_new_successes()
        await load.stop()
    return load


async def _assert_unharmed(scene: Scene, load: Load) -> None:
    unit = scene.unit
    pairs = [
        (stream, expected)
        for done, expected in zip(load.done, scene.reference, strict=True)
        for stream in done
    ]
    for stream, expected in pairs:
        if scene.same_share == 1.0:
            assert_prefix(stream, expected)
        assert_clear_error(stream)
    same = sum(is_prefix(stream, expected) for stream, expected in pairs)
    assert same >= scene.same_share * len(pairs), f"{len(pairs) - same} of {len(pairs)} differ"
    await unit.wait_idle()
    await unit.wait_pages_free()
    assert unit.complaints() == []


async def _open_again(scene: Scene, case: Case) -> None:
    """A drained lb stays so until it starts again; then the unit serves."""
    if not case.restarts_lb:
        await end(PARTS[0], signal.SIGTERM, scene)
    await scene.unit.wait_serving()
    async with Load(scene.unit.listen, scene.spec, scene.asks) as load:
        await load.wait_new_successes()
    await _assert_unharmed(scene, load)
