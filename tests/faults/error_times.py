"""How long a client waited for its error after the unit knew.

The unit *knows* of a request's failure from the first line of its own logs that says so:

- decode's or prefill's `failed`, which names the request;
- for requests that ended with a lost part, lb's `peer lost`, which names the part;
- where lb itself is gone, the kernel's word that its process has exited.

A stopped lb knows nothing until it is continued. What lb refuses (OVERLOADED, NOT_READY and the
like) has failed nowhere: the wait for that answer, from the call and less the time that lb lets a
request wait for room, is told apart from the others.

All times are of the machine's wall clock: the services' log lines carry it with microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from duplet_core.ids import Role
from tests.e2e.streams import Stream

QUEUE_WAIT_S = 0.02
"""DUPLET_LB_QUEUE_WAIT_MS as it is by default."""
LOST = {"PREFILL_LOST": Role.PREFILL, "DECODE_LOST": Role.DECODE}
REFUSALS = frozenset({"OVERLOADED", "NOT_READY", "DRAINING", "QUARANTINE", "WRITER_LOST"})


@dataclass(frozen=True, slots=True)
class LogLine:
    role: Role
    at_s: float
    event: str
    request_id: str
    detail: str


@dataclass(slots=True)
class Knowledge:
    """What the unit said while a fault was there, and when lb could hear and speak."""

    lines: list[LogLine]
    lb_deaths_s: list[float] = field(default_factory=list)
    lb_awake_s: list[float] = field(default_factory=list)
    """When a stopped lb was continued."""


def read_lines(logs: Mapping[Role, Path], offsets: Mapping[Role, int]) -> list[LogLine]:
    """The log lines after the offsets (bytes), in the order of time."""
    found = []
    for role, path in logs.items():
        with path.open("rb") as log:
            log.seek(offsets[role])
            found += [line for raw in log if (line := _parse(role, raw)) is not None]
    return sorted(found, key=lambda line: line.at_s)


def _parse(role: Role, raw: bytes) -> LogLine | None:
    if not raw.startswith(b"{") or not raw.endswith(b"\n"):
        return None  # A line of gRPC's own, or one that is still being written.
    said = json.loads(raw)
    at_s = datetime.fromisoformat(said["timestamp"]).timestamp()
    request_id, detail = said.get("request_id", ""), str(said.get("detail", ""))
    return LogLine(role, at_s, said["event"], request_id, detail)


def known_s(stream: Stream, known: Knowledge) -> float | None:
    """When the unit knew that this request failed; None: nothing says so."""
    assert stream.error is not None
    reason = stream.error.reason
    if reason:
        causes = [
            line.at_s
            for line in known.lines
            if line.at_s <= stream.over_s and _tells(line, stream, LOST.get(reason))
        ]
    else:
        causes = [at_s for at_s in known.lb_deaths_s if at_s >= stream.sent_s]
    # Of several losses of one part, the last before the error is the one it tells.
    return _heard_s(stream, known, causes[-1]) if causes else None


def _heard_s(stream: Stream, known: Knowledge, at_s: float) -> float:
    """Not before the call was made, nor while lb was stopped."""
    awake = [awake_s for awake_s in known.lb_awake_s if awake_s <= stream.over_s]
    return max(at_s, stream.sent_s, *awake)


def _tells(line: LogLine, stream: Stream, lost: Role | None) -> bool:
    if lost is not None and line.role is Role.LB and line.event == "peer lost":
        return line.detail.startswith(lost)
    return line.event == "failed" and bool(line.request_id) and line.request_id == stream.request_id


@dataclass(frozen=True, slots=True)
class ErrorTimes:
    """Of the requests of one case that ended with an error."""

    failed_s: tuple[float, ...]
    """Waits for the error after the unit knew."""
    refused_s: tuple[float, ...]
    """Waits for an answer that said no."""
    unexplained: tuple[str, ...]
    """Errors of which nothing says when the unit knew."""


def measure(streams: Iterable[Stream], known: Knowledge) -> ErrorTimes:
    """Measure each of them. One that found no lb to talk to is not counted."""
    failed: list[float] = []
    refused: list[float] = []
    unexplained: list[str] = []
    for stream in streams:
        if stream.error is None or _met_nobody(stream, known):
            continue
        at_s = known_s(stream, known)
        if at_s is not None:
            failed.append(max(0.0, stream.over_s - at_s))
        elif stream.error.reason in REFUSALS:
            asked_s = _heard_s(stream, known, stream.sent_s + QUEUE_WAIT_S)
            refused.append(max(0.0, stream.over_s - asked_s))
        else:
            unexplained.append(f"{stream.request_id}: {stream.error}")
    return ErrorTimes(tuple(failed), tuple(refused), tuple(unexplained))


def _met_nobody(stream: Stream, known: Knowledge) -> bool:
    """The call was made after lb had gone: there was no connection to it."""
    assert stream.error is not None
    gone = any(at_s < stream.sent_s for at_s in known.lb_deaths_s)
    return not stream.error.reason and stream.started is None and gone
