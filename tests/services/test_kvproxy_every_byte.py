"""Every byte of both pools is accounted for while a real kvproxy serves random transfers: grants,
Moves in parts, ABORTs, Drops, broken streams, stops, and words out of rules.

A page that nobody was granted is never written, a transfer that landed holds exactly its
source's rows, and everything comes to rest. The controls break one rule each, and are found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from duplet_core.ids import Role
from tests.services.hasty_kvproxy import HASTES
from tests.services.kvproxy_peers import LIMIT_S, KvproxyProcess, running_kvproxy
from tests.services.random_schedule import draw_schedule
from tests.services.random_transfers import Book, DecodePlayer, Play, PrefillPlayer, Prompt
from tests.services.test_kvproxy_service_faults import CpuPlace

TRANSFERS = 150
PRODUCT = "duplet_kvproxy"
SLOW = "tests.faults.slow_kvproxy"
UNORDERED = "tests.faults.unordered_kvproxy"
"""Copies of several transfers are under way at once there, and end in any order."""
UNKNOWNS = 2
"""Copies whose end is never known; with a third one kvproxy would leave."""
COPY_S = 0.003
"""A copy in a control takes so long: what comes too early is there before the copy is over."""


class CarelessDecode(DecodePlayer):
    """Its pages are free when it has said ABORT."""

    def abort(self, prompt: Prompt) -> None:
        super().abort(prompt)
        if prompt.is_aborted and prompt.dest_pages:
            self.book.free_dest(prompt)


@pytest.fixture
def place() -> Iterator[CpuPlace]:
    made = CpuPlace()
    yield made
    made.close()


def kvproxy_of(
    place: CpuPlace, run_dir: Path, module: str, *arguments: str, copy_s: float
) -> AbstractAsyncContextManager[KvproxyProcess]:
    """It does not leave because this machine is busy: an end may be withheld for long."""
    settings = {
        "SLOW_COPY_S": str(copy_s),
        "DUPLET_KVPROXY_WITHHELD_AFTER_S": str(LIMIT_S),
        "DUPLET_KVPROXY_WITHHELD_LIMIT_S": str(LIMIT_S),
    }
    return running_kvproxy(
        run_dir, place.transports, place.metrics, module, *arguments, settings=settings
    )


async def play(
    kvproxy: KvproxyProcess,
    place: CpuPlace,
    seed: int,
    decode: type[DecodePlayer] = DecodePlayer,
    unknowns: int = 0,
) -> Book:
    """The book when everything has come to rest, or a fault was found."""
    book = Book(place.pools[0], place.pools[1], seed)
    source, dest = place.owned
    players = (
        PrefillPlayer(Role.PREFILL, kvproxy.run_dir, source, book),
        decode(Role.DECODE, kvproxy.run_dir, dest, book),
    )
    schedule = draw_schedule(seed, TRANSFERS, lost=unknowns)
    await Play(kvproxy, book, *players).run(schedule, unknowns)
    return book


@pytest.mark.parametrize(
    ("seed", "module", "copy_s"), [(1, PRODUCT, 0.0), (2, SLOW, 0.002), (3, UNORDERED, 0.002)]
)
async def test_every_byte_is_accounted_for(
    place: CpuPlace, run_dir: Path, seed: int, module: str, copy_s: float
) -> None:
    async with kvproxy_of(place, run_dir, module, copy_s=copy_s) as kvproxy:
        book = await play(kvproxy, place, seed)
        assert book.faults == []
        assert book.counts["Landed"] and book.counts["AbortAck"] and book.counts["TransferFailed"]
        assert await kvproxy.metric("transfers") == 0, "kvproxy remembers none either"
        kvproxy.process.terminate()
        assert await asyncio.wait_for(kvproxy.process.wait(), LIMIT_S) == 0
        assert "Traceback" not in kvproxy.log
        book.check_free()
    assert book.faults == []


async def test_what_belongs_to_a_copy_of_unknown_end_is_never_given_back(
    place: CpuPlace, run_dir: Path
) -> None:
    async with kvproxy_of(place, run_dir, UNORDERED, copy_s=0.002) as kvproxy:
        book = await play(kvproxy, place, 4, unknowns=UNKNOWNS)
        assert book.faults == []
        assert book.counts["Landed"] and book.counts["AbortAck"]
        assert await kvproxy.metric("ends_withheld") == UNKNOWNS
        assert await kvproxy.health("writer") == (True, "withheld ends are within their bound")
        for prompt in book.prompts.values():
            assert prompt.source_held and prompt.dest_pages, "neither side was told"
        assert "Traceback" not in kvproxy.log
    book.check_free()
    assert book.faults == []


async def test_a_decode_that_frees_pages_without_proof_is_found(
    place: CpuPlace, run_dir: Path
) -> None:
    async with kvproxy_of(place, run_dir, UNORDERED, copy_s=COPY_S) as kvproxy:
        assert (await play(kvproxy, place, 1, CarelessDecode)).faults


@pytest.mark.parametrize("which", HASTES)
async def test_a_kvproxy_that_tells_an_end_too_early_is_found(
    place: CpuPlace, run_dir: Path, which: str
) -> None:
    hasty = "tests.services.hasty_kvproxy"
    async with kvproxy_of(place, run_dir, hasty, which, copy_s=COPY_S) as kvproxy:
        unknowns = UNKNOWNS if which == "unknown" else 0
        assert (await play(kvproxy, place, 1, unknowns=unknowns)).faults
