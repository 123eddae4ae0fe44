"""The host's requests: computed and continued in the same pages, by one engine.

A host is prefill and decode in one process over one pool. lb speaks to it as to the two, on
two streams, so a request arrives as two halves, in either order: its Admit on decode's
stream, its Prefill on prefill's. Its states:

    ANNOUNCED  one half is here; with the Admit its pages are reserved
    WAITING    both are here; another request computes pages that this one will share
    COMPUTING  the engine computes the prompt, in chunks
    RUNNING    the engine generates rows, in the same pages: the hand-over is a new seq
    STOPPING   the request is over, the engine has not yet let go of the pages

Reserving is counting. An Admit takes as many pages as prompt and longest output need out of
what is left; which pages they are is settled when the engine starts, for only then is it
known which of them are shared. Pages in use never exceed what is reserved, so the pages
that a start needs are free or merely cached, and nothing waits for a page.

The pages have one lifetime, the engine's: nobody else reads or writes them. They are free
after `Stopped`, or after the last ChunkDone where nothing follows it (S1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from duplet_core import engine
from duplet_core.effects import Count, Log, ToEngineEffect
from duplet_core.errors import Reason, require
from duplet_core.host_state import ENGINE_INPUTS, HostConfig, Input, State, Stay
from duplet_core.ids import RequestKey, Role, TransferId
from duplet_core.machine import Outlet
from duplet_core.messages import Accepted, Admit, Failed, Finished, Prefill, StoppedAtOnce
from duplet_core.prefix import Match, PrefixIndex, hold_pages, keep_pages
from duplet_core.sources import SourcePages


class Stays:
    """Owner of the pool's pages and of every request that holds or awaits some."""

    def __init__(self, config: HostConfig, out: Outlet, index: PrefixIndex) -> None:
        self.config = config
        self.pages = SourcePages(config.pages)
        self.index = index
        self.reserved = 0
        """Pages that are spoken for: no more than the pool has."""
        self.by_transfer: dict[TransferId, Stay] = {}
        self.by_key: dict[RequestKey, Stay] = {}
        """Requests that are not over; their ids are taken."""
        self.by_seq: dict[int, Stay] = {}
        """Requests whose pages the engine may name."""
        self._out = out
        self._next_seq = 1

    def announce(self, key: RequestKey, half: Admit | Prefill, now: int) -> None:
        """Enter a checked half of a request; its stay begins with the first."""
        stay = self.by_transfer.get(half.transfer)
        if stay is None:
            stay = Stay(key, half.transfer)
            self.by_transfer[stay.transfer] = self.by_key[key] = stay
        self.step(stay, Input.ADMIT if isinstance(half, Admit) else Input.PREFILL, half, now)

    def start_waiting(self, now: int) -> None:
        """Start what waits and has nothing to wait for, in the order of arrival."""
        for stay in [s for s in self.by_key.values() if s.state is State.WAITING]:
            assert stay.prefill is not None
            most = (stay.prefill.prompt_rows - 1) // self.config.page_rows
            match = self.index.match(stay.prefill.prompt, most)
            if not match.pending:
                self.step(stay, Input.START, match, now)

    def step(self, stay: Stay, what: Input, message: Any, now: int) -> None:
        """Apply one input to one request, by the table."""
        self.TABLE[stay.state][what](self, stay, message, now)

    def step_seq(self, seq: int, what: Input, message: Any, now: int) -> None:
        """The same for the engine's word on a sequence."""
        stay = self.by_seq.get(seq)
        require(stay is not None, "the engine speaks of open sequences only")
        assert stay is not None
        self.step(stay, what, message, now)

    def admitted(self) -> int:
        """Requests that hold a slot: from their Admit until the engine let go."""
        return sum(1 for s in self.by_transfer.values() if s.reserved)

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.config.page_rows)

    # --- transitions: one method each, named in the table below ----------------------

    def _ignore(self, stay: Stay, message: Any, now: int) -> None:
        """Decided: changes nothing."""

    def _impossible(self, stay: Stay, message: Any, now: int) -> None:
        require(False, f"{type(message).__name__} for a request that is {stay.state}")

    def _admit(self, stay: Stay, message: Admit, now: int) -> None:
        stay.admit = message
        stay.report.admitted_ns = now
        stay.reserved = self.pages_for(message.prompt_rows + message.max_rows)
        self.reserved += stay.reserved
        require(self.reserved <= self.config.pages, "no more is reserved than there is")
        self._await_start(stay)

    def _take_prompt(self, stay: Stay, message: Prefill, now: int) -> None:
        stay.prefill = message
        stay.received_ns = now
        self._await_start(stay)

    def _start(self, stay: Stay, match: Match, now: int) -> None:
        prefill = stay.prefill
        assert prefill is not None
        shared = len(match.pages)
        fresh = stay.reserved - shared
        pages = hold_pages(self.pages, self.index, stay.transfer, fresh, match)
        require(pages is not None, "what is reserved can be had")
        assert pages is not None
        whole = prefill.prompt_rows // self.config.page_rows
        self.index.begin(stay.transfer, prefill.prompt, pages[:whole])
        stay.pages = pages
        stay.report.cached_rows = shared * self.config.page_rows
        stay.state = State.COMPUTING
        stay.handed_ns = now
        self._open_seq(stay, prefill.prompt, stay.report.cached_rows, 0)
        self._out.emit(Count("prompt_rows", prefill.prompt_rows))
        self._out.emit(Count("cached_rows", stay.report.cached_rows))
        stay.prefill = None

    def _part(self, stay: Stay, message: engine.ChunkDone, now: int) -> None:
        # Nothing is moved, so nothing is checked: the index needs to know only how far it is.
        digests = (b"",) * (message.rows // self.config.page_rows)
        keep_pages(self.pages, self.index, stay.transfer, digests)

    def _hand_over(self, stay: Stay, message: engine.ChunkDone, now: int) -> None:
        """The prompt's sequence has ended with this chunk; the stream's begins in its pages."""
        assert message.first_row is not None
        self._part(stay, message, now)
        self._close_seq(stay)
        times = (
            *(stay.received_ns, stay.handed_ns, message.started_ns),
            *(message.computed_ns, message.drawn_ns, message.done_ns),
        )
        name = (stay.key.request_id, stay.transfer)
        if message.stopped:
            stopped = StoppedAtOnce(*name, times, stay.report.cached_rows)
            self._out.send(Role.PREFILL, stopped, only=stay.key.lb)
            self._end_request(stay)
            self._forget(stay)
            return
        assert stay.admit is not None
        # Moved as soon as it was computed; landed and checked with this message.
        moved_ns = message.done_ns
        stay.report.stamps = (*times, moved_ns, moved_ns, moved_ns, now, now)
        stay.report.output_rows = 1
        stay.state = State.RUNNING
        self._open_seq(stay, message.first_row, stay.admit.prompt_rows, stay.admit.max_rows)
        self._tell(stay, Accepted(*name, stay.seq, message.first_row))

    def _finish(self, stay: Stay, message: tuple[bool, engine.StepDone], now: int) -> None:
        stop, done = message
        name = (stay.key.request_id, stay.transfer)
        self._tell(stay, stay.report.finished(*name, stop, done.done_ns))
        self._end_request(stay)
        stay.state = State.STOPPING

    def _withdraw(self, stay: Stay, message: Any, now: int) -> None:
        self._end_request(stay)
        self._forget(stay)

    def _stop(self, stay: Stay, message: Any, now: int) -> None:
        self._out.emit(ToEngineEffect(engine.Stop(stay.seq)))
        self._end_request(stay)
        stay.state = State.STOPPING

    def _engine_failed(self, stay: Stay, message: engine.SeqFailed, now: int) -> None:
        name = (stay.key.request_id, stay.transfer)
        self._out.emit(Log("failed", *name, f"{Reason.ENGINE_FAILED}: {message.detail}"))
        self._tell(stay, Failed(*name, Reason.ENGINE_FAILED, message.detail))
        self._end_request(stay)
        stay.state = State.STOPPING  # the engine's Stopped follows

    def _let_go(self, stay: Stay, message: Any, now: int) -> None:
        self._close_seq(stay)
        self._forget(stay)

    TABLE: ClassVar[dict[State, dict[Input, Callable[..., None]]]]
    """What an input does to a request in a state; below the class."""

    # --- what transitions are made of ---------------------------------------------

    def _await_start(self, stay: Stay) -> None:
        if stay.admit is not None and stay.prefill is not None:
            stay.state = State.WAITING

    def _open_seq(self, stay: Stay, rows: bytes, start_row: int, max_rows: int) -> None:
        """A sequence over the request's pages; without output rows it is a prompt's."""
        assert stay.admit is not None
        stay.seq = self._next_seq
        self._next_seq += 1
        self.by_seq[stay.seq] = stay
        start = engine.Start(stay.seq, stay.pages, rows, start_row, max_rows, stay.admit.sampling)
        self._out.emit(ToEngineEffect(start))

    def _close_seq(self, stay: Stay) -> None:
        del self.by_seq[stay.seq]
        self.index.abandon(stay.transfer)

    def _end_request(self, stay: Stay) -> None:
        """The request is over and its id may return; its pages may still be held."""
        del self.by_key[stay.key]
        self.index.abandon(stay.transfer)

    def _forget(self, stay: Stay) -> None:
        if stay.pages:
            require(stay.seq not in self.by_seq, "the engine names none of the pages")
            self.pages.release(stay.transfer)
        self.reserved -= stay.reserved
        del self.by_transfer[stay.transfer]

    def _tell(self, stay: Stay, message: Accepted | Finished | Failed) -> None:
        self._out.send(Role.DECODE, message, only=stay.key.lb)


Stays.TABLE = {
    State.ANNOUNCED: {
        Input.ADMIT: Stays._admit,
        Input.PREFILL: Stays._take_prompt,
        Input.START: Stays._impossible,
        Input.END: Stays._withdraw,
        Input.PREFILL_LOST: Stays._withdraw,
        **dict.fromkeys(ENGINE_INPUTS, Stays._impossible),
    },
    State.WAITING: {
        Input.ADMIT: Stays._impossible,
        Input.PREFILL: Stays._impossible,
        Input.START: Stays._start,
        Input.END: Stays._withdraw,
        Input.PREFILL_LOST: Stays._withdraw,
        **dict.fromkeys(ENGINE_INPUTS, Stays._impossible),
    },
    State.COMPUTING: {
        Input.ADMIT: Stays._impossible,
        Input.PREFILL: Stays._impossible,
        Input.START: Stays._impossible,
        Input.END: Stays._stop,
        Input.PREFILL_LOST: Stays._stop,
        Input.CHUNK: Stays._part,
        Input.LAST_CHUNK: Stays._hand_over,
        Input.ENGINE_END: Stays._impossible,
        Input.ENGINE_FAILED: Stays._engine_failed,
        Input.STOPPED: Stays._impossible,
    },
    State.RUNNING: {
        Input.ADMIT: Stays._impossible,
        Input.PREFILL: Stays._impossible,
        Input.START: Stays._impossible,
        Input.END: Stays._stop,
        Input.PREFILL_LOST: Stays._ignore,  # decode's half has all it needs
        Input.CHUNK: Stays._impossible,
        Input.LAST_CHUNK: Stays._impossible,
        Input.ENGINE_END: Stays._finish,
        Input.ENGINE_FAILED: Stays._engine_failed,
        Input.STOPPED: Stays._impossible,
    },
    State.STOPPING: {
        Input.ADMIT: Stays._impossible,
        Input.PREFILL: Stays._impossible,
        Input.START: Stays._impossible,
        Input.END: Stays._ignore,
        Input.PREFILL_LOST: Stays._ignore,
        Input.CHUNK: Stays._ignore,  # crossed our Stop
        Input.LAST_CHUNK: Stays._let_go,  # crossed our Stop, and stands for the Stopped
        Input.ENGINE_END: Stays._ignore,  # crossed our Stop
        Input.ENGINE_FAILED: Stays._ignore,  # its Stopped follows
        Input.STOPPED: Stays._let_go,
    },
}
