"""Services find each other whatever the order in which they start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_unit.probe import is_serving
from duplet_unit.supervisor import Service, Supervisor
from duplet_unit.unit import free_local_address, owned_run_dir, unit_services
from duplet_unit.up import in_background
from tests.e2e.live_unit import QUICK, clean_environment, pids_of_run_dir, until
from tests.e2e.streams import Ask, Stream, known_spec

ORDERS = [
    (Role.LB, Role.PREFILL, Role.DECODE, Role.KVPROXY),
    (Role.DECODE, Role.LB, Role.KVPROXY, Role.PREFILL),
    (Role.KVPROXY, Role.PREFILL, Role.LB, Role.DECODE),
]


async def wait_serving(service: Service, name: str) -> None:
    async def serves() -> bool:
        return await is_serving(service.address, name)

    await until(serves, f"{service.name} is {name}")


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_start_order(order: Sequence[Role]) -> None:
    with owned_run_dir(None) as run_dir:
        listen = free_local_address()
        made = unit_services(run_dir, listen, clean_environment({}))
        services = {service.name: service for service in made}
        supervisors = []
        async with AsyncExitStack() as stack:
            for role in order:
                # One supervisor each, so that the next starts when this one is there.
                service = services[role]

                async def is_live(name: str) -> bool:
                    return await is_serving(services[name].address, "live")

                alone = Supervisor([service], [[role]], run_dir / "logs", print, is_live, QUICK)
                supervisors.append(alone)
                await stack.enter_async_context(in_background(alone))
                assert await alone.wait_ready()
            await asyncio.gather(*(wait_serving(s, "ready") for s in made))
            async with AsyncClient(listen) as client:
                spec = await known_spec(client)
                stream = await Stream(Ask(seed=1, max_rows=5)).read(client, spec)
                assert stream.error is None
                assert stream.count == 5
                # Whoever of the pools' owners came last, and whoever of lb and decode.
                assert (await client.unit()).transport == "shm: CPU pools"
            for alone in supervisors:
                alone.drain()  # All at once: they end in any order, too.
        assert pids_of_run_dir(run_dir) == set()
