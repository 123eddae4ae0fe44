"""What the host's machine keeps of one request, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from duplet_core.decode_state import Report
from duplet_core.ids import RequestKey, TransferId
from duplet_core.messages import Admit, Prefill


class State(StrEnum):
    ANNOUNCED = "announced"
    WAITING = "waiting"
    COMPUTING = "computing"
    RUNNING = "running"
    STOPPING = "stopping"

    __hash__ = str.__hash__  # keys a table


class Input(Enum):
    """What can happen to a request."""

    ADMIT = "its Admit was taken and its pages are reserved"
    PREFILL = "its prompt arrived"
    START = "no other request computes what it could share"
    END = "lb ended it, or decode's stream with lb ended"
    PREFILL_LOST = "prefill's stream with lb ended"
    CHUNK = "the engine computed rows, more follow"
    LAST_CHUNK = "the engine computed the rest, drew the first row and ended the sequence"
    ENGINE_END = "the engine saw the stop row or the limit"
    ENGINE_FAILED = "the engine could not go on with it"
    STOPPED = "the engine let go of the pages"

    __hash__ = object.__hash__  # keys a table


ENGINE_INPUTS = (
    Input.CHUNK,
    Input.LAST_CHUNK,
    Input.ENGINE_END,
    Input.ENGINE_FAILED,
    Input.STOPPED,
)


@dataclass(frozen=True, slots=True)
class HostConfig:
    pages: int
    page_rows: int
    slots: int
    longest_sequence: int
    spec: str
    queue_limit: int = 256
    """Prompts that may be here before their Admit."""


@dataclass(slots=True, eq=False)
class Stay:
    """One request's stay in the host."""

    key: RequestKey
    transfer: TransferId
    state: State = State.ANNOUNCED
    admit: Admit | None = None
    """None until it came; from then on `reserved` pages are the request's."""
    prefill: Prefill | None = None
    """None until it came, and again once the engine has the prompt: its copy is enough."""
    received_ns: int = 0
    handed_ns: int = 0
    reserved: int = 0
    pages: tuple[int, ...] = ()
    """For prompt and longest output, in row order; taken when the engine starts."""
    seq: int = 0
    """Of the prompt while it is computed, then of the stream."""
    report: Report = field(default_factory=lambda: Report(kv_checks=0))
