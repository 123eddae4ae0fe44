"""What a unit says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duplet.speech.v1 import speech_pb2 as pb
from duplet_client.errors import broken_stream
from duplet_core.errors import InvalidInput
from duplet_pages.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """One service of the unit, as lb knows it."""

    name: str
    instance: str
    """Empty while unknown."""
    version: str
    """Empty where lb does not know."""
    protocol_version: int
    """0 while unknown."""
    connected: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """One named condition of the unit's health; the unit is ready when all are ok."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Credit:
    """What decode said last that it can take."""

    total_pages: int
    free_pages: int
    free_slots: int
    refusing: str
    """Why nothing new is taken; empty while new requests are welcome."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit at one moment; counters run since lb started."""

    spec: ModelSpec | None
    """None while lb does not know the model."""
    services: tuple[ServiceInfo, ...]
    conditions: tuple[Condition, ...]
    live_streams: int
    credit: Credit | None
    """None while lb has no stream to decode."""
    transport: str
    kv_checks: int
    kv_mismatches: int
    requests: Mapping[str, int]
    """Ended requests by outcome."""
    pages: Mapping[str, int]
    """Pages of decode's pool by state."""
    pending_aborts: int = 0
    """Transfers that ended and wait for the writer's proof."""
    aborts_resent: int = 0
    """ABORTs said again on a new stream to kvproxy, since decode started."""
    writers: int = 0
    """Living instances of kvproxy that decode watches."""
    damaged_pages: int = 0
    """Pages of every prompt that decode damages on purpose, for a drill."""
    ends_withheld: int = 0
    """Ends of transfers that kvproxy cannot tell; at three it exits, which is the proof."""


def decode_unit(response: pb.GetUnitResponse) -> Unit:
    """Read a GetUnitResponse.

    Raises:
        GenerateError: PEER_PROTOCOL; the model's spec is of another version.
    """
    return Unit(
        spec=_decode_spec(response.model_spec),
        services=tuple(
            ServiceInfo(s.name, s.instance, s.version, s.protocol_version, s.connected)
            for s in response.services
        ),
        conditions=tuple(Condition(c.name, c.ok, c.detail) for c in response.conditions),
        live_streams=response.live_streams,
        credit=_decode_credit(response.credit) if response.HasField("credit") else None,
        transport=response.transport,
        kv_checks=response.totals.kv_checks,
        kv_mismatches=response.totals.kv_mismatches,
        requests=dict(response.totals.requests),
        pages=dict(response.totals.pages),
        pending_aborts=response.totals.pending_aborts,
        aborts_resent=response.totals.aborts_resent,
        writers=response.totals.writers,
        damaged_pages=response.totals.damaged_pages,
        ends_withheld=response.totals.ends_withheld,
    )


def _decode_spec(text: str) -> ModelSpec | None:
    if not text:
        return None
    try:
        return ModelSpec.from_json(text)
    except InvalidInput as error:
        raise broken_stream(error.detail) from error


def _decode_credit(credit: pb.Credit) -> Credit:
    return Credit(credit.total_pages, credit.free_pages, credit.free_slots, credit.refusing)
