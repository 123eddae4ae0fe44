"""The closed list of messages between an I/O process and its engine process.

The I/O process decides who and where, the engine when. `seq` is minted by the I/O process,
grows, and is never used again. A seq is open from the Verify or Start that first names it;
for each open seq the engine sends exactly one Stopped: after Stop, or by itself when the
sequence ended, in either case once the last launched step or Verify that names its pages has
completed. Stop for a seq that is not open is ignored. A prefill sequence ends by itself with
its last ChunkDone, which stands for its Stopped.
"""

from __future__ import annotations

from duplet_core.ids import TransferId
from duplet_core.messages import Sampling
from duplet_core.value import value

# --- to the engine ------------------------------------------------------------


@value
class Start:
    """Run a sequence. Prefill: compute `rows` and draw the first output row. Decode: go on."""

    seq: int
    pages: tuple[int, ...]
    """All pages of the sequence, in row order."""
    rows: bytes
    """Little-endian int32 [n, 1 + codebooks]. Prefill: the whole prompt. Decode: the first
    output row, whose KV decode computes."""
    start_row: int
    """Position of the first row to compute. Prefill: rows before it are cached in `pages`.
    Decode: the prompt's length."""
    max_rows: int
    """Decode: most output rows, the first included. Prefill: unused (0)."""
    sampling: Sampling


@value
class Verify:
    """Check landed KV against the digests taken where it was computed (S10)."""

    seq: int
    transfer: TransferId
    pages: tuple[int, ...]
    rows: int
    digests: tuple[bytes, ...]


@value
class Stop:
    """End a sequence; answered by Stopped."""

    seq: int


@value
class Shutdown:
    """Leave the loop and exit 0."""


# --- from the engine ----------------------------------------------------------


@value
class StepTime:
    """What decode's steps of one size took, timed before anybody had a stream."""

    streams: int
    pages: int
    """Of all streams together."""
    taken_ns: int


@value
class Ready:
    """The model is loaded and warm, the pool is mapped. Sent once, first."""

    spec: str
    """`duplet_pages.spec.ModelSpec` as canonical JSON."""
    pool: str
    """`duplet_memory.layout.PoolDescription` as JSON; the pool's descriptor travels beside it."""
    pages: int
    page_rows: int
    slots: int
    """Most sequences one step takes."""
    step_times: tuple[StepTime, ...] = ()
    """Decode, where it was asked to time its steps."""


@value
class ChunkDone:
    """Prefill: rows up to `rows` are computed and visible in the pool."""

    seq: int
    rows: int
    """Rows of the prompt computed so far, cached ones included."""
    digests: tuple[bytes, ...]
    """Of the pages completed by this chunk, in row order; with the last chunk also of the
    partly filled last page."""
    first_row: bytes | None
    """With the last chunk: the row drawn after the prompt (which may be the stop row)."""
    stopped: bool
    """With the last chunk: the drawn row is the stop row."""
    started_ns: int
    """When the sequence's first chunk was launched."""
    done_ns: int
    """The digests are taken, too."""
    computed_ns: int = 0
    """With the last chunk: it was computed."""
    drawn_ns: int = 0
    """With the last chunk: the first row was drawn."""


@value
class Verified:
    seq: int
    transfer: TransferId
    ok: bool
    detail: str
    """Which page differs, when one does."""


@value
class StepDone:
    """Decode: one step's rows. A sequence that drew the stop row has an end and no row."""

    step: int
    seqs: tuple[int, ...]
    rows: bytes
    """Little-endian int32 [len(seqs), 1 + codebooks]."""
    ends: tuple[tuple[int, bool], ...]
    """(seq, True for the stop row, False for the length limit)."""
    started_ns: int
    done_ns: int


@value
class Stopped:
    """No launched step or Verify names the sequence's pages any more."""

    seq: int
    kv_ok: bool | None
    """Digest check repeated at the end (fault tests); None where it was not asked for."""


@value
class SeqFailed:
    """The engine could not go on with this sequence; Stopped follows for an open one."""

    seq: int
    detail: str


ToEngine = Start | Verify | Stop | Shutdown
FromEngine = Ready | ChunkDone | Verified | StepDone | Stopped | SeqFailed
EngineMessage = ToEngine | FromEngine
