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

_STALE = ("closed SUPERSEDED", "stale_messages")
"""Old words meet new ones: a Hello supersedes a stream, a message of an older one arrives."""

_DEATHS = ("closed PEER_DIED", "mapping closed", "ended DECODE_LOST", "ended PREFILL_LOST")

_COPIES = ("copy hangs", "copy wrote after its end was unknown", "red writer")

_ENDS = ("ended CANCELLED", "ended TRANSFER_DEADLINE", "aborts_resent", "grants_ignored")

_CHUNKS = ("chunk received", "chunk cut off", "late chunk dropped")

_BESIDE = ("grant beside quarantine",)

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
    marks: tuple[str, ...] = ()
    """Rare paths that a complete search of it takes, or it is not what it is there for."""


def _three(
    name: str,
    faults: int,
    cancels: int,
    kinds: tuple[str, ...],
    marks: tuple[str, ...],
    killable: tuple[Role, ...] = WRITERS,
) -> Scope:
    """Three requests, each a page in both pools of two: two at once, and the third takes the
    page of whichever is over first. Not with lb's death or breaks of its streams, which `pair`
    has with two requests: there are too many states."""
    return Scope(
        name,
        3,
        faults,
        cancels,
        kinds,
        prompt_rows=1,
        page_rows=4,
        killable=killable,
        severable=WRITERS,
        same_ids=False,
        spread=faults > 0,
        marks=marks,
    )


def _again(name: str, quarantine_percent: int, marks: tuple[str, ...]) -> Scope:
    """A client tries again under the same id while the first try's page may be in quarantine.
    Each try needs one page of two, so the first one's takes nothing from the second's credit."""
    return Scope(
        name,
        2,
        1,
        0,
        prompt_rows=1,
        page_rows=4,
        quarantine_percent=quarantine_percent,
        spread=True,
        marks=(*_STALE, *_DEATHS, *_COPIES, *marks),
    )


SCOPES = {
    scope.name: scope
    for scope in (
        Scope("parts", 1, 1, 0, ("sever",), severable=(Role.PREFILL,), marks=_STALE),
        Scope(
            "handoff",
            1,
            1,
            0,
            ("sever",),
            chunk_rows=2,
            severable=(Role.PREFILL,),
            marks=_STALE,
        ),
        Scope(
            "grants",
            1,
            1,
            0,
            ("sever",),
            chunk_rows=2,
            severable=(Role.DECODE,),
            marks=(*_STALE, "aborts_resent"),
        ),
        Scope("one", 1, 1, 1, marks=(*_STALE, *_DEATHS, *_COPIES, *_ENDS)),
        Scope(
            "twofold",
            1,
            2,
            0,
            ("stop", "sever", "unknown", "refuse"),
            chunk_rows=2,
            severable=WRITERS,
            spread=True,
            marks=(*_STALE, "copy wrote after its end was unknown", "closed STALE_STREAM"),
        ),
        _again("again", 25, ("refusal for quarantine while prefill computes",)),
        _again("beside", 50, _BESIDE),
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
            marks=(*_STALE, *_BESIDE, "closed PEER_DIED", "ended WRITER_LOST"),
        ),
        _three("writer", 1, 0, ("kill",), (*_BESIDE, "closed PEER_DIED"), killable=(Role.KVPROXY,)),
        _three("three", 1, 0, ALL, (*_STALE, *_DEATHS, *_COPIES, *_BESIDE, "grants_ignored")),
        _three("cancels", 0, 1, (), (*_BESIDE, "ended CANCELLED", "ended TRANSFER_DEADLINE")),
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
            marks=(*_STALE, *_DEATHS, *_COPIES, *_BESIDE, "cached_rows"),
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
            marks=(*_STALE, *_DEATHS, *_COPIES, *_BESIDE, *_CHUNKS),
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
