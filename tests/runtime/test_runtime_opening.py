"""A dialer's stream that ends while it is being opened: gRPC's own words are not out yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from duplet_core.effects import StreamOpened
from duplet_core.errors import Reason
from duplet_core.ids import Role
from tests.runtime.test_runtime_peers import hello, make_acceptor, make_dialer, raise_it, serving


@pytest.fixture
def address(run_dir: Path) -> str:
    return f"unix:{run_dir}/p.sock"


@pytest.mark.parametrize("turns", range(7))
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_stream_that_ends_while_it_opens_is_over(
    record: Any, address: str, turns: int, leaves: bool
) -> None:
    """So many turns of the event loop after its first words: the next one follows, or the end."""
    near = record()
    ending: list[asyncio.Task[None]] = []

    async def end_soon() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        if leaves:
            running.cancel()
        else:
            dialer.close(1, Reason.PEER_PROTOCOL, "at once")

    def greet(event: Any) -> None:
        near.take(event)
        if event == StreamOpened(Role.KVPROXY, 1):
            dialer.send(1, hello())
            ending.append(asyncio.create_task(end_soon()))

    dialer = make_dialer(address, greet)
    async with serving(make_acceptor(record().take, raise_it), address):
        running = asyncio.create_task(dialer.run())
        if not leaves:
            await near.until(lambda r: StreamOpened(Role.KVPROXY, 2) in r)
            running.cancel()
        async with asyncio.timeout(5):
            await asyncio.wait({running})
    assert running.cancelled()
