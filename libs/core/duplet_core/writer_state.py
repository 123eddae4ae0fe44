"""What the writer's machine keeps of one transfer, and its settings."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.messages import Handoff, Move


class State(StrEnum):
    GRANTED = "granted"
    WAITING = "waiting"
    MOVING = "moving"
    ENDING = "ending"

    __hash__ = str.__hash__  # keys a table


class Input(Enum):
    """What can happen to a transfer that kvproxy knows."""

    GRANT = "decode permits it to write"
    ABORT = "decode takes the permission back"
    MOVE = "prefill asks for the next rows"
    BAD_MOVE = "prefill asks for rows that are not the next, or not granted"
    DROP = "prefill ends it"
    COPY_OK = "a copy completed successfully"
    COPY_REFUSED = "a copy was refused before it began"
    COPY_UNKNOWN = "a copy ended in error or unknown"
    SOURCE_BACK = "prefill has a new stream"
    SOURCE_DIED = "prefill has exited"
    DEST_BACK = "decode has a new stream"
    DEST_DIED = "decode has exited"

    __hash__ = object.__hash__  # keys a table


@dataclass(frozen=True, slots=True)
class WriterConfig:
    withheld_bound: int = 3
    """So many withheld ends turn health red."""
    withheld_after_ns: int = 500_000_000
    """An end whose copies run longer than this counts as withheld; copies take milliseconds,
    so a storm of aborts during healthy copies does not count."""
    withheld_limit_ns: int = 5_000_000_000
    """One end withheld for so long turns health red."""
    red_before_exit_ns: int = 250_000_000
    """Health is red for so long before the process exits."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A registered pool, as far as page numbers go."""

    peer: Role
    pages: int
    page_rows: int


@dataclass(slots=True)
class Transfer:
    transfer: TransferId
    state: State
    dest: InstanceId | None = None
    """The decode that granted; None: no grant."""
    dest_pages: tuple[int, ...] = ()
    rows: int = 0
    """Granted rows."""
    source: InstanceId | None = None
    """The prefill that moves; None: no Move yet."""
    next_row: int = 0
    handed_ns: int = 0
    """When the last Move came."""
    waiting: deque[Move] = field(default_factory=deque)
    """Moves without a grant; bounded by prefill's pool, for their rows are consecutive."""
    outstanding: set[int] = field(default_factory=set)
    """Copies queued and not observed as completed. One that ended in error or unknown stays
    in here for ever: nothing proves that it has stopped (S3)."""
    unknown: bool = False
    """Some outstanding copy will never be observed as completed."""
    handoff: Handoff | None = None
    """Set by the last Move."""
    ending_since_ns: int = 0
    owes_ack: bool = False
    owes_failed: str | None = None
    """Detail of the TransferFailed that decode is to get, when no ack is asked for."""
    last_copy_ns: int = 0
