"""Prefill's machine: it computes prompts in arrival order and lends their pages to the writer.

A transfer's stay in prefill:

    QUEUED     waits for pages, first come first served: admission at decode is in the same
               order, so no two requests can each hold what the other waits for
    COMPUTING  the engine computes chunks; each computed chunk leaves at once as a Move
    HANDED     the engine is done; the writer may still read, or the first row was the stop row
    STOPPING   the request is over, the engine has not yet let go (the writer may owe as well)
    OWED       the engine let go, the writer has not yet said SourceReleased

Source pages are held from QUEUED's end until the engine let go *and* no writer owes a
SourceReleased (S6). A writer owes one from the first Move on; its death pays as well. The
next Hello to the same writer lists what is owed, so a lost SourceReleased is asked for again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from duplet_core import engine
from duplet_core.effects import Count, Log, ToEngineEffect
from duplet_core.errors import Reason, require
from duplet_core.ids import RequestKey, Role, TransferId
from duplet_core.machine import Outlet
from duplet_core.messages import (
    Drop,
    Failed,
    Handed,
    Handoff,
    Move,
    Prefill,
    SourceReleased,
    StoppedAtOnce,
)
from duplet_core.prefill_state import Input, Job, PrefillConfig, State
from duplet_core.prefix import Match, PrefixIndex, hold_pages, keep_pages
from duplet_core.sources import SourcePages


class Jobs:
    """Owner of prefill's pages and of every transfer that holds some or waits for them."""

    def __init__(self, config: PrefillConfig, out: Outlet, index: PrefixIndex) -> None:
        self.config = config
        self.pages = SourcePages(config.pages)
        self.by_transfer: dict[TransferId, Job] = {}
        self.by_key: dict[RequestKey, Job] = {}
        """Requests that are not over; their ids are taken."""
        self.by_seq: dict[int, Job] = {}
        """Transfers whose pages the engine may name."""
        self.queue: deque[Job] = deque()
        self.index = index
        self._out = out
        self._next_seq = 1

    def enqueue(self, key: RequestKey, prefill: Prefill, now: int) -> None:
        """Enter a request; it starts once every earlier one has its pages."""
        job = Job(key, prefill.transfer, prefill.prompt, prefill.prompt_rows, prefill.sampling, now)
        self.by_transfer[job.transfer] = job
        self.by_key[key] = job
        self.queue.append(job)

    def start_queued(self, now: int) -> None:
        """Hand the engine what has pages now, in arrival order. A job whose next page is being
        computed for another one steps aside until then, and keeps its place."""
        aside: list[Job] = []
        while self.queue and len(self.by_seq) < self.config.open_limit:
            job = self.queue[0]
            assert job.prompt is not None
            match = self.index.match(job.prompt, (job.prompt_rows - 1) // self.config.page_rows)
            if match.pending:
                aside.append(self.queue.popleft())
            elif self._take_pages(job, match):
                self._start(self.queue.popleft(), match, now)
            else:
                break
        self.queue.extendleft(reversed(aside))

    def _take_pages(self, job: Job, match: Match) -> bool:
        fresh = self.pages_for(job.prompt_rows) - len(match.pages)
        pages = hold_pages(self.pages, self.index, job.transfer, fresh, match)
        if pages is None:
            return False
        job.pages = pages
        return True

    def _start(self, job: Job, match: Match, now: int) -> None:
        assert job.prompt is not None
        job.handed_ns = now
        whole_pages = job.prompt_rows // self.config.page_rows
        self.index.begin(job.transfer, job.prompt, job.pages[:whole_pages])
        job.state = State.COMPUTING
        job.cached_rows = len(match.pages) * self.config.page_rows
        job.digests = match.digests
        job.seq = self._next_seq
        self._next_seq += 1
        self.by_seq[job.seq] = job
        start = engine.Start(job.seq, job.pages, job.prompt, job.cached_rows, 0, job.sampling)
        self._out.emit(ToEngineEffect(start))
        self._out.emit(Count("prompt_rows", job.prompt_rows))
        self._out.emit(Count("cached_rows", job.cached_rows))
        job.prompt = None  # the engine's copy is enough

    def forget_prefixes(self) -> None:
        """Cached KV turned out wrong: it, or what was computed on it, must not be shared again.
        Which page it was is not known here, and it is rare enough to forget them all."""
        for page in self.index.forget():
            self.pages.release_page(page)
        self._out.emit(Count("prefix_cache_forgotten"))

    def step(self, job: Job, what: Input, message: Any, now: int) -> None:
        """Apply one input to one transfer, by the table."""
        self.TABLE[job.state][what](self, job, message, now)

    def step_seq(self, seq: int, what: Input, message: Any, now: int) -> None:
        """The same for the engine's word on a sequence."""
        job = self.by_seq.get(seq)
        require(job is not None, "the engine speaks of open sequences only")
        assert job is not None
        self.step(job, what, message, now)

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.config.page_rows)

    # --- transitions: one method each, named in the table below ----------------------

    def _ignore(self, job: Job, message: Any, now: int) -> None:
        """Decided: changes nothing."""

    def _impossible(self, job: Job, message: Any, now: int) -> None:
        require(False, f"{type(message).__name__} for a transfer that is {job.state}")

    def _unqueue(self, job: Job, message: Any, now: int) -> None:
        self.queue.remove(job)
        self._end_request(job)
        del self.by_transfer[job.transfer]

    def _move_part(self, job: Job, message: engine.ChunkDone, now: int) -> None:
        self._keep(job, message)
        if not self._move(job, message.rows, None):
            self._no_writer(job)
            self._stop_engine(job)

    def _move_last(self, job: Job, message: engine.ChunkDone, now: int) -> None:
        """The engine has ended the sequence with this chunk; it names no page any more."""
        assert message.first_row is not None
        self._keep(job, message)
        self._close_seq(job)
        stamps = (
            *(job.received_ns, job.handed_ns, message.started_ns),
            *(message.computed_ns, message.drawn_ns, message.done_ns),
        )
        if message.stopped:
            job.state = State.HANDED
            self._tell(
                job, StoppedAtOnce(job.key.request_id, job.transfer, stamps, job.cached_rows)
            )
            return
        if self._move(
            job, message.rows, Handoff(message.first_row, job.digests, stamps, job.cached_rows)
        ):
            job.state = State.HANDED
            return
        self._no_writer(job)
        self._end_request(job)
        self._await_release(job)

    def _writer_broke(self, job: Job, message: Any, now: int) -> None:
        """Parts are with a writer that will not take the rest."""
        self._no_writer(job)
        self._stop_engine(job)

    def _writer_died(self, job: Job, message: Any, now: int) -> None:
        job.owed = False
        self._writer_broke(job, message, now)

    def _ended_early(self, job: Job, message: SourceReleased, now: int) -> None:
        """kvproxy ended the transfer while chunks still compute: the rest is for nobody."""
        job.owed = False
        self._fail(job, Reason.TRANSFER_FAILED, "kvproxy ended the transfer")
        self._stop_engine(job)

    def _end_computing(self, job: Job, message: Any, now: int) -> None:
        self._drop(job)
        self._stop_engine(job)

    def _end_handed(self, job: Job, message: Any, now: int) -> None:
        self._drop(job)
        self._end_request(job)
        self._await_release(job)

    def _engine_failed(self, job: Job, message: engine.SeqFailed, now: int) -> None:
        self._fail(job, Reason.ENGINE_FAILED, message.detail)
        self._drop(job)
        self._end_request(job)
        job.state = State.STOPPING  # the engine's Stopped follows

    def _let_go(self, job: Job, message: Any, now: int) -> None:
        self._close_seq(job)
        self._await_release(job)

    def _chunk_after_stop(self, job: Job, message: engine.ChunkDone, now: int) -> None:
        """The last chunk crossed our Stop: it stands for the Stopped."""
        self._let_go(job, message, now)

    def _doubt(self, job: Job, message: Any, now: int) -> None:
        job.doubtful = True

    def _paid(self, job: Job, message: SourceReleased | None, now: int) -> None:
        """The writer's lifetime of the pages is over, and so is the engine's. None: it died."""
        job.owed = False
        if job.state is State.HANDED:
            if message is not None and message.landed:
                self._tell(job, Handed(job.key.request_id, job.transfer))
            elif job.doubtful:
                # If the last Move was lost, decode waits for KV that nobody will send: only lb
                # can know, and hears this as long as decode has not accepted.
                self._no_writer(job)
            self._end_request(job)
        self._free(job)

    def _paid_first(self, job: Job, message: Any, now: int) -> None:
        job.owed = False  # the engine still names the pages

    TABLE: ClassVar[dict[State, dict[Input, Callable[..., None]]]]
    """What an input does to a transfer in a state; below the class."""

    # --- what transitions are made of ---------------------------------------------

    def _keep(self, job: Job, message: engine.ChunkDone) -> None:
        """The chunk's whole pages can be matched from now on, with their digests."""
        job.digests += message.digests
        whole = job.digests[: message.rows // self.config.page_rows]
        keep_pages(self.pages, self.index, job.transfer, whole)

    def _move(self, job: Job, rows: int, handoff: Handoff | None) -> bool:
        """Lend rows [moved_rows, rows) to the writer; False when there is none to lend to."""
        first = job.moved_rows // self.config.page_rows
        pages = job.pages[first : self.pages_for(rows)]
        move = Move(job.transfer, job.moved_rows, rows - job.moved_rows, pages, handoff)
        if job.writer is None:
            job.writer = self._out.instance_of(Role.KVPROXY)
        if job.writer is None or not self._out.send(Role.KVPROXY, move, only=job.writer):
            return False
        job.moved_rows = rows
        job.owed = True
        return True

    def _drop(self, job: Job) -> None:
        # Without a stream to that writer the next Hello asks instead.
        if job.owed:
            self._out.send(Role.KVPROXY, Drop(job.transfer), only=job.writer)

    def _no_writer(self, job: Job) -> None:
        self._fail(job, Reason.WRITER_LOST, "the stream to kvproxy ended")

    def _stop_engine(self, job: Job) -> None:
        self._out.emit(ToEngineEffect(engine.Stop(job.seq)))
        self._end_request(job)
        job.state = State.STOPPING

    def _end_request(self, job: Job) -> None:
        """The request is over and its id may return; its pages may still be held."""
        del self.by_key[job.key]
        self.index.abandon(job.transfer)

    def _close_seq(self, job: Job) -> None:
        del self.by_seq[job.seq]
        self.index.abandon(job.transfer)

    def _await_release(self, job: Job) -> None:
        if job.owed:
            job.state = State.OWED
        else:
            self._free(job)

    def _free(self, job: Job) -> None:
        require(not job.owed and job.seq not in self.by_seq, "both lifetimes of a page are over")
        self.pages.release(job.transfer)
        del self.by_transfer[job.transfer]

    def _tell(self, job: Job, message: StoppedAtOnce | Handed | Failed) -> None:
        self._out.send(Role.LB, message, only=job.key.lb)

    def _fail(self, job: Job, reason: Reason, detail: str) -> None:
        self._out.emit(Log("failed", job.key.request_id, job.transfer, f"{reason}: {detail}"))
        self._tell(job, Failed(job.key.request_id, job.transfer, reason, detail))


Jobs.TABLE = {
    State.QUEUED: {
        Input.END: Jobs._unqueue,
        Input.CHUNK: Jobs._impossible,
        Input.LAST_CHUNK: Jobs._impossible,
        Input.ENGINE_FAILED: Jobs._impossible,
        Input.STOPPED: Jobs._impossible,
        Input.RELEASED: Jobs._impossible,  # no writer is owed to yet
        Input.WRITER_LOST: Jobs._impossible,
        Input.WRITER_DIED: Jobs._impossible,
    },
    State.COMPUTING: {
        Input.END: Jobs._end_computing,
        Input.CHUNK: Jobs._move_part,
        Input.LAST_CHUNK: Jobs._move_last,
        Input.ENGINE_FAILED: Jobs._engine_failed,
        Input.STOPPED: Jobs._impossible,
        Input.RELEASED: Jobs._ended_early,
        Input.WRITER_LOST: Jobs._writer_broke,
        Input.WRITER_DIED: Jobs._writer_died,
    },
    State.HANDED: {
        Input.END: Jobs._end_handed,
        Input.CHUNK: Jobs._impossible,
        Input.LAST_CHUNK: Jobs._impossible,
        Input.ENGINE_FAILED: Jobs._impossible,
        Input.STOPPED: Jobs._impossible,
        Input.RELEASED: Jobs._paid,
        Input.WRITER_LOST: Jobs._doubt,  # our next Hello asks for the pages
        Input.WRITER_DIED: Jobs._paid,
    },
    State.STOPPING: {
        Input.END: Jobs._ignore,
        Input.CHUNK: Jobs._ignore,  # crossed our Stop
        Input.LAST_CHUNK: Jobs._chunk_after_stop,
        Input.ENGINE_FAILED: Jobs._ignore,  # its Stopped follows
        Input.STOPPED: Jobs._let_go,
        Input.RELEASED: Jobs._paid_first,
        Input.WRITER_LOST: Jobs._ignore,
        Input.WRITER_DIED: Jobs._paid_first,
    },
    State.OWED: {
        Input.END: Jobs._ignore,
        Input.CHUNK: Jobs._impossible,
        Input.LAST_CHUNK: Jobs._impossible,
        Input.ENGINE_FAILED: Jobs._impossible,
        Input.STOPPED: Jobs._impossible,
        Input.RELEASED: Jobs._paid,
        Input.WRITER_LOST: Jobs._ignore,
        Input.WRITER_DIED: Jobs._paid,
    },
}
