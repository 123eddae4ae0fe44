"""Listeners with long streams, while a unit or a part of it is told to stop: nobody is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from duplet_client import AsyncClient
from duplet_core.ids import Role
from tests.compose.composed_unit import ComposedUnit
from tests.compose.images import SERVICES
from tests.compose.page_commands import PageShell, blocks
from tests.compose.scene import Scene, check_rows, say
from tests.e2e.streams import Stream, assert_same

AT_THE_END = frozenset({"DRAINING", "UNAVAILABLE"})
"""What a listener is told when he asks a unit that ends."""


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

    @property
    def refused_s(self) -> float:
        """When the listener was refused; wall clock."""
        return self.streams[-1].over_s

    def check(self, first_refused_s: float, reasons: frozenset[str]) -> int:
        """All but the refused one are whole; returns how many of them ended after that time."""
        *whole, refused = self.streams
        assert refused.error is not None
        assert refused.count == 0, f"a stream was cut off after {refused.count} rows"
        assert (refused.error.reason or refused.error.code.name) in reasons, refused.error
        for stream in whole:
            assert_same(stream, self._reference)
        return sum(stream.over_s > first_refused_s for stream in whole)


@asynccontextmanager
async def listening(scene: Scene, unit: ComposedUnit) -> AsyncIterator[list[Chain]]:
    """Listeners of a unit, all with a stream in flight; the context ends when all are refused."""
    chains = [Chain(scene, reference) for reference in scene.long]
    async with AsyncClient(unit.address) as client:
        reading = [asyncio.create_task(chain.run(client)) for chain in chains]
        try:
            for chain in chains:
                await chain.streams[0].wait_rows(1)
            yield chains
            await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)


def check_chains(chains: list[Chain], reasons: frozenset[str] = AT_THE_END) -> None:
    """Every stream is whole up to each listener's refusal; says how many the first one's outlived,
    which depends on the machine: where it is busy, a refusal may take longer than they do."""
    first_refused_s = min(chain.refused_s for chain in chains)
    finished = sum(chain.check(first_refused_s, reasons) for chain in chains)
    say(
        f"      {sum(len(c.streams) - 1 for c in chains)} streams whole, {finished} of them "
        "finished after the first refusal"
    )


def check_ends(unit: ComposedUnit) -> None:
    """Every service ended by itself: lb first, kvproxy last."""
    states = {s: unit.container(s)["State"] for s in SERVICES}
    assert {s: state["ExitCode"] for s, state in states.items()} == dict.fromkeys(SERVICES, 0)
    ended = {s: state["FinishedAt"] for s, state in states.items()}
    assert ended[Role.LB] < min(ended[Role.PREFILL], ended[Role.DECODE])
    assert max(ended[Role.PREFILL], ended[Role.DECODE]) < ended[Role.KVPROXY]


async def stop_decode(scene: Scene, reasons: frozenset[str]) -> None:
    """`compose stop decode`: it finishes its streams; who comes meanwhile is told `reasons`."""
    unit = scene.unit
    async with listening(scene, unit) as chains:
        await unit.observe()
        await unit.compose("stop", str(Role.DECODE))
    check_chains(chains, reasons)
    assert unit.container(Role.DECODE)["State"]["ExitCode"] == 0
    await unit.compose("start", str(Role.DECODE))
    await unit.wait_serving()
    await check_rows(scene, unit)
    await unit.observe()


async def upgrade_beside(scene: Scene, shell: PageShell, second: ComposedUnit) -> None:
    """The page's second unit comes up, then the first one ends: all its streams finish."""
    begin, end = blocks("Beside the old unit")
    stop, down = end.splitlines()
    names = {"duplet-b": second.project, "127.0.0.1:50052": second.address}
    await shell.run(begin, second, names)
    async with listening(scene, scene.unit) as chains:
        await check_rows(scene, second)
        await scene.unit.observe()
        await shell.run(stop, scene.unit)
    check_chains(chains)
    check_ends(scene.unit)
    await scene.unit.observe()
    await shell.run(down, scene.unit)
    assert not any(scene.unit.has_container(service) for service in SERVICES)


async def upgrade_in_place(scene: Scene, shell: PageShell, unit: ComposedUnit) -> None:
    """The page's drain, stop and start: all streams finish, and the unit serves again."""
    [block] = blocks("In its place")
    build, rest = block.split("\n", 1)
    await shell.run(build, unit)
    async with listening(scene, unit) as chains:
        await unit.observe()
        await shell.run(rest, unit)
    check_chains(chains)
    await unit.wait_serving()  # gRPC waits before it connects anew to where nobody was
    await check_rows(scene, unit)
    await unit.observe()
