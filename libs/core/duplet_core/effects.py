"""Events that machines take and effects that they return; the borders of core.

A service executes effects in order, one branch an effect, and holds no protocol state.
`stream` is the runtime's number of one peer stream: for the dialer it is also the number in
Hello, for the acceptor a local one.
"""

from __future__ import annotations

from enum import StrEnum

from duplet_core.engine import FromEngine, ToEngine
from duplet_core.errors import Reason
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.messages import Finished, Message, Sampling
from duplet_core.value import value

# --- events -------------------------------------------------------------------


@value
class StreamOpened:
    """A stream that we dialed is up. The machine answers with a Hello."""

    peer: Role
    stream: int


@value
class StreamClosed:
    """A stream ended, whoever ended it. Sent once a stream, also after a Close effect."""

    peer: Role
    stream: int
    detail: str = ""
    """Why, for people, where we dialed."""


@value
class Received:
    peer: Role
    stream: int
    message: Message


@value
class LifelineUp:
    """The kernel lets us watch this instance: we hold the pidfds of all its processes."""

    peer: Role
    instance: InstanceId
    pool_pages: int = 0
    """At kvproxy: pages of the pool that came with the lifeline, mapped and checked."""
    page_rows: int = 0
    transport: str = ""
    """At kvproxy: how copies go between the newest pools, in words; empty while one is missing."""


@value
class OtherVersion:
    """Who introduced itself as this peer on a lifeline speaks another transfer protocol: it was
    refused (S11), and no LifelineUp follows."""

    peer: Role
    version: int


@value
class InstanceDied:
    """Every process of this instance has exited: the kernel's word (S4)."""

    peer: Role
    instance: InstanceId


@value
class FromEngineEvent:
    message: FromEngine


@value
class Drain:
    """Take nothing new, finish what runs."""


class CopyResult(StrEnum):
    OK = "ok"
    """Its completion was observed as success."""
    NOT_STARTED = "not-started"
    """Refused before any byte moved; it will never start."""
    UNKNOWN = "unknown"
    """An error or an unknown result: it may still write. Never quiescence (S3)."""


@value
class CopyDone:
    """kvproxy's mover: one queued copy ended."""

    copy: int
    result: CopyResult
    detail: str
    done_ns: int
    started_ns: int = 0
    """When it began; 0 where it never did."""


# Between lb and its clients `transfer` names the request: an id may be refused as a duplicate of
# a live one, and what happens to the second must not be told to the first.

# --- events from lb's own clients ----------------------------------------------


@value
class Submit:
    """A checked request. The rows are lb's; core only passes them on."""

    request_id: str
    transfer: TransferId
    prompt: bytes
    prompt_rows: int
    max_rows: int
    pages: int
    """Pages of decode's pool for prompt and longest output."""
    sampling: Sampling
    deadline_ns: int
    voice: str = ""
    trace: str = ""


@value
class Cancel:
    """The client left, or lb gave up on it."""

    transfer: TransferId
    reason: Reason


# --- effects ------------------------------------------------------------------


@value
class Send:
    """Put the message on the stream; dropped when that stream is gone."""

    peer: Role
    stream: int
    message: Message


@value
class Close:
    """End a peer stream, with a reason for the peer."""

    peer: Role
    stream: int
    reason: Reason
    detail: str


@value
class ToEngineEffect:
    message: ToEngine


@value
class StartCopy:
    """kvproxy: queue one copy on the mover; answered by exactly one CopyDone."""

    copy: int
    transfer: TransferId
    source: InstanceId
    source_pages: tuple[int, ...]
    dest: InstanceId
    dest_pages: tuple[int, ...]
    """Pages for the same rows as `source_pages`, one for one."""
    start_row: int
    count: int


@value
class CancelCopy:
    """kvproxy: the copy's transfer is over. If it has not begun it never begins and its CopyDone
    says NOT_STARTED; otherwise nothing changes. So a deep queue is not mistaken for a stuck
    copy, and an end is told as soon as what really runs has completed."""

    copy: int


@value
class CloseMapping:
    """kvproxy: unmap the pool of a dead instance; no copy touches it any more (S12)."""

    instance: InstanceId


@value
class SetHealth:
    """A named condition changed; `ready` follows from all of them that are needed for it."""

    name: str
    ok: bool
    detail: str
    for_ready: bool = True
    """False: it is told, also beside `ready`, which does not wait for it."""


@value
class Exit:
    """Leave the process: the exit is the proof others wait for (S9)."""

    detail: str


@value
class Drained:
    """Nothing runs any more after a Drain."""


@value
class Count:
    """Raise the counter `name` by `by`."""

    name: str
    by: int = 1


@value
class Log:
    """A fact worth a log line, with the request or transfer that it is about."""

    event: str
    request_id: str = ""
    transfer: str = ""
    detail: str = ""


# --- effects towards lb's own clients ------------------------------------------


@value
class Admitted:
    """Admit and Prefill are on their way."""

    transfer: TransferId


@value
class Rows:
    """Rows for the client, in order."""

    transfer: TransferId
    rows: bytes


@value
class Ended:
    """The request is over; exactly one a Submit."""

    transfer: TransferId
    reason: Reason | None
    """None: it finished."""
    detail: str = ""
    finished: Finished | None = None
    """Usage and stamps where it finished."""


@value
class SpecKnown:
    """Prefill's and decode's specs are here and equal."""

    spec: str


Event = (
    StreamOpened
    | StreamClosed
    | Received
    | LifelineUp
    | OtherVersion
    | InstanceDied
    | FromEngineEvent
    | Drain
    | CopyDone
    | Submit
    | Cancel
)
Effect = (
    Send
    | Close
    | ToEngineEffect
    | StartCopy
    | CancelCopy
    | CloseMapping
    | SetHealth
    | Exit
    | Drained
    | Count
    | Log
    | Admitted
    | Rows
    | Ended
    | SpecKnown
)
