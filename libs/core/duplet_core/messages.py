"""What peers say to each other, as core's types. `protos/` is the same on the wire.

Fields named `pages` hold page numbers of the pool that the sentence is about; `*_ns` are
times of the machine's monotonic clock. Payloads that core only carries (`rows`, `stamps`,
digests) stay bytes or tuples and are never interpreted here.
"""

from __future__ import annotations

from duplet_core.errors import Reason
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.value import value


@value
class Sampling:
    """How rows are drawn; a row is a function of (seed, position) and the KV before it."""

    seed: int
    temperature: float
    top_p: float
    top_k: int
    repetition_window: int
    """Draw again when the semantic token is among the last so many; 0 switches it off."""


@value
class Handoff:
    """What the last Move carries through kvproxy to decode."""

    first_row: bytes
    """The first output row, little-endian int32 [1 + codebooks]."""
    digests: tuple[bytes, ...]
    """16 bytes a prompt page, over the page's valid rows (S10)."""
    stamps: tuple[int, ...]
    """Times in ns so far: the beginning of `duplet_core.timeline.STAMPED`."""
    cached_rows: int = 0
    """Prompt rows whose KV came from the prefix cache."""


# --- every pair -------------------------------------------------------------


@value
class Hello:
    """First message of either end of a peer stream."""

    role: Role
    instance: InstanceId
    version: int
    number: int
    """The dialer's stream number, growing over its life; the acceptor echoes it."""
    to_instance: InstanceId | None = None
    """Whom the sender means; None while it does not know."""
    held: tuple[TransferId, ...] = ()
    """To kvproxy only. From decode: transfers with pages granted or quarantined under this
    writer; each counts as an Abort. From prefill: transfers whose source pages are held."""
    spec: str = ""
    """From prefill and decode to lb: the model's spec as canonical JSON."""
    credit: Credit | None = None
    """From decode to lb."""
    refusing: Reason | None = None
    """From prefill to lb, as in Refusing."""
    transport: str = ""
    """From kvproxy: how copies go between the pools that it maps, in words."""


# Between lb and its peers `transfer` names the attempt: a request id may return after its end,
# and a late message about the earlier use must not be taken for the later one.

# --- lb <-> decode ------------------------------------------------------------


@value
class Admit:
    """lb -> decode: reserve pages for prompt and longest output, grant the prompt's."""

    request_id: str
    transfer: TransferId
    prompt_rows: int
    max_rows: int
    """Most output rows, first row included; already clipped to the longest sequence."""
    sampling: Sampling
    trace: str = ""
    """W3C traceparent, carried for spans."""


@value
class End:
    """lb -> prefill, lb -> decode: the request is over. Sent to both sides at every end."""

    request_id: str
    transfer: TransferId
    reason: Reason | None
    """None: it finished."""


@value
class Census:
    """What decode's pages and checks amount to; for people, nothing is decided by it."""

    granted_pages: int = 0
    live_pages: int = 0
    quarantined_pages: int = 0
    kv_checks: int = 0
    """Checks of landed KV against its digests since decode started."""
    kv_mismatches: int = 0
    pending_aborts: int = 0
    """ABORTs without a proof yet, one a quarantined transfer."""
    aborts_resent: int = 0
    """ABORTs said again in a Hello since decode started."""
    writers: int = 0
    """Living instances of kvproxy whose death the kernel will tell."""
    transport: str = ""
    """How KV comes here, in kvproxy's words; empty without a stream to it."""
    damaged_pages: int = 0
    """Pages of every prompt that decode's engine damages on purpose, for a drill."""
    ends_withheld: int = 0
    """Ends of transfers that kvproxy cannot tell; 0 without a stream to it."""


@value
class StepCredit:
    """What decode's steps leave room for while every stream keeps the floor.

    One more request costs `stream_ns` and `page_ns` for every page that it reserves.
    """

    streams: int
    """Admitted and not over; with none, one is welcome whatever it costs."""
    free_ns: int
    stream_ns: int
    page_ns: int


@value
class Credit:
    """decode -> lb: what it can take, in Hello and on change."""

    total_pages: int
    free_pages: int
    free_slots: int
    admits_seen: int
    """Admits processed on this stream; lb subtracts those sent beyond it."""
    refusing: Reason | None = None
    """Why nothing new is taken (DRAINING, QUARANTINE, WRITER_LOST); None: admits are welcome."""
    census: Census = Census()
    step: StepCredit | None = None
    """None: decode keeps no floor."""


@value
class Refused:
    """decode -> lb: the Admit reserved nothing."""

    request_id: str
    transfer: TransferId
    reason: Reason
    detail: str


@value
class Accepted:
    """decode -> lb: the KV landed and verified; rows of `stream_id` are this request's."""

    request_id: str
    transfer: TransferId
    stream_id: int
    first_row: bytes


@value
class StepRows:
    """decode -> lb: one decode step's rows of all streams."""

    step: int
    stream_ids: tuple[int, ...]
    rows: bytes
    """Little-endian int32 [len(stream_ids), 1 + codebooks]."""


@value
class Finished:
    """decode -> lb: the stream ended well (stop row or length limit)."""

    request_id: str
    transfer: TransferId
    stop: bool
    """True: stop row (not among the rows sent). False: length limit."""
    output_rows: int
    kv_checks: int
    stamps: tuple[int, ...]
    """Prefill's, kvproxy's and decode's times in ns: `duplet_core.timeline.STAMPED`."""
    cached_rows: int = 0
    admitted_ns: int = 0
    """When decode admitted it."""
    step_gaps_ns: tuple[int, ...] = ()
    """From the end of each of the stream's steps to the end of the next."""


@value
class Failed:
    """decode -> lb, prefill -> lb: the request cannot go on."""

    request_id: str
    transfer: TransferId
    reason: Reason
    detail: str


# --- lb <-> prefill -----------------------------------------------------------


@value
class Prefill:
    """lb -> prefill: compute this prompt and move it under `transfer`."""

    request_id: str
    transfer: TransferId
    prompt: bytes
    """Little-endian int32 [rows, 1 + codebooks], checked by lb."""
    prompt_rows: int
    sampling: Sampling
    voice: str = ""
    trace: str = ""


@value
class StoppedAtOnce:
    """prefill -> lb: the first drawn row was the stop row; there is no output."""

    request_id: str
    transfer: TransferId
    stamps: tuple[int, ...]
    cached_rows: int = 0


@value
class Handed:
    """prefill -> lb: the KV is in decode's pages. From here on decode alone tells the end."""

    request_id: str
    transfer: TransferId


@value
class Refusing:
    """prefill -> lb: why no prompt is taken now (DRAINING, WRITER_LOST), on change."""

    reason: Reason | None
    """None: prompts are welcome."""


# --- decode <-> kvproxy -------------------------------------------------------


@value
class Grant:
    """decode -> kvproxy: this transfer may write these pages. Sent once, never repeated."""

    transfer: TransferId
    pages: tuple[int, ...]
    """Pages of decode's pool for the prompt's rows, in row order."""
    rows: int


@value
class Abort:
    """decode -> kvproxy: delete the grant; answer AbortAck when no copy is outstanding."""

    transfer: TransferId


@value
class AbortAck:
    """kvproxy -> decode: no copy of the transfer is outstanding and none can start (S3)."""

    transfer: TransferId


@value
class Started:
    """kvproxy -> decode: the first copy was queued; the transfer's deadline runs (S5)."""

    transfer: TransferId


@value
class Landed:
    """kvproxy -> decode: all rows are in the granted pages; the grant is consumed. Proof (S2a)."""

    transfer: TransferId
    rows: int
    handoff: Handoff


@value
class TransferFailed:
    """kvproxy -> decode: the transfer ended with no copy outstanding. Proof (S2a)."""

    transfer: TransferId
    detail: str


@value
class TransferBroken:
    """kvproxy -> decode: the transfer cannot land, copies may be outstanding. No proof."""

    transfer: TransferId
    detail: str


@value
class Leaving:
    """kvproxy -> decode: it was told to leave and goes when what is granted has ended: no grant
    should come to it any more. One that comes is served all the same."""


@value
class Route:
    """kvproxy -> decode: what people want to know of it, when that changed. No rule reads it."""

    transport: str
    """As `Hello.transport`."""
    ends_withheld: int = 0
    """Ends of transfers that cannot be told, as no proof is there (S9)."""


# --- prefill <-> kvproxy ------------------------------------------------------


@value
class Move:
    """prefill -> kvproxy: copy these computed rows. Waits, without a timer, for the grant."""

    transfer: TransferId
    start_row: int
    count: int
    pages: tuple[int, ...]
    """Pages of prefill's pool that hold rows [start_row, start_row + count), in row order;
    the first holds row start_row - start_row % page_rows."""
    handoff: Handoff | None = None
    """With the last Move."""


@value
class Drop:
    """prefill -> kvproxy: end the transfer; answered by SourceReleased, also when unknown."""

    transfer: TransferId


@value
class SourceReleased:
    """kvproxy -> prefill: no copy reads the transfer's source pages and none will (S6)."""

    transfer: TransferId
    landed: bool
    """True: all rows are in decode's pages. False: it ended otherwise, or never began."""


Message = (
    Hello | Admit | End | Credit | Refused | Accepted | StepRows | Finished | Failed
    | Prefill | StoppedAtOnce | Handed | Refusing | Grant | Abort | AbortAck | Started | Landed
    | TransferFailed | TransferBroken | Leaving | Route | Move | Drop | SourceReleased
)  # fmt: skip
