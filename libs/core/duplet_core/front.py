"""lb's machine: the unit's front door. It admits, starts both sides, and ends at both sides.

A request's life here:

    QUEUED    waits, briefly, for decode's credit
    PENDING   Admit and Prefill are sent; nothing was sent to the client, so it can fail whole
    HANDED    the same, but the KV is in decode's pages: prefill is not needed any more
    STREAMING decode accepted the KV; rows flow

Admits are counted against the credit decode told (Credit.admits_seen says which of them the
figures already include). Prefill follows its Admit at once and in the same order: prefill
allocates and decode admits in arrival order, so no two requests can each hold what the other
waits for. Every end is told to both sides, also to the one that reported it; a part that is
lost fails its requests at once, and a client never waits for a proof (S7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from duplet_core.effects import (
    Admitted,
    Cancel,
    Count,
    Drained,
    Ended,
    Rows,
    SetHealth,
    SpecKnown,
    Submit,
)
from duplet_core.errors import Reason, RemoteProtocolError, require
from duplet_core.front_state import FULL, FrontConfig, Input, Request, State, name_spec
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.link import Link
from duplet_core.machine import Machine
from duplet_core.messages import (
    Accepted,
    Admit,
    Credit,
    End,
    Failed,
    Finished,
    Handed,
    Hello,
    Prefill,
    Refused,
    Refusing,
    StepRows,
    StoppedAtOnce,
)


class FrontMachine(Machine):
    """Runs in lb; owns every live request of the unit's clients."""

    ROLE = Role.LB
    _HANDLERS: ClassVar[dict[tuple[Role, type], str]] = {
        (Role.DECODE, Credit): "_take_credit",
        (Role.DECODE, Refused): "_take_transfer",
        (Role.DECODE, Failed): "_take_transfer",
        (Role.DECODE, Accepted): "_take_transfer",
        (Role.DECODE, Finished): "_take_transfer",
        (Role.DECODE, StepRows): "_take_step",
        (Role.PREFILL, Failed): "_take_prefill_failed",
        (Role.PREFILL, StoppedAtOnce): "_take_transfer",
        (Role.PREFILL, Handed): "_take_transfer",
        (Role.PREFILL, Refusing): "_take_refusing",
    }
    _INPUTS: ClassVar[dict[type, Input]] = {
        Refused: Input.REFUSED,
        Failed: Input.FAILED,
        Accepted: Input.ACCEPTED,
        Finished: Input.FINISHED,
        StoppedAtOnce: Input.STOPPED_AT_ONCE,
        Handed: Input.HANDED,
    }

    def __init__(self, instance: InstanceId, config: FrontConfig) -> None:
        super().__init__(
            instance,
            (
                Link(Role.PREFILL, instance, dials=True, needs_lifeline=False),
                Link(Role.DECODE, instance, dials=True, needs_lifeline=False),
            ),
        )
        self.config = config
        self.requests: dict[TransferId, Request] = {}
        self.credit: Credit | None = None
        self._live_ids: set[str] = set()
        self._by_stream: dict[int, Request] = {}
        self._queue: deque[Request] = deque()
        self._waited_in_vain = False
        """Somebody's wait ran out, and nobody was admitted since."""
        self._unseen: deque[int] = deque()
        """Pages of the Admits that the told credit does not include yet."""
        self._admits_sent = 0
        self._specs: dict[Role, str] = {}
        self._prefill_refusing: Reason | None = None
        self._ready = False
        self._drained_told = False

    @property
    def ready(self) -> bool:
        """Both peers are up and their specs are equal."""
        return self._ready

    @property
    def queued(self) -> int:
        """Requests that wait for credit."""
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Any request would be refused as overload now, whatever it holds."""
        able = self._ready and not self.draining and self._refusing() is None
        return able and self._must_leave(pages=1)

    @property
    def streaming(self) -> int:
        """Requests that decode has accepted."""
        return len(self._by_stream)

    def free_streams(self) -> int:
        """For people: how many more requests like those that are here decode would take."""
        credit = self.credit
        if credit is None:
            return 0
        step = credit.step
        if step is None or step.streams == 0:
            return credit.free_slots
        mean_pages = (credit.census.granted_pages + credit.census.live_pages) // step.streams
        one_ns = step.stream_ns + mean_pages * step.page_ns
        return min(credit.free_slots, step.free_ns // one_ns) if one_ns else credit.free_slots

    # --- clients ------------------------------------------------------------------

    def _on_other(self, event: Any, now: int) -> None:
        if isinstance(event, Submit):
            self._take_submit(event, now)
        elif isinstance(event, Cancel):
            request = self.requests.get(event.transfer)
            if request is not None:
                self._step(request, Input.CANCEL, event, now)
        else:
            super()._on_other(event, now)

    def _take_submit(self, submit: Submit, now: int) -> None:
        refusal = self._refusal(submit)
        if refusal is not None:
            self.emit(Ended(submit.transfer, *refusal))
            return
        request = Request(submit, now + self.config.queue_wait_ns)
        self.requests[submit.transfer] = request
        self._live_ids.add(submit.request_id)
        self._queue.append(request)

    def _refusal(self, submit: Submit) -> tuple[Reason, str] | None:
        if submit.request_id in self._live_ids or submit.transfer in self.requests:
            return Reason.DUPLICATE_REQUEST, f"request id {submit.request_id!r} is live"
        if self.draining:
            return Reason.DRAINING, "the unit takes nothing new"
        if not self._ready or self.credit is None:
            return Reason.NOT_READY, self._why_unready()
        if submit.pages > self.credit.total_pages:
            detail = f"{submit.pages} pages needed, decode's pool has {self.credit.total_pages}"
            return Reason.PROMPT_TOO_LONG, detail
        return (self._why_full(), FULL) if self._must_leave(submit.pages) else None

    def _must_leave(self, pages: int) -> bool:
        """It does not fit, and to wait is no use: nothing came free for those who did."""
        if not self._queue and self._fits(pages):
            return False
        return self._waited_in_vain or len(self._queue) >= self.config.queue_limit

    def _why_full(self) -> Reason:
        refusing = self._refusing()
        return Reason.OVERLOADED if refusing is None else refusing[1]

    # --- peers --------------------------------------------------------------------

    def _take_credit(self, credit: Credit, now: int) -> None:
        if credit.admits_seen > self._admits_sent:
            raise RemoteProtocolError("Credit: more admits seen than were sent")
        refusing = None if self.credit is None else self.credit.refusing
        self.credit = credit
        if credit.refusing != refusing:
            self._update_ready()
        while len(self._unseen) > self._admits_sent - credit.admits_seen:
            self._unseen.popleft()

    def _take_refusing(self, refusing: Refusing, now: int) -> None:
        self._prefill_refusing = refusing.reason
        self._update_ready()

    def _take_transfer(self, message: Any, now: int) -> None:
        request = self.requests.get(message.transfer)
        if request is not None and request.state is not State.QUEUED:
            # Else it ended meanwhile, and both sides were told; or no peer can know of it yet.
            self._step(request, self._INPUTS[type(message)], message, now)

    def _take_prefill_failed(self, failed: Failed, now: int) -> None:
        request = self.requests.get(failed.transfer)
        if request is not None and request.state is State.PENDING:
            # Once decode has the KV, it has all it needs.
            self._step(request, Input.FAILED, failed, now)

    def _take_step(self, step: StepRows, now: int) -> None:
        if not step.stream_ids:
            raise RemoteProtocolError("StepRows: no stream")
        row_bytes = len(step.rows) // len(step.stream_ids)
        for index, stream_id in enumerate(step.stream_ids):
            request = self._by_stream.get(stream_id)
            if request is not None:
                row = step.rows[index * row_bytes : (index + 1) * row_bytes]
                self._step(request, Input.ROWS, row, now)

    def _on_up(self, peer: Role, instance: InstanceId, hello: Hello, now: int) -> None:
        self._specs[peer] = hello.spec
        if peer is Role.PREFILL:
            self._prefill_refusing = hello.refusing
        if peer is Role.DECODE:
            self.credit = hello.credit
            self._admits_sent = 0
            self._unseen.clear()
        self._update_ready()

    def _on_lost(self, peer: Role, instance: InstanceId, now: int) -> None:
        del self._specs[peer]
        what = Input.PREFILL_LOST if peer is Role.PREFILL else Input.DECODE_LOST
        if peer is Role.DECODE:
            self.credit = None
        self._update_ready()
        for request in list(self.requests.values()):
            self._step(request, what, None, now)

    def _update_ready(self) -> None:
        ready = len(self._specs) == 2 and len(set(self._specs.values())) == 1
        if ready and not self._ready:
            self.emit(SpecKnown(self._specs[Role.DECODE]))
        self._ready = ready
        why = self._why_unready()
        self.emit(SetHealth("unit", not why, why))

    def _why_unready(self) -> str:
        """Empty while requests are welcome. Load is no reason: a full unit is ready."""
        missing = [str(r) for r in (Role.PREFILL, Role.DECODE) if r not in self._specs]
        if missing:
            return f"no stream to {' and '.join(missing)}"
        if not self._ready:
            prefill, decode = (name_spec(self._specs[r]) for r in (Role.PREFILL, Role.DECODE))
            return f"prefill and decode run different models: {prefill} and {decode}"
        refusing = self._refusing()
        return "" if refusing is None else f"{refusing[0]} takes nothing new: {refusing[1]}"

    def _refusing(self) -> tuple[Role, Reason] | None:
        """Which peer takes nothing new, and why."""
        if self.credit is not None and self.credit.refusing is not None:
            return Role.DECODE, self.credit.refusing
        if self._prefill_refusing is not None:
            return Role.PREFILL, self._prefill_refusing
        return None

    # --- transitions: one method each, named in the table below ----------------------

    def _ignore(self, request: Request, message: Any, now: int) -> None:
        """Decided: changes nothing."""

    def _impossible(self, request: Request, message: Any, now: int) -> None:
        require(False, f"{type(message).__name__} for a request that is {request.state}")

    def _cancel(self, request: Request, message: Cancel, now: int) -> None:
        self._end(request, message.reason, "")

    def _expire(self, request: Request, message: Any, now: int) -> None:
        self._end(request, Reason.DEADLINE, "the request's deadline passed")

    def _fail(self, request: Request, message: Refused | Failed, now: int) -> None:
        self._end(request, message.reason, message.detail)

    def _stopped_at_once(self, request: Request, message: StoppedAtOnce, now: int) -> None:
        key = (message.request_id, message.transfer)
        finished = Finished(*key, True, 0, 0, message.stamps, message.cached_rows)
        self._end(request, None, "", finished)

    def _hand(self, request: Request, message: Handed, now: int) -> None:
        request.state = State.HANDED

    def _accept(self, request: Request, message: Accepted, now: int) -> None:
        if message.stream_id in self._by_stream:
            raise RemoteProtocolError(f"Accepted: stream {message.stream_id} is in use")
        request.state = State.STREAMING
        request.stream_id = message.stream_id
        self._by_stream[message.stream_id] = request
        self.emit(Rows(request.submit.transfer, message.first_row))

    def _deliver(self, request: Request, row: bytes, now: int) -> None:
        self.emit(Rows(request.submit.transfer, row))

    def _finish(self, request: Request, message: Finished, now: int) -> None:
        self._end(request, None, "", message)

    def _prefill_lost(self, request: Request, message: Any, now: int) -> None:
        self._end(request, Reason.PREFILL_LOST, "the stream to prefill ended")

    def _decode_lost(self, request: Request, message: Any, now: int) -> None:
        self._end(request, Reason.DECODE_LOST, "the stream to decode ended")

    TABLE: ClassVar[dict[State, dict[Input, Callable[..., None]]]]
    """What an input does to a request in a state; below the class."""

    def _step(self, request: Request, what: Input, message: Any, now: int) -> None:
        self.TABLE[request.state][what](self, request, message, now)

    # --- what transitions are made of ---------------------------------------------

    def _end(
        self, request: Request, reason: Reason | None, detail: str, finished: Finished | None = None
    ) -> None:
        """Over: the client hears at once, and both sides, also the one that reported it."""
        submit = request.submit
        del self.requests[submit.transfer]
        self._live_ids.remove(submit.request_id)
        self.emit(Ended(submit.transfer, reason, detail, finished))
        if request.state is State.QUEUED:
            self._queue.remove(request)
            return
        if request.stream_id is not None:
            del self._by_stream[request.stream_id]
        end = End(submit.request_id, submit.transfer, reason)
        self.send(Role.PREFILL, end)
        self.send(Role.DECODE, end)

    def _admit(self, request: Request) -> None:
        submit = request.submit
        request.state = State.PENDING
        self._waited_in_vain = False
        self._admits_sent += 1
        self._unseen.append(submit.pages)
        key = (submit.request_id, submit.transfer)
        self.send(
            Role.DECODE,
            Admit(*key, submit.prompt_rows, submit.max_rows, submit.sampling, submit.trace),
        )
        prompt = (submit.prompt, submit.prompt_rows)
        self.send(Role.PREFILL, Prefill(*key, *prompt, submit.sampling, submit.voice, submit.trace))
        self.emit(Admitted(submit.transfer))

    def _fits(self, pages: int) -> bool:
        credit = self.credit
        if credit is None or self._refusing() is not None or not self._ready:
            return False
        slots = credit.free_slots - len(self._unseen)
        if slots < 1 or credit.free_pages - sum(self._unseen) < pages:
            return False
        step = credit.step
        if step is None or step.streams + len(self._unseen) == 0:
            return True
        added = (len(self._unseen) + 1) * step.stream_ns
        return added + (sum(self._unseen) + pages) * step.page_ns <= step.free_ns

    # --- admission and timers -------------------------------------------------------

    def _settle(self, now: int) -> None:
        self._admit_what_fits()
        if self.draining and not self._drained_told and not self.requests:
            self._drained_told = True
            self.emit(Drained())

    def _admit_what_fits(self) -> None:
        """In order of arrival: nobody overtakes whom the credit is too small for."""
        while self._queue and self._fits(self._queue[0].submit.pages):
            self._admit(self._queue.popleft())

    def next_timer(self) -> int | None:
        due = [r.submit.deadline_ns for r in self.requests.values()]
        due += [r.queued_until_ns for r in self._queue]
        return min(due, default=None)

    def _on_timer(self, now: int) -> None:
        for request in list(self.requests.values()):
            if request.submit.deadline_ns <= now:
                self._step(request, Input.DEADLINE, None, now)
        for request in list(self._queue):
            if request.state is State.QUEUED and request.queued_until_ns <= now:
                self.emit(Count("requests_overloaded"))
                self._waited_in_vain = self._refusing() is None
                self._end(request, self._why_full(), "no stream slot or pages came free in time")
                self._admit_what_fits()  # it may have been all that those behind it waited for


FrontMachine.TABLE = {
    State.QUEUED: {
        Input.CANCEL: FrontMachine._cancel,
        Input.DEADLINE: FrontMachine._expire,
        # No peer was told of it.
        Input.REFUSED: FrontMachine._impossible,
        Input.FAILED: FrontMachine._impossible,
        Input.STOPPED_AT_ONCE: FrontMachine._impossible,
        Input.HANDED: FrontMachine._impossible,
        Input.ACCEPTED: FrontMachine._impossible,
        Input.ROWS: FrontMachine._impossible,
        Input.FINISHED: FrontMachine._impossible,
        Input.PREFILL_LOST: FrontMachine._prefill_lost,
        Input.DECODE_LOST: FrontMachine._decode_lost,
    },
    State.PENDING: {
        Input.CANCEL: FrontMachine._cancel,
        Input.DEADLINE: FrontMachine._expire,
        Input.REFUSED: FrontMachine._fail,
        Input.FAILED: FrontMachine._fail,
        Input.STOPPED_AT_ONCE: FrontMachine._stopped_at_once,
        Input.HANDED: FrontMachine._hand,
        Input.ACCEPTED: FrontMachine._accept,
        Input.ROWS: FrontMachine._ignore,
        Input.FINISHED: FrontMachine._ignore,
        Input.PREFILL_LOST: FrontMachine._prefill_lost,
        Input.DECODE_LOST: FrontMachine._decode_lost,
    },
    State.HANDED: {
        Input.CANCEL: FrontMachine._cancel,
        Input.DEADLINE: FrontMachine._expire,
        Input.REFUSED: FrontMachine._fail,
        Input.FAILED: FrontMachine._fail,
        Input.STOPPED_AT_ONCE: FrontMachine._ignore,
        Input.HANDED: FrontMachine._ignore,
        Input.ACCEPTED: FrontMachine._accept,
        Input.ROWS: FrontMachine._ignore,
        Input.FINISHED: FrontMachine._ignore,
        Input.PREFILL_LOST: FrontMachine._ignore,  # decode has all it needs
        Input.DECODE_LOST: FrontMachine._decode_lost,
    },
    State.STREAMING: {
        Input.CANCEL: FrontMachine._cancel,
        Input.DEADLINE: FrontMachine._expire,
        Input.REFUSED: FrontMachine._ignore,
        Input.FAILED: FrontMachine._fail,
        Input.STOPPED_AT_ONCE: FrontMachine._ignore,
        Input.HANDED: FrontMachine._ignore,  # decode was faster
        Input.ACCEPTED: FrontMachine._ignore,
        Input.ROWS: FrontMachine._deliver,
        Input.FINISHED: FrontMachine._finish,
        Input.PREFILL_LOST: FrontMachine._ignore,  # decode has all it needs
        Input.DECODE_LOST: FrontMachine._decode_lost,
    },
}
