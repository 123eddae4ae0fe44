"""Typed errors and end reasons. `duplet_runtime.status` maps reasons to gRPC, once."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a request, stream or call was refused or ended; clients see it as `ErrorInfo.reason`."""

    # The prompt or its parameters are at fault.
    INVALID_PROMPT = "INVALID_PROMPT"
    INVALID_SAMPLING = "INVALID_SAMPLING"
    INVALID_REQUEST = "INVALID_REQUEST"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    # The unit cannot take the request now.
    OVERLOADED = "OVERLOADED"
    NOT_READY = "NOT_READY"
    DRAINING = "DRAINING"
    QUARANTINE = "QUARANTINE"
    # The client ended it.
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    SLOW_READER = "SLOW_READER"
    # A part of the unit failed.
    LB_LOST = "LB_LOST"
    PREFILL_LOST = "PREFILL_LOST"
    DECODE_LOST = "DECODE_LOST"
    WRITER_LOST = "WRITER_LOST"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    TRANSFER_DEADLINE = "TRANSFER_DEADLINE"
    KV_MISMATCH = "KV_MISMATCH"
    ENGINE_FAILED = "ENGINE_FAILED"
    # A peer stream was refused or ended.
    VERSION_MISMATCH = "VERSION_MISMATCH"
    STALE_STREAM = "STALE_STREAM"
    SUPERSEDED = "SUPERSEDED"
    OTHER_INSTANCE = "OTHER_INSTANCE"
    NO_LIFELINE = "NO_LIFELINE"
    PEER_DIED = "PEER_DIED"
    PEER_PROTOCOL = "PEER_PROTOCOL"


class DupletError(Exception):
    """Root of Duplet's errors. Each carries one reason."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.points_ns: dict[str, int] = {}
        """Points of the failed request's timeline, where whoever tells the client knows them."""


class InvalidInput(DupletError):
    """The caller's input is at fault; `detail` names the field, the row and the value."""


class Unavailable(DupletError):
    """The unit cannot do it now, or a part of it failed."""


class RemoteProtocolError(DupletError):
    """A peer broke the protocol: its stream is closed, nothing else is lost."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.PEER_PROTOCOL, detail)


class InvariantError(AssertionError):
    """Our own state is wrong. The process must stop: going on could reuse a page unsafely."""


def require(condition: bool, message: str) -> None:
    """Check an invariant; stays on in production.

    Raises:
        InvariantError: `condition` is false.
    """
    if not condition:
        raise InvariantError(message)
