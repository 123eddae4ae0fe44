"""What a real kvproxy does with a Hello: one of another version is refused, and one that lists
very many transfers is answered for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from duplet_core.ids import PROTOCOL_VERSION, Role, TransferId
from duplet_core.messages import AbortAck, SourceReleased
from duplet_runtime import lifeline_wire
from tests.e2e.live_unit import until
from tests.services import kvproxy_peers
from tests.services.kvproxy_peers import (
    LIMIT_S,
    KvproxyEnd,
    both_ends,
    move_all,
    peer_end,
    running_kvproxy,
    wait_landed,
)
from tests.services.test_kvproxy_service_faults import PAGE_ROWS, CpuPlace

VERY_MANY = 4096
"""More transfers than messages wait for a peer that does not read: a writer that was stopped for
some seconds leaves decode with so many, and what is not answered stays in quarantine."""


@pytest.fixture
def place() -> Iterator[CpuPlace]:
    made = CpuPlace()
    yield made
    made.close()


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_every_transfer_of_a_hello_is_answered(
    place: CpuPlace, run_dir: Path, role: Role
) -> None:
    held = {TransferId(f"{number:032x}") for number in range(VERY_MANY)}
    kind = AbortAck if role is Role.DECODE else SourceReleased
    pool = place.owned[role is Role.DECODE]
    async with (
        running_kvproxy(run_dir, "shm", place.metrics) as kvproxy,
        peer_end(role, run_dir, pool, tuple(held)) as end,
    ):
        async with asyncio.timeout(LIMIT_S):
            for _ in range(VERY_MANY):
                held.remove((await end.hear(kind)).transfer)
        assert held == set()
        assert "the peer reads none" not in kvproxy.log


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("door", [kvproxy_peers, lifeline_wire], ids=["stream", "lifeline"])
async def test_ends_of_another_version_are_refused_until_they_speak_ours(
    place: CpuPlace, run_dir: Path, version: int, door: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two they try with. Health tells it until they do; kvproxy stays ready, for
    what starts the right ones may wait for that."""
    monkeypatch.setattr(door, "PROTOCOL_VERSION", version)
    async with running_kvproxy(run_dir, "shm", place.metrics) as kvproxy:
        ends = [
            KvproxyEnd(Role.PREFILL, run_dir, place.owned[0]),
            KvproxyEnd(Role.DECODE, run_dir, place.owned[1]),
        ]
        running = [asyncio.create_task(end.run()) for end in ends]
        words = f"speaks transfer protocol {version}, its peer speaks {PROTOCOL_VERSION}"

        async def both_refused() -> bool:
            return all(f"{role} {words}" in kvproxy.log for role in ("prefill", "decode"))

        await until(both_refused, words)
        for role in ("prefill", "decode"):
            assert await kvproxy.health(f"protocol.{role}") == (False, f"{role} {words}")
        is_ready, detail = await kvproxy.health("ready")
        assert is_ready and f"protocol.prefill: prefill {words}" in detail
        assert all(end.hellos.empty() and end.heard.empty() for end in ends), "unheard"
        assert await kvproxy.metric("transfers") == 0
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        monkeypatch.undo()
        async with both_ends(run_dir, *place.owned) as (prefill, decode):
            transfer = move_all((prefill, decode), 1, [3], [5], PAGE_ROWS)
            await wait_landed(decode, transfer)
        for role in ("prefill", "decode"):
            ours = f"{role} speaks transfer protocol {PROTOCOL_VERSION}"
            assert await kvproxy.health(f"protocol.{role}") == (True, ours)
        assert await kvproxy.health("ready") == (True, "")
