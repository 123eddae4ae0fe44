"""How large a world the explorer searches, and which faults it may have."""

from __future__ import annotations

from dataclasses import dataclass

from duplet_core.decode_state import DecodeConfig
from duplet_core.front_state import FrontConfig
from duplet_core.ids import Role
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer_state import WriterConfig
from duplet_sim import content
from duplet_sim.world import WorldConfig

ROLES = (Role.KVPROXY, Role.DECODE, Role.PREFILL, Role.LB)

WRITERS = (Role.DECODE, Role.PREFILL)
"""Who dials kvproxy."""

ALL = ("kill", "stop", "sever", "twice", "drain", "unknown", "hang", "refuse")
"""Every kind of fault that one host can have; `hazards` says what each is."""

_VOICE = 1000
"""The content of the rows with which all prompts begin, where they share some."""


@dataclass(frozen=True, slots=True)
class Scope:
    name: str
    requests: int
    faults: int
    """Most faults in one run, of any of the kinds."""
    cancels: int
    """Most cancels and early deadlines in one run."""
    kinds: tuple[str, ...] = ALL
    decode_pages: int = 2
    prefill_pages: int = 2
    prompt_rows: int = 2
    page_rows: int = 2
    output_rows: int = 2
    chunk_rows: int = 1
    killable: tuple[Role, ...] = ROLES
    severable: tuple[Role, ...] = ROLES[1:]
    """Whose dialed streams break."""
    same_ids: bool = True
    """All requests use one id, each after the end of the one before: a client that tries again
    does this, with a new transfer, while the pages of the last try may be in quarantine."""
    quarantine_percent: int = 50
    voice_rows: int = 0
    """So many rows are the same in all prompts, and prefill keeps their pages."""
    remote: bool = False
    """Prefill is on another host: see `remote`."""
    spread: bool = False
    """Searched in shares, by the first fault of a run, on all cores."""


def _three(name: str, faults: int, cancels: int, kinds: tuple[str, ...], spread: bool) -> Scope:
    """Three requests, each a page in both pools of two: two at once, and the third takes the
    page of whichever is over first. With deaths of kvproxy or lb, or breaks of lb's streams,
    this has more than three million states: `pair` has those, with two requests."""
    return Scope(
        name,
        3,
        faults,
        cancels,
        kinds,
        prompt_rows=1,
        page_rows=4,
        killable=WRITERS,
        severable=WRITERS,
        same_ids=False,
        spread=spread,
    )


SCOPES = {
    scope.name: scope
    for scope in (
        Scope("parts", 1, 1, 0, ("sever",), severable=(Role.PREFILL,)),
        Scope("handoff", 1, 1, 0, ("sever",), chunk_rows=2, severable=(Role.PREFILL,)),
        Scope("grants", 1, 1, 0, ("sever",), chunk_rows=2, severable=(Role.DECODE,)),
        Scope("one", 1, 1, 1),
        Scope(
            "twofold",
            1,
            2,
            0,
            ("stop", "sever", "unknown", "refuse"),
            chunk_rows=2,
            severable=WRITERS,
            spread=True,
        ),
        Scope("again", 2, 1, 0, chunk_rows=2, quarantine_percent=25, spread=True),
        Scope(
            "pair",
            2,
            1,
            0,
            ("kill", "sever"),
            prompt_rows=1,
            page_rows=4,
            killable=(Role.KVPROXY, Role.LB),
            severable=(Role.LB,),
            same_ids=False,
            spread=True,
        ),
        _three("three", 1, 0, ALL, True),
        _three("cancels", 0, 1, (), False),
        Scope(
            "voice",
            2,
            1,
            0,
            ("kill", "stop", "sever", "refuse", "hang"),
            decode_pages=4,
            prefill_pages=3,
            prompt_rows=3,
            output_rows=1,
            chunk_rows=3,
            same_ids=False,
            voice_rows=2,
            spread=True,
        ),
        Scope(
            "remote",
            2,
            1,
            0,
            ("cut", "kill", "stop", "sever", "hang", "unknown"),
            prompt_rows=1,
            page_rows=4,
            same_ids=False,
            remote=True,
            spread=True,
        ),
    )
}


def world_config(scope: Scope) -> WorldConfig:
    return WorldConfig(
        DecodeConfig(
            scope.decode_pages,
            scope.page_rows,
            4,
            1 << 20,
            "spec",
            transfer_deadline_ns=1000,
            quarantine_percent=scope.quarantine_percent,
            quarantine_grace_ns=0,
        ),
        PrefillConfig(scope.prefill_pages, scope.page_rows, "spec"),
        WriterConfig(withheld_bound=2, withheld_after_ns=5000, withheld_limit_ns=5000),
        FrontConfig(queue_wait_ns=1 << 40),
        chunk_rows=scope.chunk_rows,
        prefix=scope.voice_rows > 0,
    )


def prompt_of(scope: Scope, number: int) -> bytes:
    """The prompt of request `number`."""
    voice = content.tags(_VOICE, 0, scope.voice_rows)
    own = content.tags(number, scope.voice_rows, scope.prompt_rows)
    return content.pack_prompt(voice + own, False)
