"""Each process of a unit is killed once while eight clients stream.

Whatever dies: every client has rows that are exactly right as far as they go, or a clear error;
every page comes back; the unit serves again; nothing is left behind.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import QUICK, LiveUnit, live_unit, pids_of_run_dir, until
from tests.e2e.streams import Ask, Load, Stream, assert_prefix, known_spec, read_all

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_COPIES = {Role.KVPROXY: "tests.faults.slow_kvproxy"}
ASKS = [Ask(seed, max_rows=60) for seed in range(100, 108)]
PROCESSES = 6
"""Four I/O processes and two engines."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit() -> AsyncIterator[LiveUnit]:
    # Most of the time before a first row is then a copy's, so that the fault meets some.
    settings = {"SLOW_COPY_S": "0.05"}
    limits = replace(QUICK, stopped_s=3.0)
    async with live_unit(settings, limits, modules=SLOW_COPIES) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spec(unit: LiveUnit) -> ModelSpec:
    async with AsyncClient(unit.listen) as client:
        return await known_spec(client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(unit: LiveUnit, spec: ModelSpec) -> list[Stream]:
    """The rows of each ask when nothing happens."""
    async with AsyncClient(unit.listen) as client:
        streams = await read_all(client, spec, ASKS)
    assert all(stream.error is None for stream in streams)
    return streams


@dataclass(frozen=True, slots=True)
class Victim:
    """Whom to kill, what else ends with it, and what its death may not touch."""

    name: str
    role: Role
    pid: Callable[[LiveUnit], int]
    streams_survive: bool
    """Streams that have rows go on: all that they need lives in lb and decode."""


VICTIMS = [
    Victim("lb", Role.LB, lambda unit: unit.pid(Role.LB), streams_survive=False),
    Victim("prefill", Role.PREFILL, lambda unit: unit.pid(Role.PREFILL), streams_survive=True),
    Victim(
        "prefill engine",
        Role.PREFILL,
        lambda unit: unit.engine_pid(Role.PREFILL),
        streams_survive=True,
    ),
    Victim("decode", Role.DECODE, lambda unit: unit.pid(Role.DECODE), streams_survive=False),
    Victim(
        "decode engine",
        Role.DECODE,
        lambda unit: unit.engine_pid(Role.DECODE),
        streams_survive=False,
    ),
    Victim("kvproxy", Role.KVPROXY, lambda unit: unit.pid(Role.KVPROXY), streams_survive=True),
]


def processes_of(unit: LiveUnit, role: Role) -> set[int]:
    """The service's processes: fate is shared by all of them."""
    with_engine = role in (Role.PREFILL, Role.DECODE)
    return {unit.pid(role), unit.engine_pid(role)} if with_engine else {unit.pid(role)}


async def assert_unharmed(unit: LiveUnit, load: Load, reference: list[Stream]) -> None:
    """All rows right, all pages back, nothing mismatched, nothing missing or left over."""
    assert unit.complaints() == []
    for done, expected in zip(load.done, reference, strict=True):
        for stream in done:
            assert_prefix(stream, expected)
    await unit.wait_serving()
    await unit.wait_idle()
    told = await unit.wait_pages_free()
    assert told.kv_checks > 0
    assert told.kv_mismatches == 0
    assert len(unit.pids()) == PROCESSES


@pytest.mark.parametrize("victim", VICTIMS, ids=lambda victim: victim.name.replace(" ", "-"))
async def test_killed_under_load(
    unit: LiveUnit, spec: ModelSpec, reference: list[Stream], victim: Victim
) -> None:
    exits = len(unit.told("exited", victim.role))
    async with Load(unit.listen, spec, ASKS) as load:
        doomed = processes_of(unit, victim.role)
        others = unit.pids() - doomed
        await load.wait_mixed()
        with_rows = [stream for stream in load.current if stream.count]
        unit.kill(victim.pid(unit))
        await unit.wait_told("exited", victim.role, exits + 1)

        async def all_gone() -> bool:
            return not doomed & pids_of_run_dir(unit.run_dir)

        await until(all_gone, "the service's processes share one fate")
        await load.wait_new_successes()
        await load.stop()

    await assert_unharmed(unit, load, reference)
    if victim.streams_survive:
        errors = [str(stream.error) for stream in with_rows if stream.error is not None]
        assert not errors, "streams ended that needed nothing of the dead"
    assert len(unit.told("exited", victim.role)) == exits + 1, "it died more than once"
    assert others <= unit.pids(), "the death took others with it"


async def test_a_kvproxy_that_stays_stopped_is_killed(
    unit: LiveUnit, spec: ModelSpec, reference: list[Stream]
) -> None:
    """Its successor waits for its lock, so only its end brings the unit back."""
    exits = len(unit.told("exited", Role.KVPROXY))
    async with Load(unit.listen, spec, ASKS) as load:
        await load.wait_mixed()
        os.kill(unit.pid(Role.KVPROXY), signal.SIGSTOP)
        exited = await unit.wait_told("exited", Role.KVPROXY, exits + 1)
        assert exited.how is not None
        assert exited.how.startswith("SIGKILL (it was stopped for ")
        await load.wait_new_successes()
        await load.stop()
    await assert_unharmed(unit, load, reference)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.KVPROXY])
async def test_who_is_told_to_leave_finishes_what_it_has_taken(
    unit: LiveUnit, spec: ModelSpec, reference: list[Stream], role: Role
) -> None:
    """Copies were in flight and others went on asking; it left before its time was over."""
    exits = len(unit.told("exited", role))
    async with Load(unit.listen, spec, ASKS) as load:
        await load.wait_mixed()
        os.kill(unit.pid(role), signal.SIGTERM)
        assert (await unit.wait_told("exited", role, exits + 1)).how == "exit code 0"
        await load.wait_new_successes()
        await load.stop()
    await assert_unharmed(unit, load, reference)
    failed = [s for done in load.done for s in done if s.error is not None and s.started]
    # A prompt may cross the word that none is taken any more.
    assert {s.error.reason for s in failed if s.error is not None} <= {"DRAINING", "WRITER_LOST"}
    assert not [s for s in failed if s.count], "what had rows goes on"
    assert '"event": "drain limit passed"' not in unit.log(role)
