"""A unit of containers, from images to nothing left: `python -m tests.compose.run_compose`.

Builds the four images, starts the unit with the commands of docs/operations.md, and uses it from
outside through the published port. Under load decode's container is killed, kvproxy crashes,
kvproxy is paused past a deadline; decode is stopped; the unit is upgraded by both ways of the page.
Every row that any client got is compared with the row of an undisturbed run; in the end KV is
damaged, which must be counted. The last line is the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

from duplet_core.ids import Role
from duplet_unit.unit import free_local_address
from tests.compose.composed_unit import PROJECT, ComposedUnit
from tests.compose.controls import damage_kv, try_settings
from tests.compose.debian_prometheus import NoPrometheus
from tests.compose.docker_engine import NoEngine, make_base_image, running_engine
from tests.compose.images import (
    SERVICES,
    build_images,
    check_images,
    image_of,
    remove_untagged,
    source_labels,
)
from tests.compose.listeners import stop_decode, upgrade_beside, upgrade_in_place
from tests.compose.observed_unit import watch_unit
from tests.compose.page_commands import PageShell, blocks, page_shell
from tests.compose.scene import ASKS, Scene, check_streams, make_scene, say, step
from tests.e2e.live_unit import until
from tests.e2e.streams import Load, Stream

PAUSED_S = 4.0
"""Longer than a transfer's deadline here, and than the keepalive that ends a peer's streams."""

CLEAR = frozenset(
    {
        *("DECODE_LOST", "PREFILL_LOST", "WRITER_LOST", "TRANSFER_FAILED", "TRANSFER_DEADLINE"),
        *("NOT_READY", "QUARANTINE", "OVERLOADED", "DRAINING"),
    }
)
"""What a client may be told when a part of the unit fails: each says that it may try again."""


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


def check_revision(unit: ComposedUnit) -> None:
    """Compose hands the build arguments on."""
    for service in SERVICES:
        labels = unit.container(service)["Config"]["Labels"]
        told = {n: labels[f"org.opencontainers.image.{n.lower()}"] for n in source_labels()}
        assert told == source_labels(), service


def scrape_from_network(unit: ComposedUnit) -> None:
    """Every service's metrics, as Prometheus gets them."""
    for service in SERVICES:
        ask = f"from urllib.request import *; print(urlopen('http://{service}:9100').read())"
        network = ("--network", f"{unit.project}_unit")
        told = unit.engine.run("run", "--rm", *network, image_of(Role.LB), "python", "-c", ask)
        assert f"duplet_{service}_" in told, f"{service}: {told[:200]}"


async def serve_load(scene: Scene) -> None:
    """Without a fault every request ends well."""
    async with Load(scene.unit.address, scene.spec, ASKS) as load:
        await load.wait_new_successes()
    errors = check_streams(scene.reference, load)
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


async def run_fault(scene: Scene, fault: Fault, references: list[Stream]) -> Counter[str]:
    """Do it under a load of what `references` asked. Returns what clients were told; checks all
    that they got."""
    await scene.unit.observe()
    async with Load(scene.unit.address, scene.spec, [r.ask for r in references]) as load:
        await load.wait_mixed()
        before = check_streams(references, load)
        assert not before, f"before the fault: {before}"
        await fault(scene)
        await scene.unit.wait_serving()
        await load.wait_new_successes()
    errors = check_streams(references, load)
    assert errors, "no client noticed the fault"
    assert set(errors) <= CLEAR, f"errors that say nothing: {errors}"
    await scene.unit.wait_pages_free()
    await scene.unit.observe()
    return errors


# --- from the start to the end --------------------------------------------------------


async def use_units(first: ComposedUnit, second: ComposedUnit, shell: PageShell) -> None:
    """Everything from the page's start to the control; `second` is what the unit is upgraded to.

    Raises:
        AssertionError: what was seen is not as it has to be.
    """
    await first.check_files()
    with step("the page's start: built by Compose, up in the order of health, a request"):
        await shell.run(blocks("Start")[0], first)
        await first.wait_serving()
        await first.wait_healthy()
        check_order(first)
        check_revision(first)
    check_confinement(first)
    with step("settings by environment and file"):
        await try_settings(first, shell)
    with step("doctor in a container, metrics between them"):
        await shell.run("docker compose run --rm --no-deps kvproxy duplet doctor", first)
        scrape_from_network(first)
    with step("undisturbed streams"):
        scene = await make_scene(first)
    with step("load without a fault"):
        await serve_load(scene)
    with step("the profile observability, under load"):
        say(f"      {await watch_unit(first, scene.spec, ASKS)}")
    for name, fault, asked in (
        ("decode's container killed", kill_decode, scene.reference),
        ("kvproxy crashed", crash_kvproxy, scene.reference),
        ("kvproxy's container paused past a deadline", pause_kvproxy, scene.short),
    ):
        with step(name):
            errors = await run_fault(scene, fault, asked)
        say("      " + ", ".join(f"{reason} {count}" for reason, count in sorted(errors.items())))
        if fault is pause_kvproxy:
            assert errors["TRANSFER_DEADLINE"], "no transfer was given up at its deadline"
    with step("decode's container stopped with streams in flight, all finished"):
        await stop_decode(scene, CLEAR)
    with step("the page's upgrade beside the old unit, all streams finished"):
        await upgrade_beside(scene, shell, second)
    with step("the page's upgrade in place, all streams finished"):
        await upgrade_in_place(scene, shell, second)
    with step("control: damaged KV is noticed"):
        await damage_kv(scene, second)


async def run_composed(first: ComposedUnit, second: ComposedUnit, shell: PageShell) -> bool:
    """Use both and take them down in any case; what containers said is shown on failure."""
    units = (first, second)
    for unit in units:
        await unit.down()
    try:
        await use_units(first, second, shell)
    except (AssertionError, TimeoutError) as error:
        for unit, service in itertools.product(units, SERVICES):
            if unit.has_container(service):
                say(f"--- {unit.project}, {service}\n{unit.logs(service)[-4000:]}")
        say(f"FAILED {error or type(error).__name__}")
        return False
    finally:
        with step("down, nothing left"):
            for unit in units:
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
        first = ComposedUnit(engine, free_local_address(), base)
        second = replace(first, address=free_local_address(), project=f"{PROJECT}-b", checks={})
        with page_shell(engine) as shell:
            good = asyncio.run(run_composed(first, second, shell))
        if engine.is_ours:
            remove_untagged(engine)
    checks = sum(n for unit in (first, second) for n in unit.checks.values())
    mismatches = first.mismatches + second.mismatches
    say(f"kv checks {checks}, mismatches {mismatches}")
    return good and checks > 0 and mismatches == 0


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
