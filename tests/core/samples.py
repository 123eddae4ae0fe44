"""Names, messages and effect pickers that the core's tests share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from duplet_core import engine
from duplet_core.decode_state import DecodeConfig
from duplet_core.effects import Admitted, Count, Effect, Ended, Send, Submit, ToEngineEffect
from duplet_core.errors import Reason
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role, TransferId
from duplet_core.messages import (
    Admit,
    Credit,
    Grant,
    Handoff,
    Hello,
    Message,
    Move,
    Prefill,
    Route,
    Sampling,
)
from duplet_core.prefill_state import PrefillConfig

Kind = TypeVar("Kind")

LB1, LB2 = InstanceId("lb-1"), InstanceId("lb-2")
PREFILL1, PREFILL2 = InstanceId("prefill-1"), InstanceId("prefill-2")
DECODE1, DECODE2 = InstanceId("decode-1"), InstanceId("decode-2")
WRITER1, WRITER2 = InstanceId("writer-1"), InstanceId("writer-2")
STRANGER = InstanceId("stranger")
NAMES = {
    Role.LB: LB1,
    Role.PREFILL: PREFILL1,
    Role.DECODE: DECODE1,
    Role.KVPROXY: WRITER1,
}

T1, T2, T3, T4 = (TransferId(f"transfer-{n}") for n in range(1, 5))

PAGE_ROWS = 4
PROMPT_ROWS = 10
"""Three pages, the last one partly filled."""
MAX_ROWS = 6
"""Prompt and output take four pages."""
SAMPLING = Sampling(seed=7, temperature=0.7, top_p=0.9, top_k=30, repetition_window=16)
ROW = b"\x01\x00\x00\x00\x02\x00\x00\x00"
SPEC = '{"name":"tiny"}'
DIGESTS = (b"a" * 16, b"b" * 16, b"c" * 16)
HANDOFF = Handoff(ROW, DIGESTS, (11, 12, 13))
MILLISECOND = 1_000_000
SECOND = 1_000_000_000

DECODE_CONFIG = DecodeConfig(pages=16, page_rows=PAGE_ROWS, slots=4, longest_sequence=48, spec=SPEC)
PREFILL_CONFIG = PrefillConfig(pages=8, page_rows=PAGE_ROWS, spec=SPEC)


def hello(
    role: Role,
    instance: InstanceId,
    number: int,
    *,
    to: InstanceId | None = None,
    held: tuple[TransferId, ...] = (),
    version: int = PROTOCOL_VERSION,
    spec: str = "",
    credit: Credit | None = None,
) -> Hello:
    return Hello(role, instance, version, number, to, held, spec, credit)


def admit(
    request_id: str = "r1",
    transfer: TransferId = T1,
    prompt_rows: int = PROMPT_ROWS,
    max_rows: int = MAX_ROWS,
) -> Admit:
    return Admit(request_id, transfer, prompt_rows, max_rows, SAMPLING)


def prefill(
    request_id: str = "r1", transfer: TransferId = T1, prompt_rows: int = PROMPT_ROWS
) -> Prefill:
    return Prefill(request_id, transfer, ROW * prompt_rows, prompt_rows, SAMPLING)


def submit(
    request_id: str = "r1",
    transfer: TransferId = T1,
    *,
    pages: int = 4,
    deadline_ns: int = 60 * SECOND,
) -> Submit:
    return Submit(
        request_id,
        transfer,
        ROW * PROMPT_ROWS,
        PROMPT_ROWS,
        MAX_ROWS,
        pages,
        SAMPLING,
        deadline_ns,
    )


def grant(transfer: TransferId = T1, pages: tuple[int, ...] = (0, 1, 2)) -> Grant:
    return Grant(transfer, pages, PROMPT_ROWS)


def first_move(transfer: TransferId = T1) -> Move:
    """Rows 0 to 5: one page and a half."""
    return Move(transfer, 0, 6, (5, 6))


def last_move(transfer: TransferId = T1) -> Move:
    """Rows 6 to 9, with the handoff."""
    return Move(transfer, 6, 4, (6, 7), HANDOFF)


def whole_move(transfer: TransferId = T1) -> Move:
    return Move(transfer, 0, PROMPT_ROWS, (5, 6, 7), HANDOFF)


def chunk(seq: int, rows: int = 6) -> engine.ChunkDone:
    """A chunk in the middle of the prompt: one page is complete."""
    return engine.ChunkDone(seq, rows, DIGESTS[:1], None, False, 12, 13)


def last_chunk(seq: int, *, stopped: bool = False, after_first: bool = False) -> engine.ChunkDone:
    """The last chunk: of the whole prompt, or of the rest after `chunk`."""
    digests = DIGESTS[1:] if after_first else DIGESTS
    return engine.ChunkDone(seq, PROMPT_ROWS, digests, ROW, stopped, 12, 15, 13, 14)


def sent(effects: Iterable[Effect], peer: Role) -> list[Message]:
    """What goes to this peer, in order, without what follows any change and is for people: decode's
    credit, the writer's route."""
    return [
        e.message
        for e in effects
        if isinstance(e, Send) and e.peer is peer and not isinstance(e.message, Credit | Route)
    ]


def routes_sent(effects: Iterable[Effect]) -> list[Route]:
    return [e.message for e in pick(effects, Send) if isinstance(e.message, Route)]


def credits_sent(effects: Iterable[Effect]) -> list[Credit]:
    return [e.message for e in pick(effects, Send) if isinstance(e.message, Credit)]


def to_engine(effects: Iterable[Effect]) -> list[engine.ToEngine]:
    return [e.message for e in effects if isinstance(e, ToEngineEffect)]


def pick(effects: Iterable[Effect], kind: type[Kind]) -> list[Kind]:
    """The effects of one kind."""
    return [e for e in effects if isinstance(e, kind)]


def kinds(messages: Iterable[object]) -> tuple[type, ...]:
    return tuple(type(m) for m in messages)


def counted(effects: Iterable[Effect], name: str) -> int:
    return sum(e.by for e in effects if isinstance(e, Count) and e.name == name)


def admitted(effects: list[Effect]) -> list[TransferId]:
    return [e.transfer for e in pick(effects, Admitted)]


def ended(effects: list[Effect]) -> list[tuple[TransferId, Reason | None]]:
    return [(e.transfer, e.reason) for e in pick(effects, Ended)]
