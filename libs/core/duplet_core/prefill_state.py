"""What prefill's machine keeps of one transfer, and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from duplet_core.ids import InstanceId, RequestKey, TransferId
from duplet_core.messages import Sampling


class State(StrEnum):
    QUEUED = "queued"
    COMPUTING = "computing"
    HANDED = "handed"
    STOPPING = "stopping"
    OWED = "owed"

    __hash__ = str.__hash__  # keys a table


class Input(Enum):
    """What can happen to a transfer."""

    END = "lb ended the request, or lb is gone"
    CHUNK = "the engine computed rows, more follow"
    LAST_CHUNK = "the engine computed the rest, drew the first row and ended the sequence"
    ENGINE_FAILED = "the engine could not go on with it"
    STOPPED = "the engine let go of the pages"
    RELEASED = "the writer will not read the pages any more"
    WRITER_LOST = "the writer's stream ended"
    WRITER_DIED = "the writer has exited"

    __hash__ = object.__hash__  # keys a table


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    pages: int
    page_rows: int
    spec: str
    queue_limit: int = 256
    open_limit: int = 32
    """Sequences that the engine may have at once. The rest waits here, where its end costs
    nothing: what is handed over can pile up before an engine that is inside a long step."""


@dataclass(slots=True)
class Job:
    key: RequestKey
    transfer: TransferId
    prompt: bytes | None
    """Handed to the engine with Start and not kept."""
    prompt_rows: int
    sampling: Sampling
    received_ns: int
    handed_ns: int = 0
    """When the engine got it."""
    state: State = State.QUEUED
    pages: tuple[int, ...] = ()
    seq: int = 0
    writer: InstanceId | None = None
    """Who got the first Move; the transfer stays with this writer."""
    owed: bool = False
    """The writer has yet to say SourceReleased."""
    doubtful: bool = False
    """The writer's stream broke after the last Move: only the writer knows whether it arrived."""
    cached_rows: int = 0
    """Rows at the beginning whose KV was known."""
    moved_rows: int = 0
    digests: tuple[bytes, ...] = ()
