"""What lb's machine keeps of one request, and its settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, StrEnum

from duplet_core.effects import Submit

FULL = "the unit is full"
"""What a request hears that is refused at once, whatever it holds."""


class State(StrEnum):
    QUEUED = "queued"
    PENDING = "pending"
    HANDED = "handed"
    STREAMING = "streaming"

    __hash__ = str.__hash__  # keys a table


class Input(Enum):
    """What can happen to a request."""

    CANCEL = "the client ended it"
    DEADLINE = "its time is over"
    REFUSED = "decode reserved nothing"
    FAILED = "prefill or decode cannot go on"
    STOPPED_AT_ONCE = "the first row was the stop row"
    HANDED = "prefill's part is over, decode has the KV"
    ACCEPTED = "decode verified the KV"
    ROWS = "decode made a row"
    FINISHED = "decode finished it"
    PREFILL_LOST = "prefill's stream ended"
    DECODE_LOST = "decode's stream ended"

    __hash__ = object.__hash__  # keys a table


@dataclass(frozen=True, slots=True)
class FrontConfig:
    queue_limit: int = 16
    queue_wait_ns: int = 20_000_000
    """A request that finds no credit waits for so long before it is refused."""


@dataclass(slots=True)
class Request:
    submit: Submit
    queued_until_ns: int
    state: State = State.QUEUED
    stream_id: int | None = None


def name_spec(spec: str) -> str:
    """What tells one model's spec from another's, for people; nothing is decided by it."""
    try:
        fields = json.loads(spec)
    except ValueError:
        return repr(spec[:40])
    if not isinstance(fields, dict):
        return repr(spec[:40])
    names = ("name", "dtype", "page_rows", "fingerprint")
    return " ".join(str(fields[name]) for name in names if name in fields)
