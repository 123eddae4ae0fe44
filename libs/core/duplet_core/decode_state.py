"""What decode's machine keeps of one transfer, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from operator import sub

from duplet_core.engine import StepDone, StepTime
from duplet_core.ids import InstanceId, RequestKey, TransferId
from duplet_core.messages import Finished, Handoff, Sampling, StepRows


class State(StrEnum):
    GRANTED = "granted"
    VERIFYING = "verifying"
    RUNNING = "running"
    STOPPING = "stopping"
    QUARANTINED = "quarantined"

    __hash__ = str.__hash__  # keys a table


class Input(Enum):
    """What can happen to a transfer."""

    STARTED = "the writer queued the first copy"
    LANDED = "the writer reports all rows written"
    FAILED = "the writer reports the end, nothing outstanding"
    BROKEN = "the writer reports trouble, copies may be outstanding"
    ACK = "the writer acknowledges an Abort"
    WRITER_LOST = "the writer's stream ended"
    WRITER_DIED = "the writer has exited"
    END = "lb ended the request, or lb is gone"
    DEADLINE = "the transfer took too long"
    VERIFIED = "the digests are right"
    MISMATCH = "the digests differ"
    ENGINE_END = "the engine saw the stop row or the limit"
    ENGINE_FAILED = "the engine could not go on with it"
    STOPPED = "the engine let go of the pages"

    __hash__ = object.__hash__  # keys a table


WRITER_INPUTS = (
    Input.STARTED,
    Input.LANDED,
    Input.FAILED,
    Input.BROKEN,
    Input.ACK,
    Input.WRITER_LOST,
    Input.WRITER_DIED,
)
ENGINE_INPUTS = (
    Input.VERIFIED,
    Input.MISMATCH,
    Input.ENGINE_END,
    Input.ENGINE_FAILED,
    Input.STOPPED,
)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    pages: int
    page_rows: int
    slots: int
    longest_sequence: int
    spec: str
    floor_rows_per_s: float = 0
    """Admit only what lets every stream keep this rate; 0: as many as there are slots."""
    step_times: tuple[StepTime, ...] = ()
    """What the engine's steps took at start; what they cost is known from the first request on."""
    transfer_deadline_ns: int = 10_000_000_000
    quarantine_percent: int = 25
    quarantine_grace_ns: int = 100_000_000
    """Pages count against `quarantine_percent` from this age on. Every cancel of a transfer
    quarantines for the milliseconds that its ABORT_ACK takes, which is no reason to refuse."""
    damaged_pages: int = 0
    """What the engine was told to damage of every prompt; only passed on, for people."""


@dataclass(slots=True)
class Report:
    """A stream's usage and times, in the order of `duplet_core.timeline.STAMPED`."""

    stamps: tuple[int, ...] = ()
    output_rows: int = 0
    cached_rows: int = 0
    kv_checks: int = 1
    """Checks of the prompt's KV before the first step."""
    admitted_ns: int = 0
    step_ends_ns: list[int] = field(default_factory=list)
    """Of each step with a row of the stream."""

    def finished(self, request_id: str, transfer: TransferId, stop: bool, done_ns: int) -> Finished:
        """The stream's end, with every stamp up to its last step at `done_ns`."""
        ends_ns = self.step_ends_ns
        if not ends_ns or stop:
            ends_ns = [*ends_ns, done_ns]  # this step has no row of it
        stamps = (*self.stamps, ends_ns[0], done_ns)
        usage = (self.output_rows, self.kv_checks)
        gaps_ns = tuple(map(sub, ends_ns[1:], ends_ns))
        return Finished(
            *(request_id, transfer, stop, *usage, stamps),
            *(self.cached_rows, self.admitted_ns, gaps_ns),
        )


def pick_rows(done: StepDone, live: list[int]) -> StepRows:
    """The rows at the indices `live` of a step; all of them cost no copy."""
    if len(live) == len(done.seqs):
        return StepRows(done.step, done.seqs, done.rows)
    row_bytes = len(done.rows) // len(done.seqs)
    rows = b"".join(done.rows[i * row_bytes : (i + 1) * row_bytes] for i in live)
    return StepRows(done.step, tuple(done.seqs[i] for i in live), rows)


@dataclass(slots=True)
class Transfer:
    key: RequestKey
    transfer: TransferId
    writer: InstanceId
    prompt_rows: int
    max_rows: int
    sampling: Sampling
    pages: tuple[int, ...]
    state: State = State.GRANTED
    seq: int = 0
    handoff: Handoff | None = None
    report: Report = field(default_factory=Report)
