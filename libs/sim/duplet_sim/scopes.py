"""How large a world the explorer searches, and which faults it may have."""

from __future__ import annotations

from dataclasses import dataclass

from duplet_core.decode_state import DecodeConfig
from duplet_core.front_state import FrontConfig
from duplet_core.ids import Role
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer_state import WriterConfig
from duplet_sim.world import WorldConfig

FAULTS = ("kill", "stop", "sever", "unknown", "refuse", "drain", "cancel")
"""Steps that cost budget; the last is a client's doing, with a budget of its own."""

ROLES = (Role.KVPROXY, Role.DECODE, Role.PREFILL, Role.LB)

WRITERS = (Role.DECODE, Role.PREFILL)
"""Who dials kvproxy."""


@dataclass(frozen=True, slots=True)
class Scope:
    name: str
    requests: int
    faults: int
    cancels: int
    kinds: tuple[str, ...] = ("kill", "stop", "sever", "unknown", "refuse", "drain")
    decode_pages: int = 2
    prefill_pages: int = 2
    prompt_rows: int = 2
    page_rows: int = 2
    output_rows: int = 2
    chunk_rows: int = 1
    killable: tuple[Role, ...] = ROLES
    severable: tuple[Role, ...] = ROLES
    """Whose dialed streams break."""
    same_ids: bool = True
    """All requests use one id, each after the end of the one before."""


SCOPES = {
    scope.name: scope
    for scope in (
        Scope("parts", 1, 1, 0, ("sever",), severable=(Role.PREFILL,)),
        Scope("handoff", 1, 1, 0, ("sever",), chunk_rows=2, severable=(Role.PREFILL,)),
        Scope("grants", 1, 1, 0, ("sever",), chunk_rows=2, severable=(Role.DECODE,)),
        Scope("one", 1, 1, 1, chunk_rows=2),
        Scope("two", 2, 1, 1, ("sever", "unknown", "refuse"), chunk_rows=2, severable=WRITERS),
        Scope("three", 3, 0, 0, (), prompt_rows=1, page_rows=4, same_ids=False),
        Scope(
            "pair",
            2,
            1,
            0,
            ("unknown", "refuse", "stop"),
            prompt_rows=1,
            page_rows=4,
            same_ids=False,
        ),
    )
}


def world_config(scope: Scope) -> WorldConfig:
    return WorldConfig(
        DecodeConfig(scope.decode_pages, scope.page_rows, 4, 1 << 20, "spec", 1000, 50, 0),
        PrefillConfig(scope.prefill_pages, scope.page_rows, "spec"),
        WriterConfig(withheld_bound=2, withheld_after_ns=5000, withheld_limit_ns=5000),
        FrontConfig(queue_wait_ns=1 << 40),
        chunk_rows=scope.chunk_rows,
    )
