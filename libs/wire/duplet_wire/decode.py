"""Converters and codecs of `duplet.decode.v1`: the stream between lb and decode."""

from __future__ import annotations

from duplet.decode.v1 import decode_pb2 as pb
from duplet_core.messages import Accepted, Admit, Finished, Refused, StepRows
from duplet_wire import checks, peer
from duplet_wire.codec import Branch, make_codec


def encode_admit(admit: Admit) -> pb.Admit:
    return pb.Admit(
        request_id=admit.request_id,
        transfer=admit.transfer,
        prompt_rows=admit.prompt_rows,
        max_rows=admit.max_rows,
        sampling=peer.encode_sampling(admit.sampling),
        trace=admit.trace,
    )


def decode_admit(admit: pb.Admit) -> Admit:
    return Admit(
        request_id=checks.request_id("admit.request_id", admit.request_id),
        transfer=checks.transfer_id("admit.transfer", admit.transfer),
        prompt_rows=checks.positive("admit.prompt_rows", admit.prompt_rows),
        max_rows=checks.positive("admit.max_rows", admit.max_rows),
        sampling=peer.decode_sampling("admit.sampling", admit.sampling),
        trace=checks.label("admit.trace", admit.trace),
    )


def encode_refused(refused: Refused) -> pb.Refused:
    return pb.Refused(
        request_id=refused.request_id,
        transfer=refused.transfer,
        reason=peer.encode_reason(refused.reason),
        detail=refused.detail,
    )


def decode_refused(refused: pb.Refused) -> Refused:
    return Refused(
        request_id=checks.request_id("refused.request_id", refused.request_id),
        transfer=checks.transfer_id("refused.transfer", refused.transfer),
        reason=peer.decode_reason("refused.reason", refused.reason),
        detail=refused.detail,
    )


def encode_accepted(accepted: Accepted) -> pb.Accepted:
    return pb.Accepted(
        request_id=accepted.request_id,
        transfer=accepted.transfer,
        stream_id=accepted.stream_id,
        first_row=accepted.first_row,
    )


def decode_accepted(accepted: pb.Accepted) -> Accepted:
    return Accepted(
        request_id=checks.request_id("accepted.request_id", accepted.request_id),
        transfer=checks.transfer_id("accepted.transfer", accepted.transfer),
        stream_id=accepted.stream_id,
        first_row=checks.packed_rows("accepted.first_row", accepted.first_row, 1),
    )


def encode_step_rows(step: StepRows) -> pb.StepRows:
    return pb.StepRows(step=step.step, stream_ids=step.stream_ids, rows=step.rows)


def decode_step_rows(step: pb.StepRows) -> StepRows:
    stream_ids = tuple(step.stream_ids)
    if len(set(stream_ids)) != len(stream_ids):
        raise checks.refuse("step_rows.stream_ids", "a stream is named twice")
    return StepRows(
        step=step.step,
        stream_ids=stream_ids,
        rows=checks.packed_rows("step_rows.rows", step.rows, len(stream_ids)),
    )


def encode_finished(finished: Finished) -> pb.Finished:
    return pb.Finished(
        request_id=finished.request_id,
        transfer=finished.transfer,
        stop=finished.stop,
        output_rows=finished.output_rows,
        kv_checks=finished.kv_checks,
        stamps=finished.stamps,
        cached_rows=finished.cached_rows,
        admitted_ns=finished.admitted_ns,
        step_gaps_ns=finished.step_gaps_ns,
    )


def decode_finished(finished: pb.Finished) -> Finished:
    return Finished(
        request_id=checks.request_id("finished.request_id", finished.request_id),
        transfer=checks.transfer_id("finished.transfer", finished.transfer),
        stop=finished.stop,
        output_rows=finished.output_rows,
        kv_checks=finished.kv_checks,
        stamps=checks.stamps("finished.stamps", finished.stamps),
        cached_rows=finished.cached_rows,
        admitted_ns=finished.admitted_ns,
        step_gaps_ns=checks.step_gaps(
            "finished.step_gaps_ns", finished.step_gaps_ns, finished.output_rows
        ),
    )


_FROM_LB = (
    peer.HELLO,
    Branch("admit", Admit, encode_admit, decode_admit),
    peer.END,
)
_FROM_DECODE = (
    peer.HELLO,
    peer.CREDIT,
    Branch("refused", Refused, encode_refused, decode_refused),
    Branch("accepted", Accepted, encode_accepted, decode_accepted),
    Branch("step_rows", StepRows, encode_step_rows, decode_step_rows),
    Branch("finished", Finished, encode_finished, decode_finished),
    peer.FAILED,
)

LB_END = make_codec(pb.ConnectRequest, _FROM_LB, pb.ConnectResponse, _FROM_DECODE)
"""lb's end of its stream with decode."""
DECODE_END = make_codec(pb.ConnectResponse, _FROM_DECODE, pb.ConnectRequest, _FROM_LB)
"""decode's end of its stream with lb."""
