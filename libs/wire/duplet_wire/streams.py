"""The codec of each end of each peer stream, by the roles of the two ends."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from duplet_core.ids import Role
from duplet_wire import decode, kvproxy, prefill
from duplet_wire.codec import Codec

CODECS: Mapping[tuple[Role, Role], Codec[Any, Any]] = MappingProxyType(
    {
        (Role.LB, Role.PREFILL): prefill.LB_END,
        (Role.PREFILL, Role.LB): prefill.PREFILL_END,
        (Role.LB, Role.DECODE): decode.LB_END,
        (Role.DECODE, Role.LB): decode.DECODE_END,
        (Role.PREFILL, Role.KVPROXY): kvproxy.PREFILL_END,
        (Role.KVPROXY, Role.PREFILL): kvproxy.PREFILL_SIDE,
        (Role.DECODE, Role.KVPROXY): kvproxy.DECODE_END,
        (Role.KVPROXY, Role.DECODE): kvproxy.DECODE_SIDE,
    }
)
"""By (own role, peer's role)."""
