"""Names of the things the protocol speaks about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

InstanceId = NewType("InstanceId", str)
"""One life of a service: 32 lowercase hex digits (128 random bits), new at every start."""

TransferId = NewType("TransferId", str)
"""One movement of one request's KV: 32 lowercase hex digits, minted by lb, used once."""

PROTOCOL_VERSION = 3
"""Version of the transfer protocol. A peer that speaks another is refused at Hello (S11)."""


class Role(StrEnum):
    """The four services of a unit."""

    LB = "lb"
    PREFILL = "prefill"
    DECODE = "decode"
    KVPROXY = "kvproxy"

    # Roles key the hottest tables; Enum's own hash is a call into Python.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True, order=True)
class RequestKey:
    """A request as lb's peers know it: ids are unique within one life of one lb."""

    lb: InstanceId
    request_id: str
