"""A storm of transfers that are given up while copies of them are in flight.

Its transfers' deadline is shorter than every second copy takes, so each slow transfer is given
up, its pages are wanted by the next request, and the rest of the copy arrives late. With all
rules in force that does no harm. With the rule off that a page needs proof, it must show.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from duplet_client import AsyncClient
from duplet_core.ids import Role
from tests.e2e.live_unit import live_unit, until
from tests.e2e.streams import Ask, Load, known_spec

SETTINGS = {
    "SLOW_COPY_S": "0.1",
    "DUPLET_DECODE_TRANSFER_DEADLINE_S": "0.3",
    # What is given up here is far more than the 25 % that would make decode refuse.
    "DUPLET_DECODE_QUARANTINE_PERCENT": "100",
}
GIVEN_UP = 48
"""Transfers that the storm gives up at least."""


@dataclass(frozen=True, slots=True)
class Storm:
    kv_checks: int
    mismatches: int
    given_up: int
    good: int

    def describe(self) -> str:
        return (
            f"{self.given_up} transfers given up, {self.good} good, "
            f"kv checks {self.kv_checks}, mismatches {self.mismatches}"
        )


async def run_storm(kvproxy: str, decode: str) -> Storm:
    """A storm on a unit with this kvproxy and, unless empty, this decode (names of modules)."""
    modules = {Role.KVPROXY: kvproxy} | ({Role.DECODE: decode} if decode else {})
    asks = [Ask(seed, max_rows=40, voice_rows=200) for seed in range(300, 308)]
    async with live_unit(SETTINGS, modules=modules) as unit:
        async with AsyncClient(unit.listen) as client:
            spec = await known_spec(client)
        async with Load(unit.listen, spec, asks) as load:

            async def stormed() -> bool:
                return _ends(load)["TRANSFER_DEADLINE"] >= GIVEN_UP

            await until(stormed, f"{GIVEN_UP} transfers are given up")
        await unit.wait_idle()
        told = await unit.wait_pages_free()
    ends = _ends(load)
    return Storm(told.kv_checks, told.kv_mismatches, ends["TRANSFER_DEADLINE"], ends[""])


def _ends(load: Load) -> Counter[str]:
    """Ended requests by reason; the empty one is success."""
    streams = (stream for done in load.done for stream in done)
    return Counter(s.error.reason if s.error is not None else "" for s in streams)
