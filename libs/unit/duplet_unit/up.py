"""`duplet up`: one unit of local processes, until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from duplet_unit.events import OnEvent
from duplet_unit.gpus import on_gpus
from duplet_unit.probe import is_serving
from duplet_unit.report import ConsoleReport, JsonReport, SteadyConsole, follow_logs
from duplet_unit.settings_check import check_settings
from duplet_unit.supervisor import Limits, Service, Supervisor
from duplet_unit.unit import (
    MONOLITH_STAGES,
    STAGES,
    UnitError,
    check_address_is_free,
    monolith_services,
    owned_run_dir,
    unit_environment,
    unit_services,
)

POLL_S = 0.25


async def run_unit(
    run_dir: Path | None,
    listen: str,
    *,
    json_lines: bool,
    verbose: bool,
    monolith: bool = False,
    gpus: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> bool:
    """Supervise a unit, or a monolith, until SIGINT or SIGTERM; the second of them kills.

    `gpus`: where the engines are, see `duplet_unit.gpus`; none: on the CPU. `settings`: variables
    that stand over those of the environment.

    Returns:
        True when every service ended by itself; False when the unit gave up or was killed.

    Raises:
        UnitError, SettingsError: it could not be started here, or not with its settings.
    """
    check_address_is_free(listen)
    with owned_run_dir(run_dir) as folder:
        environment = {**unit_environment(os.environ), **(settings or {})}
        if verbose and not json_lines:
            environment.setdefault("DUPLET_LOG_FORMAT", "text")
        make_services = monolith_services if monolith else unit_services
        services = make_services(folder, listen, environment)
        if gpus:
            services = on_gpus(services, gpus)
        names = [service.name for service in services]
        await check_settings(names, services[0].environment)
        report = (
            JsonReport(sys.stdout) if json_lines else ConsoleReport(SteadyConsole(), names, folder)
        )
        stages = MONOLITH_STAGES if monolith else STAGES
        supervisor = make_supervisor(services, folder, report, stages)
        logs = [supervisor.log_path(name) for name in names] if verbose else []
        try:
            with signals_to(supervisor.drain, supervisor.kill):
                async with following(logs):
                    clean = await supervisor.run()
        finally:
            report.close()
    if supervisor.is_hopeless:
        raise UnitError(supervisor.failure or "the unit cannot start with these settings")
    return clean


def make_supervisor(
    services: list[Service],
    run_dir: Path,
    on_event: OnEvent,
    stages: Sequence[Sequence[str]] = STAGES,
) -> Supervisor:
    """A supervisor of these services that asks their health service for `ready`."""
    addresses = {service.name: service.address for service in services}

    async def is_ready(name: str) -> bool:
        return await is_serving(addresses[name], "ready")

    limits = Limits(poll_s=POLL_S)
    return Supervisor(services, stages, run_dir / "logs", on_event, is_ready, limits)


@asynccontextmanager
async def in_background(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[bool]]:
    """Run a unit while the context lasts, then drain it; its task is done after the context."""
    running = asyncio.create_task(supervisor.run())
    try:
        yield running
    finally:
        supervisor.drain()
        await running


@contextmanager
def signals_to(first: Callable[[], object], kill: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `first`, from the second on `kill`, while the context lasts."""
    loop = asyncio.get_running_loop()
    actions = iter([first])

    def act() -> None:
        next(actions, kill)()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def following(logs: list[Path]) -> AsyncIterator[None]:
    """Copy the services' logs to stderr while the context lasts."""
    async with asyncio.TaskGroup() as group:
        follower = group.create_task(follow_logs(logs, sys.stderr))
        try:
            yield
        finally:
            follower.cancel()
