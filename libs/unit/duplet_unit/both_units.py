"""A monolith and a unit side by side on this machine, on the CPU, for comparing them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from duplet_unit.demo import wait_ready
from duplet_unit.settings_check import check_settings
from duplet_unit.supervisor import Service
from duplet_unit.unit import (
    MONOLITH_STAGES,
    STAGES,
    UnitError,
    free_local_address,
    monolith_services,
    owned_run_dir,
    unit_environment,
    unit_services,
)
from duplet_unit.up import in_background, make_supervisor


@asynccontextmanager
async def both_units(
    monolith_settings: Mapping[str, str], unit_settings: Mapping[str, str]
) -> AsyncIterator[tuple[str, str]]:
    """Start both and drain them afterwards; the addresses of the monolith and of the unit.

    Their settings are the defaults and what is given: those of our own environment could make
    the two differ, or have them ask for the same port.

    Raises:
        UnitError: one of them did not start.
        SettingsError: one cannot start with its settings.
    """
    async with AsyncExitStack() as stack:
        addresses = []
        for make, stages, settings in (
            (monolith_services, MONOLITH_STAGES, monolith_settings),
            (unit_services, STAGES, unit_settings),
        ):
            run_dir = stack.enter_context(owned_run_dir(None))
            listen = free_local_address()
            services: list[Service] = make(run_dir, listen, _environment(settings))
            await check_settings([s.name for s in services], services[0].environment)
            supervisor = make_supervisor(services, run_dir, lambda _event: None, stages)
            await stack.enter_async_context(in_background(supervisor))
            if not await wait_ready(supervisor):
                raise UnitError(supervisor.failure or "the unit was told to stop")
            addresses.append(listen)
        yield addresses[0], addresses[1]


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("DUPLET_")}
    return {**unit_environment(own), **settings}
