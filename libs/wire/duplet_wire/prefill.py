"""Converters and codecs of `duplet.prefill.v1`: the stream between lb and prefill."""

from __future__ import annotations

from duplet.prefill.v1 import prefill_pb2 as pb
from duplet_core.messages import Handed, Prefill, Refusing, StoppedAtOnce
from duplet_wire import checks, peer
from duplet_wire.codec import Branch, make_codec


def encode_prefill(prefill: Prefill) -> pb.Prefill:
    return pb.Prefill(
        request_id=prefill.request_id,
        transfer=prefill.transfer,
        prompt=prefill.prompt,
        prompt_rows=prefill.prompt_rows,
        sampling=peer.encode_sampling(prefill.sampling),
        voice=prefill.voice,
        trace=prefill.trace,
    )


def decode_prefill(prefill: pb.Prefill) -> Prefill:
    rows = checks.positive("prefill.prompt_rows", prefill.prompt_rows)
    return Prefill(
        request_id=checks.request_id("prefill.request_id", prefill.request_id),
        transfer=checks.transfer_id("prefill.transfer", prefill.transfer),
        prompt=checks.packed_rows("prefill.prompt", prefill.prompt, rows),
        prompt_rows=rows,
        sampling=peer.decode_sampling("prefill.sampling", prefill.sampling),
        voice=checks.label("prefill.voice", prefill.voice),
        trace=checks.label("prefill.trace", prefill.trace),
    )


def encode_stopped_at_once(stopped: StoppedAtOnce) -> pb.StoppedAtOnce:
    return pb.StoppedAtOnce(
        request_id=stopped.request_id,
        transfer=stopped.transfer,
        stamps=stopped.stamps,
        cached_rows=stopped.cached_rows,
    )


def decode_stopped_at_once(stopped: pb.StoppedAtOnce) -> StoppedAtOnce:
    return StoppedAtOnce(
        request_id=checks.request_id("stopped_at_once.request_id", stopped.request_id),
        transfer=checks.transfer_id("stopped_at_once.transfer", stopped.transfer),
        stamps=checks.stamps("stopped_at_once.stamps", stopped.stamps),
        cached_rows=stopped.cached_rows,
    )


def encode_handed(handed: Handed) -> pb.Handed:
    return pb.Handed(request_id=handed.request_id, transfer=handed.transfer)


def decode_handed(handed: pb.Handed) -> Handed:
    return Handed(
        request_id=checks.request_id("handed.request_id", handed.request_id),
        transfer=checks.transfer_id("handed.transfer", handed.transfer),
    )


def encode_refusing(refusing: Refusing) -> pb.Refusing:
    return pb.Refusing(reason=peer.encode_reason(refusing.reason))


def decode_refusing(refusing: pb.Refusing) -> Refusing:
    return Refusing(peer.decode_optional_reason("refusing.reason", refusing.reason))


_FROM_LB = (
    peer.HELLO,
    Branch("prefill", Prefill, encode_prefill, decode_prefill),
    peer.END,
)
_FROM_PREFILL = (
    peer.HELLO,
    Branch("stopped_at_once", StoppedAtOnce, encode_stopped_at_once, decode_stopped_at_once),
    peer.FAILED,
    Branch("handed", Handed, encode_handed, decode_handed),
    Branch("refusing", Refusing, encode_refusing, decode_refusing),
)

LB_END = make_codec(pb.ConnectRequest, _FROM_LB, pb.ConnectResponse, _FROM_PREFILL)
"""lb's end of its stream with prefill."""
PREFILL_END = make_codec(pb.ConnectResponse, _FROM_PREFILL, pb.ConnectRequest, _FROM_LB)
"""prefill's end of its stream with lb."""
