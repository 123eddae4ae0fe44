"""Converters and codecs of `duplet.kvproxy.v1`: the writer's streams."""

from __future__ import annotations

from duplet.kvproxy.v1 import kvproxy_pb2 as pb
from duplet_core.messages import (
    Abort,
    AbortAck,
    Drop,
    Grant,
    Handoff,
    Landed,
    Leaving,
    Move,
    Route,
    SourceReleased,
    Started,
    TransferBroken,
    TransferFailed,
)
from duplet_wire import checks, peer
from duplet_wire.codec import Branch, make_codec


def encode_handoff(handoff: Handoff) -> pb.Handoff:
    return pb.Handoff(
        first_row=handoff.first_row,
        digests=b"".join(handoff.digests),
        stamps=handoff.stamps,
        cached_rows=handoff.cached_rows,
    )


def decode_handoff(field: str, handoff: pb.Handoff) -> Handoff:
    return Handoff(
        first_row=checks.packed_rows(f"{field}.first_row", handoff.first_row, 1),
        digests=checks.digests(f"{field}.digests", handoff.digests),
        stamps=checks.stamps(f"{field}.stamps", handoff.stamps),
        cached_rows=handoff.cached_rows,
    )


def encode_move(move: Move) -> pb.Move:
    return pb.Move(
        transfer=move.transfer,
        start_row=move.start_row,
        count=move.count,
        pages=move.pages,
        handoff=None if move.handoff is None else encode_handoff(move.handoff),
    )


def decode_move(move: pb.Move) -> Move:
    count = checks.positive("move.count", move.count)
    return Move(
        transfer=checks.transfer_id("move.transfer", move.transfer),
        start_row=move.start_row,
        count=count,
        pages=checks.page_numbers("move.pages", move.pages, count),
        handoff=(
            decode_handoff("move.handoff", move.handoff) if move.HasField("handoff") else None
        ),
    )


def encode_grant(grant: Grant) -> pb.Grant:
    return pb.Grant(transfer=grant.transfer, pages=grant.pages, rows=grant.rows)


def decode_grant(grant: pb.Grant) -> Grant:
    rows = checks.positive("grant.rows", grant.rows)
    return Grant(
        transfer=checks.transfer_id("grant.transfer", grant.transfer),
        pages=checks.page_numbers("grant.pages", grant.pages, rows),
        rows=rows,
    )


def encode_landed(landed: Landed) -> pb.Landed:
    return pb.Landed(
        transfer=landed.transfer, rows=landed.rows, handoff=encode_handoff(landed.handoff)
    )


def decode_landed(landed: pb.Landed) -> Landed:
    if not landed.HasField("handoff"):
        raise checks.refuse("landed.handoff", "missing")
    return Landed(
        transfer=checks.transfer_id("landed.transfer", landed.transfer),
        rows=checks.positive("landed.rows", landed.rows),
        handoff=decode_handoff("landed.handoff", landed.handoff),
    )


def encode_drop(drop: Drop) -> pb.Drop:
    return pb.Drop(transfer=drop.transfer)


def decode_drop(drop: pb.Drop) -> Drop:
    return Drop(checks.transfer_id("drop.transfer", drop.transfer))


def encode_source_released(released: SourceReleased) -> pb.SourceReleased:
    return pb.SourceReleased(transfer=released.transfer, landed=released.landed)


def decode_source_released(released: pb.SourceReleased) -> SourceReleased:
    return SourceReleased(
        transfer=checks.transfer_id("source_released.transfer", released.transfer),
        landed=released.landed,
    )


def encode_abort(abort: Abort) -> pb.Abort:
    return pb.Abort(transfer=abort.transfer)


def decode_abort(abort: pb.Abort) -> Abort:
    return Abort(checks.transfer_id("abort.transfer", abort.transfer))


def encode_abort_ack(ack: AbortAck) -> pb.AbortAck:
    return pb.AbortAck(transfer=ack.transfer)


def decode_abort_ack(ack: pb.AbortAck) -> AbortAck:
    return AbortAck(checks.transfer_id("abort_ack.transfer", ack.transfer))


def encode_started(started: Started) -> pb.Started:
    return pb.Started(transfer=started.transfer)


def decode_started(started: pb.Started) -> Started:
    return Started(checks.transfer_id("started.transfer", started.transfer))


def encode_transfer_failed(failed: TransferFailed) -> pb.TransferFailed:
    return pb.TransferFailed(transfer=failed.transfer, detail=failed.detail)


def decode_transfer_failed(failed: pb.TransferFailed) -> TransferFailed:
    return TransferFailed(
        transfer=checks.transfer_id("transfer_failed.transfer", failed.transfer),
        detail=failed.detail,
    )


def encode_transfer_broken(broken: TransferBroken) -> pb.TransferBroken:
    return pb.TransferBroken(transfer=broken.transfer, detail=broken.detail)


def decode_transfer_broken(broken: pb.TransferBroken) -> TransferBroken:
    return TransferBroken(
        transfer=checks.transfer_id("transfer_broken.transfer", broken.transfer),
        detail=broken.detail,
    )


def encode_leaving(leaving: Leaving) -> pb.Leaving:
    return pb.Leaving()


def decode_leaving(leaving: pb.Leaving) -> Leaving:
    return Leaving()


def encode_route(route: Route) -> pb.Route:
    return pb.Route(transport=route.transport, ends_withheld=route.ends_withheld)


def decode_route(route: pb.Route) -> Route:
    return Route(checks.label("route.transport", route.transport), route.ends_withheld)


_FROM_PREFILL = (
    peer.HELLO,
    Branch("move", Move, encode_move, decode_move),
    Branch("drop", Drop, encode_drop, decode_drop),
)
_TO_PREFILL = (
    peer.HELLO,
    Branch("source_released", SourceReleased, encode_source_released, decode_source_released),
)
_FROM_DECODE = (
    peer.HELLO,
    Branch("grant", Grant, encode_grant, decode_grant),
    Branch("abort", Abort, encode_abort, decode_abort),
)
_TO_DECODE = (
    peer.HELLO,
    Branch("abort_ack", AbortAck, encode_abort_ack, decode_abort_ack),
    Branch("started", Started, encode_started, decode_started),
    Branch("landed", Landed, encode_landed, decode_landed),
    Branch("transfer_failed", TransferFailed, encode_transfer_failed, decode_transfer_failed),
    Branch("transfer_broken", TransferBroken, encode_transfer_broken, decode_transfer_broken),
    Branch("leaving", Leaving, encode_leaving, decode_leaving),
    Branch("route", Route, encode_route, decode_route),
)

PREFILL_END = make_codec(
    pb.ConnectPrefillRequest, _FROM_PREFILL, pb.ConnectPrefillResponse, _TO_PREFILL
)
"""prefill's end of its stream with kvproxy."""
PREFILL_SIDE = make_codec(
    pb.ConnectPrefillResponse, _TO_PREFILL, pb.ConnectPrefillRequest, _FROM_PREFILL
)
"""kvproxy's end of its stream with prefill."""
DECODE_END = make_codec(pb.ConnectDecodeRequest, _FROM_DECODE, pb.ConnectDecodeResponse, _TO_DECODE)
"""decode's end of its stream with kvproxy."""
DECODE_SIDE = make_codec(
    pb.ConnectDecodeResponse, _TO_DECODE, pb.ConnectDecodeRequest, _FROM_DECODE
)
"""kvproxy's end of its stream with decode."""
