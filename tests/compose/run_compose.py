"""A unit of containers, from images to nothing left: `python -m tests.compose.run_compose`.

Builds the four images, starts the unit with Compose, and uses it from outside through the
published port. Under load decode's container is killed, kvproxy crashes, kvproxy is paused past
a deadline; in the end Compose stops the unit while streams run. Every row that any client got
is compared with the row of an undisturbed run, and the last line is the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from duplet_unit.unit import free_local_address
from tests.compose.composed_unit import PROJECT, ComposedUnit
from tests.compose.debian_prometheus import NoPrometheus
from tests.compose.docker_engine import NoEngine, make_base_image, running_engine
from tests.compose.images import SERVICES, build_images, check_images, image_of
from tests.compose.observed_unit import watch_unit
from tests.e2e.live_unit import until
from tests.e2e.streams import (
    Ask,
    Load,
    Stream,
    assert_prefix,
    assert_same,
    known_spec,
    read_all,
)

ASKS = [Ask(seed, max_rows=60) for seed in range(300, 308)]
LONG_TEXT = "The train from the other side of the river stops at every village, number"
LONG_ASKS = [
    [Ask(seed, LONG_TEXT, max_rows=250) for seed in range(k, k + 12)] for k in (400, 412, 424)
]
"""One batch after the other."""
LONG_ROWS = 100
LONG_AT_LEAST = 4
LONG_AT_MOST = 8
"""At once; half of decode's slots, so that nobody who asks again finds none."""

PAUSED_S = 4.0
"""Longer than a transfer's deadline here, and than the keepalive that ends a peer's streams."""

CLEAR = frozenset(
    {
        *("DECODE_LOST", "PREFILL_LOST", "WRITER_LOST", "TRANSFER_FAILED", "TRANSFER_DEADLINE"),
        *("NOT_READY", "QUARANTINE", "OVERLOADED", "DRAINING"),
    }
)
"""What a client may be told when a part of the unit fails: each says that it may try again."""


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Say what was done and how long it took."""
    began = time.monotonic()
    yield
    say(f"ok    {name}: {time.monotonic() - began:.1f} s")


@dataclass(frozen=True, slots=True)
class Scene:
    """A unit that serves, and what right rows are."""

    unit: ComposedUnit
    spec: ModelSpec
    reference: list[Stream]


Fault = Callable[[Scene], Awaitable[None]]


# --- what must be true of a unit that runs --------------------------------------------


def check_confinement(unit: ComposedUnit) -> None:
    """Nothing is privileged and no namespace is shared."""
    for service in SERVICES:
        host = unit.container(service)["HostConfig"]
        assert host["CapDrop"] == ["ALL"], service
        assert not host["CapAdd"] and not host["Privileged"], service
        assert host["ReadonlyRootfs"], service
        assert host["IpcMode"] == "private", f"{service}: IPC {host['IpcMode']}"
        assert host["PidMode"] == "", f"{service}: PID {host['PidMode']}"
        assert any("no-new-privileges" in option for option in host["SecurityOpt"]), service
        assert host["Init"], service


def check_order(unit: ComposedUnit) -> None:
    """Each was started when what it depends on was there."""
    started = {s: unit.container(s)["State"]["StartedAt"] for s in SERVICES}
    assert started[Role.KVPROXY] < min(started[Role.PREFILL], started[Role.DECODE])
    assert max(started[Role.PREFILL], started[Role.DECODE]) < started[Role.LB]


def ask_by_command(unit: ComposedUnit) -> None:
    """The `duplet` command, outside of all containers."""
    command = str(Path(sys.executable).with_name("duplet"))
    for words in (["generate", "Good morning.", "--seed", "7", "--max-rows", "30"], ["health"]):
        done = subprocess.run(
            [command, *words, "--address", unit.address],
            env=dict(unit.engine.environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"duplet {words}: {done.stdout}{done.stderr}"


def scrape_from_network(unit: ComposedUnit) -> None:
    """Every service's metrics, as Prometheus gets them."""
    for service in SERVICES:
        ask = f"from urllib.request import *; print(urlopen('http://{service}:9100').read())"
        network = ("--network", f"{PROJECT}_unit")
        told = unit.engine.run("run", "--rm", *network, image_of(Role.LB), "python", "-c", ask)
        assert f"duplet_{service}_" in told, f"{service}: {told[:200]}"


async def serve_load(scene: Scene) -> None:
    """Without a fault every request ends well."""
    async with Load(scene.unit.address, scene.spec, ASKS) as load:
        await load.wait_new_successes()
    errors = check_streams(scene, load)
    assert not errors, errors
    await scene.unit.wait_pages_free()


# --- faults ---------------------------------------------------------------------------


async def kill_decode(scene: Scene) -> None:
    """Killed and away for a while: Docker takes this for an order and starts nothing."""
    await scene.unit.compose("kill", str(Role.DECODE))
    await scene.unit.wait_lost(Role.DECODE)
    await scene.unit.compose("start", str(Role.DECODE))


async def crash_kvproxy(scene: Scene) -> None:
    """Dead by itself: the restart policy starts it again."""
    lives = scene.unit.container(Role.KVPROXY)["RestartCount"]
    scene.unit.kill_process(Role.KVPROXY)

    async def again() -> bool:
        return bool(scene.unit.container(Role.KVPROXY)["RestartCount"] > lives)

    await until(again, "kvproxy is started again")


async def pause_kvproxy(scene: Scene) -> None:
    """Its writes are stopped, not over, past the deadline of those who wait for them."""
    await scene.unit.compose("pause", str(Role.KVPROXY))
    try:
        await until(scene.unit.has_quarantine, "pages in quarantine")
        await asyncio.sleep(PAUSED_S)
        assert await scene.unit.has_quarantine(), "pages came back without a proof"
    finally:
        await scene.unit.compose("unpause", str(Role.KVPROXY))


async def run_fault(scene: Scene, fault: Fault) -> Counter[str]:
    """Do it under load. Returns what clients were told; checks all that they got."""
    await scene.unit.observe()
    async with Load(scene.unit.address, scene.spec, ASKS) as load:
        await load.wait_mixed()
        await fault(scene)
        await scene.unit.wait_serving()
        await load.wait_new_successes()
    errors = check_streams(scene, load)
    assert errors, "no client noticed the fault"
    assert set(errors) <= CLEAR, f"errors that say nothing: {errors}"
    await scene.unit.wait_pages_free()
    await scene.unit.observe()
    return errors


def check_streams(scene: Scene, load: Load) -> Counter[str]:
    """Every row is right, also those before an error; returns the errors' reasons."""
    errors: Counter[str] = Counter()
    for reference, done in zip(scene.reference, load.done, strict=True):
        for stream in done:
            if stream.error is None:
                assert_same(stream, reference)
            else:
                assert_prefix(stream, reference)
                errors[stream.error.reason or stream.error.code.name] += 1
    return errors


# --- the end --------------------------------------------------------------------------


class Chain:
    """One listener, who asks for the same long stream again and again, until he is refused.

    However long Compose takes to pass the order on, it meets streams in flight.
    """

    def __init__(self, scene: Scene, reference: Stream) -> None:
        self._scene = scene
        self._reference = reference
        self.streams = [Stream(reference.ask)]

    async def run(self, client: AsyncClient) -> None:
        while True:
            await self.streams[-1].read(client, self._scene.spec)
            if self.streams[-1].error is not None:
                return
            self.streams.append(Stream(self._reference.ask))

    def check(self, drained_s: float) -> int:
        """All but the refused one are whole; returns how many of them ended after `drained_s`."""
        *whole, refused = self.streams
        assert refused.error is not None and refused.count == 0, "a stream was cut off"
        assert (refused.error.reason or refused.error.code.name) in ("DRAINING", "UNAVAILABLE")
        for stream in whole:
            assert_same(stream, self._reference)
        return sum(stream.over_s > drained_s for stream in whole)


async def stop_under_streams(scene: Scene) -> None:
    """`compose stop` with streams in flight: all of them finish, and every service by itself."""
    unit = scene.unit
    async with AsyncClient(unit.address) as client:
        undisturbed = [await read_all(client, scene.spec, asks) for asks in LONG_ASKS]
        references = [s for batch in undisturbed for s in batch if s.count >= LONG_ROWS]
        assert len(references) >= LONG_AT_LEAST, f"only {len(references)} are long"
        chains = [Chain(scene, reference) for reference in references[:LONG_AT_MOST]]
        reading = [asyncio.create_task(chain.run(client)) for chain in chains]
        for chain in chains:
            await chain.streams[0].wait_rows(1)
        await unit.observe()
        await unit.compose("stop")
        await asyncio.gather(*reading)
    drained_s = unit.time_of(Role.LB, "draining")
    finished = sum(chain.check(drained_s) for chain in chains)
    assert finished >= LONG_AT_LEAST, f"only {finished} streams ended after the stop"
    say(f"      {finished} streams finished after lb was told to stop")
    for service in SERVICES:
        state = unit.container(service)["State"]
        assert state["ExitCode"] == 0, f"{service} ended with {state['ExitCode']}"
    check_order_of_end(unit)


def check_order_of_end(unit: ComposedUnit) -> None:
    """lb first, kvproxy last."""
    ended = {s: unit.container(s)["State"]["FinishedAt"] for s in SERVICES}
    assert ended[Role.LB] < min(ended[Role.PREFILL], ended[Role.DECODE])
    assert max(ended[Role.PREFILL], ended[Role.DECODE]) < ended[Role.KVPROXY]


async def use_unit(unit: ComposedUnit) -> None:
    """Everything from `up` to `stop`.

    Raises:
        AssertionError: what was seen is not as it has to be.
    """
    await unit.check_files()
    with step("up, in the order of health"):
        await unit.up()
        await unit.wait_healthy()
        check_order(unit)
    check_confinement(unit)
    with step("duplet generate and duplet health through the published port"):
        ask_by_command(unit)
    with step("commands inside the containers, metrics between them"):
        await unit.compose("exec", "-T", str(Role.LB), "duplet", "health")
        await unit.compose("run", "--rm", "--no-deps", "-T", str(Role.KVPROXY), "duplet", "doctor")
        scrape_from_network(unit)
    async with AsyncClient(unit.address) as client:
        spec = await known_spec(client)
        scene = Scene(unit, spec, await read_all(client, spec, ASKS))
    with step("load without a fault"):
        await serve_load(scene)
    with step("the profile observability, under load"):
        say(f"      {await watch_unit(unit, spec, ASKS)}")
    for name, fault in (
        ("decode's container killed", kill_decode),
        ("kvproxy crashed", crash_kvproxy),
        ("kvproxy's container paused past a deadline", pause_kvproxy),
    ):
        with step(name):
            errors = await run_fault(scene, fault)
        say("      " + ", ".join(f"{reason} {count}" for reason, count in sorted(errors.items())))
    with step("stop with streams in flight, all finished"):
        await stop_under_streams(scene)


async def run_composed(unit: ComposedUnit) -> bool:
    """Use the unit and take it down in any case; what containers said is shown on failure."""
    await unit.down()
    try:
        await use_unit(unit)
    except (AssertionError, TimeoutError) as error:
        for service in SERVICES:
            if unit.has_container(service):
                say(f"--- {service}\n{unit.logs(service)[-4000:]}")
        say(f"FAILED {error or type(error).__name__}")
        return False
    finally:
        with step("down, nothing left"):
            await unit.down()
    return True


def run(base: str) -> bool:
    with running_engine() as engine:
        say(f"engine: {'started for this run' if engine.is_ours else 'the one that runs here'}")
        say(f"compose: {' '.join(engine.compose)}")
        with step("base image"):
            base = base or make_base_image(engine)
        with step("four images built"):
            build_images(engine, base)
        with step("four images checked"):
            check_images(engine)
        unit = ComposedUnit(engine, free_local_address())
        good = asyncio.run(run_composed(unit))
    checks = sum(unit.checks.values())
    say(f"kv checks {checks}, mismatches {unit.mismatches}")
    return good and checks > 0 and unit.mismatches == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="A unit of containers, under faults.")
    parser.add_argument("--base", default="", help="base image; default: one by debootstrap")
    # So that whoever ends this run ends what it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return 0 if run(parser.parse_args().base) else 1
    except (NoEngine, NoPrometheus, AssertionError, subprocess.CalledProcessError) as error:
        say(f"FAILED {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
