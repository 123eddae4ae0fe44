"""Converters of `duplet.peer.v1`: what every peer stream shares."""

from __future__ import annotations

import dataclasses

from duplet.peer.v1 import peer_pb2 as pb
from duplet_core.errors import Reason
from duplet_core.ids import Role
from duplet_core.messages import Census, Credit, End, Failed, Hello, Sampling, StepCredit
from duplet_wire import checks
from duplet_wire.codec import Branch

_REASON_TO_PROTO = {reason: pb.Reason.Value(f"REASON_{reason.name}") for reason in Reason}
_REASON_FROM_PROTO = {number: reason for reason, number in _REASON_TO_PROTO.items()}
_ROLE_TO_PROTO = {role: pb.Role.Value(f"ROLE_{role.name}") for role in Role}
_ROLE_FROM_PROTO = {number: role for role, number in _ROLE_TO_PROTO.items()}


def encode_reason(reason: Reason | None) -> pb.Reason.ValueType:
    """None is the unspecified value."""
    return pb.REASON_UNSPECIFIED if reason is None else _REASON_TO_PROTO[reason]


def decode_optional_reason(field: str, number: int) -> Reason | None:
    """The unspecified value is None."""
    if number == pb.REASON_UNSPECIFIED:
        return None
    return decode_reason(field, number)


def decode_reason(field: str, number: int) -> Reason:
    """A reason that must be given."""
    reason = _REASON_FROM_PROTO.get(pb.Reason.ValueType(number))
    if reason is None:
        raise checks.refuse(field, f"{number} is no known reason")
    return reason


def encode_hello(hello: Hello) -> pb.Hello:
    return pb.Hello(
        role=_ROLE_TO_PROTO[hello.role],
        instance=hello.instance,
        version=hello.version,
        number=hello.number,
        to_instance=hello.to_instance,
        held=hello.held,
        spec=hello.spec,
        credit=None if hello.credit is None else encode_credit(hello.credit),
        refusing=encode_reason(hello.refusing),
        transport=hello.transport,
    )


def decode_hello(hello: pb.Hello) -> Hello:
    """Only the form is checked: core alone says what a Hello means."""
    role = _ROLE_FROM_PROTO.get(hello.role)
    if role is None:
        raise checks.refuse("hello.role", f"{hello.role} is no known role")
    to_instance = None
    if hello.HasField("to_instance"):
        to_instance = checks.instance_id("hello.to_instance", hello.to_instance)
    return Hello(
        role=role,
        instance=checks.instance_id("hello.instance", hello.instance),
        version=hello.version,
        number=hello.number,
        to_instance=to_instance,
        held=checks.transfer_ids("hello.held", hello.held),
        spec=hello.spec,
        refusing=decode_optional_reason("hello.refusing", hello.refusing),
        credit=decode_credit(hello.credit) if hello.HasField("credit") else None,
        transport=checks.label("hello.transport", hello.transport),
    )


def encode_credit(credit: Credit) -> pb.Credit:
    return pb.Credit(
        total_pages=credit.total_pages,
        free_pages=credit.free_pages,
        free_slots=credit.free_slots,
        admits_seen=credit.admits_seen,
        refusing=encode_reason(credit.refusing),
        census=pb.Census(**dataclasses.asdict(credit.census)),
        step=None if credit.step is None else pb.StepCredit(**dataclasses.asdict(credit.step)),
    )


def decode_credit(credit: pb.Credit) -> Credit:
    return Credit(
        total_pages=credit.total_pages,
        free_pages=credit.free_pages,
        free_slots=credit.free_slots,
        admits_seen=credit.admits_seen,
        refusing=decode_optional_reason("credit.refusing", credit.refusing),
        census=Census(
            granted_pages=credit.census.granted_pages,
            live_pages=credit.census.live_pages,
            quarantined_pages=credit.census.quarantined_pages,
            kv_checks=credit.census.kv_checks,
            kv_mismatches=credit.census.kv_mismatches,
            pending_aborts=credit.census.pending_aborts,
            aborts_resent=credit.census.aborts_resent,
            writers=credit.census.writers,
            transport=checks.label("credit.census.transport", credit.census.transport),
            damaged_pages=credit.census.damaged_pages,
            ends_withheld=credit.census.ends_withheld,
        ),
        step=_decode_step_credit(credit.step) if credit.HasField("step") else None,
    )


def _decode_step_credit(step: pb.StepCredit) -> StepCredit:
    return StepCredit(step.streams, step.free_ns, step.stream_ns, step.page_ns)


def encode_sampling(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_window=sampling.repetition_window,
    )


def decode_sampling(field: str, sampling: pb.Sampling) -> Sampling:
    """Sampling values in the ranges that the contract gives."""
    checks.within(f"{field}.seed", sampling.seed, 0, 2**63 - 1)
    checks.within(f"{field}.temperature", sampling.temperature, 0, 5)
    checks.within(f"{field}.top_p", sampling.top_p, 0, 1)
    if sampling.top_p == 0:
        raise checks.refuse(f"{field}.top_p", "0 leaves nothing to draw from")
    checks.positive(f"{field}.top_k", sampling.top_k)
    checks.within(f"{field}.repetition_window", sampling.repetition_window, 0, 128)
    return Sampling(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_window=sampling.repetition_window,
    )


def encode_end(end: End) -> pb.End:
    return pb.End(
        request_id=end.request_id, transfer=end.transfer, reason=encode_reason(end.reason)
    )


def decode_end(end: pb.End) -> End:
    return End(
        request_id=checks.request_id("end.request_id", end.request_id),
        transfer=checks.transfer_id("end.transfer", end.transfer),
        reason=decode_optional_reason("end.reason", end.reason),
    )


def encode_failed(failed: Failed) -> pb.Failed:
    return pb.Failed(
        request_id=failed.request_id,
        transfer=failed.transfer,
        reason=encode_reason(failed.reason),
        detail=failed.detail,
    )


def decode_failed(failed: pb.Failed) -> Failed:
    return Failed(
        request_id=checks.request_id("failed.request_id", failed.request_id),
        transfer=checks.transfer_id("failed.transfer", failed.transfer),
        reason=decode_reason("failed.reason", failed.reason),
        detail=failed.detail,
    )


HELLO = Branch("hello", Hello, encode_hello, decode_hello)
CREDIT = Branch("credit", Credit, encode_credit, decode_credit)
END = Branch("end", End, encode_end, decode_end)
FAILED = Branch("failed", Failed, encode_failed, decode_failed)
