"""Codecs of peer streams: every message survives, every fault of a peer is named."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet.decode.v1 import decode_pb2
from duplet.kvproxy.v1 import kvproxy_pb2
from duplet.peer.v1 import peer_pb2
from duplet.prefill.v1 import prefill_pb2
from duplet_core import messages as core
from duplet_core.errors import InvariantError, Reason, RemoteProtocolError
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_wire.codec import Codec
from duplet_wire.streams import CODECS

ID = "0123456789abcdef" * 2

hex_ids = st.text("0123456789abcdef", min_size=32, max_size=32)
transfers = hex_ids.map(TransferId)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
request_ids = texts.filter(lambda text: len(text) >= 1)
uint32s = st.integers(0, 2**32 - 1)
counts = st.integers(1, 2**32 - 1)
uint64s = st.integers(0, 2**64 - 1)
stamps = st.lists(uint64s, max_size=13).map(tuple)
reasons = st.sampled_from(Reason)
columns = st.integers(1, 12)


def packed(rows: int) -> st.SearchStrategy[bytes]:
    return columns.flatmap(lambda n: st.binary(min_size=rows * n * 4, max_size=rows * n * 4))


samplings = st.builds(
    core.Sampling,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.floats(0, 5),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=counts,
    repetition_window=st.integers(0, 128),
)
handoffs = st.builds(
    core.Handoff,
    first_row=packed(1),
    digests=st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=5).map(tuple),
    stamps=stamps,
    cached_rows=uint32s,
)
credits_ = st.builds(
    core.Credit,
    total_pages=uint64s,
    free_pages=uint64s,
    free_slots=uint32s,
    admits_seen=uint64s,
    refusing=st.none() | reasons,
    census=st.builds(core.Census, *[uint64s] * 8, texts, uint64s),
    step=st.none() | st.builds(core.StepCredit, uint32s, uint64s, uint64s, uint64s),
)


@st.composite
def prefills(draw: st.DrawFn) -> core.Prefill:
    rows = draw(st.integers(1, 8))
    return core.Prefill(
        draw(request_ids),
        draw(transfers),
        draw(packed(rows)),
        rows,
        draw(samplings),
        draw(texts),
        draw(texts),
    )


@st.composite
def steps(draw: st.DrawFn) -> core.StepRows:
    ids = tuple(draw(st.lists(uint64s, max_size=6, unique=True)))
    return core.StepRows(draw(uint64s), ids, draw(packed(len(ids))))


@st.composite
def pages_and_rows(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    pages = tuple(draw(st.lists(uint32s, min_size=1, max_size=6, unique=True)))
    return pages, draw(st.integers(len(pages), 2**32 - 1))


grants = st.builds(lambda t, p: core.Grant(t, p[0], p[1]), transfers, pages_and_rows())
moves = st.builds(
    lambda t, start, p, handoff: core.Move(t, start, p[1], p[0], handoff),
    transfers,
    uint32s,
    pages_and_rows(),
    st.none() | handoffs,
)
ends = st.builds(core.End, request_ids, transfers, st.none() | reasons)
faileds = st.builds(core.Failed, request_ids, transfers, reasons, texts)
hellos = st.builds(
    core.Hello,
    role=st.sampled_from(Role),
    instance=hex_ids.map(InstanceId),
    version=uint32s,
    number=uint64s,
    to_instance=st.none() | hex_ids.map(InstanceId),
    held=st.lists(transfers, max_size=5, unique=True).map(tuple),
    spec=texts,
    credit=st.none() | credits_,
    refusing=st.none() | reasons,
)
admits = st.builds(core.Admit, request_ids, transfers, counts, counts, samplings, texts)
finisheds = st.builds(
    core.Finished, request_ids, transfers, st.booleans(), uint32s, uint32s, stamps, uint32s
)

SAID: dict[tuple[Role, Role], dict[type[Any], st.SearchStrategy[Any]]] = {
    (Role.LB, Role.PREFILL): {core.Hello: hellos, core.Prefill: prefills(), core.End: ends},
    (Role.PREFILL, Role.LB): {
        core.Hello: hellos,
        core.StoppedAtOnce: st.builds(core.StoppedAtOnce, request_ids, transfers, stamps, uint32s),
        core.Failed: faileds,
        core.Handed: st.builds(core.Handed, request_ids, transfers),
        core.Refusing: st.builds(core.Refusing, st.none() | reasons),
    },
    (Role.LB, Role.DECODE): {core.Hello: hellos, core.Admit: admits, core.End: ends},
    (Role.DECODE, Role.LB): {
        core.Hello: hellos,
        core.Credit: credits_,
        core.Refused: st.builds(core.Refused, request_ids, transfers, reasons, texts),
        core.Accepted: st.builds(core.Accepted, request_ids, transfers, uint64s, packed(1)),
        core.StepRows: steps(),
        core.Finished: finisheds,
        core.Failed: faileds,
    },
    (Role.PREFILL, Role.KVPROXY): {
        core.Hello: hellos,
        core.Move: moves,
        core.Drop: st.builds(core.Drop, transfers),
    },
    (Role.KVPROXY, Role.PREFILL): {
        core.Hello: hellos,
        core.SourceReleased: st.builds(core.SourceReleased, transfers, st.booleans()),
    },
    (Role.DECODE, Role.KVPROXY): {
        core.Hello: hellos,
        core.Grant: grants,
        core.Abort: st.builds(core.Abort, transfers),
    },
    (Role.KVPROXY, Role.DECODE): {
        core.Hello: hellos,
        core.AbortAck: st.builds(core.AbortAck, transfers),
        core.Started: st.builds(core.Started, transfers),
        core.Landed: st.builds(core.Landed, transfers, counts, handoffs),
        core.TransferFailed: st.builds(core.TransferFailed, transfers, texts),
        core.TransferBroken: st.builds(core.TransferBroken, transfers, texts),
        core.Leaving: st.builds(core.Leaving),
        core.Route: st.builds(core.Route, texts),
    },
}
"""What each end (own role, peer's role) says."""

DIRECTIONS = sorted(SAID)


def across(codec: Codec[Any, Any], other: Codec[Any, Any], message: core.Message) -> core.Message:
    """Send a message through real bytes."""
    envelope = codec.encode(message)
    return other.decode(type(envelope).FromString(envelope.SerializeToString()))


def test_every_message_of_core_has_a_direction() -> None:
    assert set(CODECS) == set(SAID)
    assert {kind for said in SAID.values() for kind in said} == set(get_args(core.Message))


@pytest.mark.parametrize(("own", "peer"), DIRECTIONS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_messages_survive(own: Role, peer: Role, data: st.DataObject) -> None:
    message = data.draw(st.one_of(*SAID[own, peer].values()))
    got = across(CODECS[own, peer], CODECS[peer, own], message)
    assert got == message
    for field in dataclasses.fields(message):
        assert type(getattr(got, field.name)) is type(getattr(message, field.name)), field.name


@pytest.mark.parametrize(("own", "peer"), DIRECTIONS)
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_an_end_cannot_say_what_is_not_its_to_say(
    own: Role, peer: Role, data: st.DataObject
) -> None:
    foreign = {
        kind: strategy
        for said in SAID.values()
        for kind, strategy in said.items()
        if kind not in SAID[own, peer]
    }
    message = data.draw(st.one_of(*foreign.values()))
    with pytest.raises(InvariantError, match=type(message).__name__):
        CODECS[own, peer].encode(message)


@pytest.mark.parametrize(("own", "peer"), DIRECTIONS)
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_damaged_bytes_raise_nothing_else(own: Role, peer: Role, data: st.DataObject) -> None:
    envelope = CODECS[own, peer].encode(data.draw(st.one_of(*SAID[own, peer].values())))
    damaged = bytearray(envelope.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        parsed = type(envelope).FromString(bytes(damaged))
    except DecodeError:
        return
    try:
        got = CODECS[peer, own].decode(parsed)
    except RemoteProtocolError:
        return
    # What passes is a message that could have been sent.
    assert across(CODECS[own, peer], CODECS[peer, own], got) == got


def sampling(**changed: float) -> peer_pb2.Sampling:
    values: dict[str, Any] = {"seed": 1, "temperature": 0.8, "top_p": 0.8, "top_k": 30}
    return peer_pb2.Sampling(**(values | changed))


def admit(**changed: Any) -> decode_pb2.ConnectRequest:
    values: dict[str, Any] = {
        "request_id": "r",
        "transfer": ID,
        "prompt_rows": 3,
        "max_rows": 4,
        "sampling": sampling(),
    }
    return decode_pb2.ConnectRequest(admit=decode_pb2.Admit(**(values | changed)))


def prefill(**changed: Any) -> prefill_pb2.ConnectRequest:
    values: dict[str, Any] = {
        "request_id": "r",
        "transfer": ID,
        "prompt": bytes(88),
        "prompt_rows": 2,
        "sampling": sampling(),
    }
    return prefill_pb2.ConnectRequest(prefill=prefill_pb2.Prefill(**(values | changed)))


def hello(**changed: Any) -> decode_pb2.ConnectRequest:
    values: dict[str, Any] = {"role": peer_pb2.ROLE_LB, "instance": ID, "version": 1, "number": 1}
    return decode_pb2.ConnectRequest(hello=peer_pb2.Hello(**(values | changed)))


def end(**changed: Any) -> decode_pb2.ConnectRequest:
    return decode_pb2.ConnectRequest(
        end=peer_pb2.End(**({"request_id": "r", "transfer": ID} | changed))
    )


def grant(**changed: Any) -> kvproxy_pb2.ConnectDecodeRequest:
    values: dict[str, Any] = {"transfer": ID, "pages": [4, 9], "rows": 20}
    return kvproxy_pb2.ConnectDecodeRequest(grant=kvproxy_pb2.Grant(**(values | changed)))


def move(**changed: Any) -> kvproxy_pb2.ConnectPrefillRequest:
    values: dict[str, Any] = {"transfer": ID, "start_row": 0, "count": 20, "pages": [4, 9]}
    return kvproxy_pb2.ConnectPrefillRequest(move=kvproxy_pb2.Move(**(values | changed)))


def handoff(**changed: Any) -> kvproxy_pb2.Handoff:
    values: dict[str, Any] = {"first_row": bytes(44), "digests": bytes(32), "stamps": [1, 2, 3]}
    return kvproxy_pb2.Handoff(**(values | changed))


def landed(**changed: Any) -> kvproxy_pb2.ConnectDecodeResponse:
    values: dict[str, Any] = {"transfer": ID, "rows": 20, "handoff": handoff()}
    return kvproxy_pb2.ConnectDecodeResponse(landed=kvproxy_pb2.Landed(**(values | changed)))


def step_rows(**changed: Any) -> decode_pb2.ConnectResponse:
    values: dict[str, Any] = {"step": 1, "stream_ids": [1, 2], "rows": bytes(88)}
    return decode_pb2.ConnectResponse(step_rows=decode_pb2.StepRows(**(values | changed)))


def credit(**changed: Any) -> decode_pb2.ConnectResponse:
    return decode_pb2.ConnectResponse(credit=peer_pb2.Credit(**changed))


def route(**changed: Any) -> kvproxy_pb2.ConnectDecodeResponse:
    values: dict[str, Any] = {"transport": "x" * 256}
    return kvproxy_pb2.ConnectDecodeResponse(route=kvproxy_pb2.Route(**(values | changed)))


def failed(**changed: Any) -> decode_pb2.ConnectResponse:
    values: dict[str, Any] = {
        "request_id": "r",
        "transfer": ID,
        "reason": peer_pb2.REASON_KV_MISMATCH,
    }
    return decode_pb2.ConnectResponse(failed=peer_pb2.Failed(**(values | changed)))


GETTERS = {
    decode_pb2.ConnectRequest: CODECS[Role.DECODE, Role.LB],
    decode_pb2.ConnectResponse: CODECS[Role.LB, Role.DECODE],
    prefill_pb2.ConnectRequest: CODECS[Role.PREFILL, Role.LB],
    prefill_pb2.ConnectResponse: CODECS[Role.LB, Role.PREFILL],
    kvproxy_pb2.ConnectPrefillRequest: CODECS[Role.KVPROXY, Role.PREFILL],
    kvproxy_pb2.ConnectPrefillResponse: CODECS[Role.PREFILL, Role.KVPROXY],
    kvproxy_pb2.ConnectDecodeRequest: CODECS[Role.KVPROXY, Role.DECODE],
    kvproxy_pb2.ConnectDecodeResponse: CODECS[Role.DECODE, Role.KVPROXY],
}

NAN = float("nan")

FAULTS = [
    (admit(transfer=ID.upper()), "admit.transfer"),
    (admit(transfer=ID[1:]), "admit.transfer"),
    (admit(transfer=ID + "\n"), "admit.transfer"),
    (admit(transfer=""), "admit.transfer"),
    (admit(request_id=""), "admit.request_id"),
    (admit(request_id="x" * 129), "admit.request_id"),
    (admit(prompt_rows=0), "admit.prompt_rows"),
    (admit(max_rows=0), "admit.max_rows"),
    (admit(trace="x" * 257), "admit.trace"),
    (admit(sampling=None), "admit.sampling.top_p"),
    (admit(sampling=sampling(seed=2**63)), "admit.sampling.seed"),
    (admit(sampling=sampling(temperature=NAN)), "admit.sampling.temperature"),
    (admit(sampling=sampling(temperature=-1)), "admit.sampling.temperature"),
    (admit(sampling=sampling(temperature=float("inf"))), "admit.sampling.temperature"),
    (admit(sampling=sampling(top_p=NAN)), "admit.sampling.top_p"),
    (admit(sampling=sampling(top_p=0)), "admit.sampling.top_p"),
    (admit(sampling=sampling(top_p=1.5)), "admit.sampling.top_p"),
    (admit(sampling=sampling(top_k=0)), "admit.sampling.top_k"),
    (admit(sampling=sampling(repetition_window=129)), "admit.sampling.repetition_window"),
    (prefill(prompt=b""), "prefill.prompt"),
    (prefill(prompt=bytes(87)), "prefill.prompt"),
    (prefill(prompt_rows=0), "prefill.prompt_rows"),
    (prefill(prompt_rows=3), "prefill.prompt"),
    (prefill(voice="x" * 257), "prefill.voice"),
    (hello(role=0), "hello.role"),
    (hello(role=99), "hello.role"),
    (hello(instance="?"), "hello.instance"),
    (hello(to_instance=""), "hello.to_instance"),
    (hello(held=[ID, "x"]), "hello.held"),
    (hello(held=[ID, ID]), "hello.held"),
    (hello(transport="x" * 257), "hello.transport"),
    (end(reason=99), "end.reason"),
    (end(request_id=""), "end.request_id"),
    (end(transfer="r"), "end.transfer"),
    (grant(pages=[]), "grant.pages"),
    (grant(pages=[4, 4]), "grant.pages"),
    (grant(rows=0), "grant.rows"),
    (grant(rows=1), "grant.pages"),
    (move(count=0), "move.count"),
    (move(pages=[]), "move.pages"),
    (move(handoff=handoff(first_row=b"abc")), "move.handoff.first_row"),
    (move(handoff=handoff(first_row=b"")), "move.handoff.first_row"),
    (landed(handoff=None), "landed.handoff"),
    (landed(rows=0), "landed.rows"),
    (landed(handoff=handoff(digests=bytes(31))), "landed.handoff.digests"),
    (landed(handoff=handoff(digests=b"")), "landed.handoff.digests"),
    (landed(handoff=handoff(stamps=range(14))), "landed.handoff.stamps"),
    (step_rows(stream_ids=[1, 1]), "step_rows.stream_ids"),
    (step_rows(rows=bytes(84)), "step_rows.rows"),
    (step_rows(stream_ids=[]), "step_rows.rows"),
    (credit(refusing=1000), "credit.refusing"),
    (credit(census=peer_pb2.Census(transport="x" * 257)), "credit.census.transport"),
    (route(transport="x" * 10_000_000), "route.transport"),
    (failed(reason=0), "failed.reason"),
    (failed(reason=77), "failed.reason"),
]


@pytest.mark.parametrize(
    "good",
    [
        admit(),
        prefill(),
        hello(),
        end(),
        grant(),
        move(),
        move(handoff=handoff()),
        landed(),
        step_rows(),
        credit(),
        failed(),
        route(),
    ],
)
def test_what_the_faults_start_from_is_good(good: Any) -> None:
    GETTERS[type(good)].decode(good)


@pytest.mark.parametrize(("envelope", "field"), FAULTS)
def test_a_fault_is_named(envelope: Any, field: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        GETTERS[type(envelope)].decode(envelope)
    assert caught.value.reason is Reason.PEER_PROTOCOL
    assert caught.value.detail.startswith(f"{field}: ")


@pytest.mark.parametrize("kind", GETTERS)
def test_empty_and_unknown_messages_are_refused(kind: type[Any]) -> None:
    unknown = kind.FromString(b"\xfa\x01\x00")  # field 31, empty
    for envelope in (kind(), unknown):
        with pytest.raises(RemoteProtocolError, match=r"^message: .*empty or of a kind unknown"):
            GETTERS[kind].decode(envelope)
