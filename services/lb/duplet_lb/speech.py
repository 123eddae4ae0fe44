"""The public Speech service: checks a request in C, submits it, streams its rows."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc.aio

from duplet.speech.v1 import speech_pb2, speech_pb2_grpc
from duplet_core.effects import Admitted, Cancel, Drain, Effect, Ended, Rows, SpecKnown, Submit
from duplet_core.errors import DupletError, InvalidInput, Reason, Unavailable
from duplet_core.front import FrontMachine
from duplet_core.ids import PROTOCOL_VERSION, Role, TransferId
from duplet_core.messages import Finished
from duplet_core.playback import ROWS_PER_SECOND
from duplet_lb.call import Call, Wish
from duplet_lb.meter import Meters, StreamMeter
from duplet_lb.settings import LbSettings
from duplet_lb.times import CallTimes, time_points
from duplet_pages.prompt import check_prompt, check_sampling
from duplet_pages.spec import ModelSpec
from duplet_runtime.executor import ADMISSION, Executor
from duplet_runtime.service import OPEN, Service
from duplet_wire.speech import check_request

if TYPE_CHECKING:
    from duplet_lb.tracing import Tracing

VERSION = "0.1.0"
MOST_TRACE_CHARS = 64

_CLIENT_FAULTS = (Reason.PROMPT_TOO_LONG, Reason.DUPLICATE_REQUEST)


class LbExecutor(Executor):
    """Adds the effects towards clients. Owns the calls, keyed by transfer."""

    def __init__(self, service: Service[LbSettings], machine: FrontMachine) -> None:
        super().__init__(service, machine)
        self.machine = machine
        self.calls: dict[TransferId, Call] = {}
        self.spec: ModelSpec | None = None
        self.outcomes: Counter[str] = Counter()
        self.tracing: Tracing | None = None
        """Where an endpoint is set."""
        requests = machine.requests
        self.metrics.gauge("requests", "Requests that have not ended", lambda: len(requests))
        self.metrics.gauge("queued", "Requests that wait for credit", lambda: machine.queued)
        self.metrics.gauge("streams", "Requests with rows", lambda: machine.streaming)
        self.meters = Meters(self.metrics)
        self.admission = self.metrics.histogram("admission_seconds", ADMISSION)

    def execute_own(self, effect: Effect) -> None:
        if isinstance(effect, Rows):
            call = self.calls[effect.transfer]
            self.meters.note_row(call.meter, call.times, time.monotonic_ns())
            if not call.add_rows(effect.rows):
                self.feed(Cancel(effect.transfer, Reason.SLOW_READER))
        elif isinstance(effect, Admitted):
            self.calls[effect.transfer].admit(time.monotonic_ns())
        elif isinstance(effect, Ended):
            self.count_end(_outcome(effect))
            self.calls.pop(effect.transfer).end(effect)
        elif isinstance(effect, SpecKnown):
            self.spec = ModelSpec.from_json(effect.spec)
            self.meters.rows_per_second = self.spec.rows_per_second or ROWS_PER_SECOND
        else:
            super().execute_own(effect)

    def stop_admitting(self) -> None:
        """Refuse what comes from now on; what runs goes on. Idempotent."""
        self.service.health.set(OPEN, False, "drained by request")
        self.feed(Drain())

    def count_end(self, outcome: str) -> None:
        """A request ended, or was refused at the door."""
        self.outcomes[outcome] += 1
        self.meters.note_end(outcome)


class Speech(speech_pb2_grpc.SpeechServicer):
    """One servicer for all clients; a handler owns its call from Submit to Ended."""

    def __init__(self, executor: LbExecutor, service: Service[LbSettings]) -> None:
        self._executor = executor
        self._service = service

    # The stubs know generators only; grpc.aio also takes coroutines that write.
    async def Generate(  # type: ignore[override]
        self, request: speech_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        times = CallTimes(time.monotonic_ns())
        try:
            submit, call = self._prepare(request, context, times)
        except DupletError as error:
            self._executor.count_end(error.reason)
            times.finished_ns = time.monotonic_ns()
            error.points_ns = times.points()
            raise
        self._executor.calls[call.transfer] = call
        try:
            self._executor.feed(submit)
            await self._stream(submit, call, context)
        finally:
            if call.ended is None:  # the client left, or the service stops
                self._executor.feed(Cancel(call.transfer, Reason.CANCELLED))
            self._note_end(submit, call)

    def _note_end(self, submit: Submit, call: Call) -> None:
        """Metrics, and one line a request; the other services log only what goes wrong with it."""
        ended = call.ended
        if ended is None:
            return  # lb's machine has failed, which ends the service
        finished = ended.finished
        call.times.finished_ns = call.times.finished_ns or time.monotonic_ns()
        meters = self._executor.meters
        meters.note_timeline(call.times, finished)
        if call.meter.rows:
            meters.note_stream(call.meter)
        if self._executor.tracing is not None:
            self._executor.tracing.emit(submit, call.times, finished, _outcome(ended))
        self._service.log.info(
            "request ended",
            request_id=submit.request_id,
            transfer=submit.transfer,
            voice=submit.voice,
            outcome=_outcome(ended),
            prompt_rows=submit.prompt_rows,
            output_rows=finished.output_rows if finished is not None else call.sent_rows,
            detail=ended.detail,
        )

    def _prepare(
        self,
        request: speech_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        times: CallTimes,
    ) -> tuple[Submit, Call]:
        """Check everything before anything is spent on the request."""
        spec = self._executor.spec
        if spec is None:
            raise Unavailable(Reason.NOT_READY, self._service.health.detail("unit"))
        check_request(request)
        rows = check_prompt(request.prompt, request.columns, spec)
        wanted = request.sampling
        seed = wanted.seed if wanted.HasField("seed") else secrets.randbits(63)
        sampling = check_sampling(
            defaults=spec.sampling,
            seed=seed,
            temperature=wanted.temperature if wanted.HasField("temperature") else None,
            top_p=wanted.top_p if wanted.HasField("top_p") else None,
            top_k=wanted.top_k if wanted.HasField("top_k") else None,
            repetition_window=(
                wanted.repetition_window if wanted.HasField("repetition_window") else None
            ),
        )
        settings = self._service.settings
        max_rows = request.max_rows if request.HasField("max_rows") else spec.default_max_rows
        max_rows = min(max_rows, spec.longest_sequence - rows)
        limit_s = _time_left_s(context, settings.longest_s)
        submit = Submit(
            request_id=request.request_id or secrets.token_hex(16),
            transfer=TransferId(secrets.token_hex(16)),
            prompt=request.prompt,
            prompt_rows=rows,
            max_rows=max_rows,
            pages=spec.pages_for(rows + max_rows),
            sampling=sampling,
            deadline_ns=time.monotonic_ns() + round(limit_s * 1e9),
            voice=request.voice,
            trace=_traceparent(context),
        )
        # More than all rows is all rows.
        wish = Wish(
            min(request.first_rows, max_rows) if request.HasField("first_rows") else 1,
            min(request.rows_per_message, max_rows) if request.HasField("rows_per_message") else 1,
        )
        limits = (4 * spec.columns, wish, settings.unread_rows, submit.deadline_ns)
        times.checked_ns = time.monotonic_ns()
        return submit, Call(submit.transfer, *limits, times, StreamMeter(self._executor.meters))

    async def _stream(
        self,
        submit: Submit,
        call: Call,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        times = call.times
        while True:
            await call.wait()
            if call.ended is not None and call.failed:
                raise _error(call)
            if times.admitted_ns and not call.started:
                call.started = True
                waited_s = (times.admitted_ns - times.received_ns) / 1e9
                self._executor.admission.observe(waited_s)
                started = speech_pb2.Started(
                    request_id=submit.request_id,
                    seed=submit.sampling.seed,
                    timeline=time_points(times.points()),
                )
                # By itself: with a first message that is stuck, no status could follow it.
                await context.send_initial_metadata(())
                await call.write(context, speech_pb2.GenerateResponse(started=started))
            elif (taken := call.take_rows()) is not None:
                rows = speech_pb2.Rows(first_index=taken[0], rows=taken[1])
                await call.write(context, speech_pb2.GenerateResponse(rows=rows))
            elif call.ended is not None:
                finished = _finished(submit, call)
                await call.write(context, speech_pb2.GenerateResponse(finished=finished))
                return

    async def GetUnit(
        self, request: speech_pb2.GetUnitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> speech_pb2.GetUnitResponse:
        executor = self._executor
        machine = executor.machine
        response = speech_pb2.GetUnitResponse(
            model_spec=executor.spec.to_json() if executor.spec and machine.ready else "",
            services=[self._service_info(role) for role in (Role.LB, Role.PREFILL, Role.DECODE)],
            conditions=[
                speech_pb2.Condition(name=name, ok=ok, detail=detail)
                for name, (ok, detail) in self._service.health.details().items()
            ],
            live_streams=len(machine.requests),
        )
        response.totals.requests.update(executor.outcomes)
        if machine.credit is not None:
            credit = machine.credit
            response.credit.total_pages = credit.total_pages
            response.credit.free_pages = credit.free_pages
            response.credit.free_slots = machine.free_streams()
            response.credit.refusing = credit.refusing or ""
            census = credit.census
            response.totals.kv_checks = census.kv_checks
            response.totals.kv_mismatches = census.kv_mismatches
            response.totals.pending_aborts = census.pending_aborts
            response.totals.aborts_resent = census.aborts_resent
            response.totals.writers = census.writers
            response.totals.damaged_pages = census.damaged_pages
            response.totals.ends_withheld = census.ends_withheld
            response.transport = census.transport
            response.totals.pages["free"] = credit.free_pages
            response.totals.pages["granted"] = census.granted_pages
            response.totals.pages["live"] = census.live_pages
            response.totals.pages["quarantined"] = census.quarantined_pages
        return response

    def _service_info(self, role: Role) -> speech_pb2.ServiceInfo:
        own = role is Role.LB
        instance = self._service.instance if own else self._executor.machine.instance_of(role)
        return speech_pb2.ServiceInfo(
            name=role,
            instance=instance or "",
            version=VERSION if own else "",
            protocol_version=PROTOCOL_VERSION if instance else 0,
            connected=instance is not None,
        )

    async def Drain(
        self, request: speech_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> speech_pb2.DrainResponse:
        self._executor.stop_admitting()
        return speech_pb2.DrainResponse(live_streams=len(self._executor.machine.requests))


def _finished(submit: Submit, call: Call) -> speech_pb2.Finished:
    """The client's last message."""
    assert call.ended is not None and call.ended.finished is not None
    finished: Finished = call.ended.finished
    call.times.finished_ns = time.monotonic_ns()
    reason = speech_pb2.FINISH_REASON_STOP if finished.stop else speech_pb2.FINISH_REASON_LENGTH
    return speech_pb2.Finished(
        reason=reason,
        usage=speech_pb2.Usage(
            prompt_rows=submit.prompt_rows,
            cached_rows=finished.cached_rows,
            output_rows=finished.output_rows,
            kv_checks=finished.kv_checks,
        ),
        timeline=time_points(call.times.points(finished)),
        step_gaps_ns=finished.step_gaps_ns,
    )


def _outcome(ended: Ended) -> str:
    """`STOP`, `LENGTH`, or the reason of a failure."""
    if ended.finished is None:
        return str(ended.reason)
    return "STOP" if ended.finished.stop else "LENGTH"


def _error(call: Call) -> DupletError:
    ended = call.ended
    assert ended is not None and ended.reason is not None
    kind = InvalidInput if ended.reason in _CLIENT_FAULTS else Unavailable
    error = kind(ended.reason, ended.detail or f"the request ended: {ended.reason}")
    call.times.finished_ns = time.monotonic_ns()
    error.points_ns = call.times.points()
    return error


def _time_left_s(context: grpc.aio.ServicerContext[Any, Any], longest_s: float) -> float:
    """Seconds that the request has: the client's deadline, but at most `longest_s`.

    Raises:
        Unavailable: DEADLINE; none are left.
    """
    left_s = context.time_remaining()
    if left_s is None:
        return longest_s
    if left_s <= 0:
        raise Unavailable(Reason.DEADLINE, "the call's deadline passed before it arrived")
    return min(left_s, longest_s)


def _traceparent(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """W3C trace context of the call, carried to the other services; empty where there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return value[:MOST_TRACE_CHARS]
    return ""
