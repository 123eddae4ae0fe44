"""A monolith of real processes for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from duplet_unit.events import Event
from duplet_unit.gpus import on_gpus
from duplet_unit.unit import MONOLITH_STAGES, free_local_address, monolith_services, owned_run_dir
from duplet_unit.up import in_background, make_supervisor
from tests.e2e.live_unit import clean_environment, pids_of_run_dir
from tests.last_words import LastWords


@asynccontextmanager
async def live_monolith(
    settings: Mapping[str, str], gpus: Sequence[str] = ()
) -> AsyncIterator[str]:
    """Start lb and host, wait until they serve, drain them afterwards; lb's address.

    `gpus`: the host's; none: on the CPU.
    """
    events: list[Event] = []
    with owned_run_dir(None) as run_dir:
        listen = free_local_address()
        services = monolith_services(run_dir, listen, clean_environment(settings))
        if gpus:
            services = on_gpus(services, gpus)
        supervisor = make_supervisor(services, run_dir, events.append, MONOLITH_STAGES)
        async with in_background(supervisor) as running:
            assert await supervisor.wait_ready(), supervisor.failure
            with LastWords(run_dir / "logs"):
                yield listen
        assert running.result(), f"the monolith did not end by itself: {events[-1]}"
        assert pids_of_run_dir(run_dir) == set(), "processes are left behind"
