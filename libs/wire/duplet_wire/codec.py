"""How an end of a peer stream turns core's messages into envelopes and back.

An envelope is a proto message with one oneof, `message`. A codec knows which of core's
messages each direction may carry; anything else from the peer is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message as ProtoMessage

from duplet_core.errors import RemoteProtocolError, require
from duplet_core.messages import Message as CoreMessage

Sent = TypeVar("Sent", bound=ProtoMessage)
Got = TypeVar("Got", bound=ProtoMessage)


@dataclass(frozen=True, slots=True)
class Branch:
    """One field of an envelope's oneof and the core type that it carries."""

    field: str
    core: type[Any]
    encode: Callable[[Any], ProtoMessage]
    decode: Callable[[Any], CoreMessage]
    """Raises RemoteProtocolError, and nothing else, for what a peer must not send."""


@dataclass(frozen=True, slots=True)
class Codec(Generic[Sent, Got]):
    """One end of one kind of peer stream."""

    encode: Callable[[CoreMessage], Sent]
    """Raises InvariantError for a message that this end never sends: our fault."""
    decode: Callable[[Got], CoreMessage]
    """Raises RemoteProtocolError, naming the field, for anything a peer must not send."""
    together: bool
    """Envelopes have `more`: those that follow, which may travel in the first one."""


def make_codec(
    sent: type[Sent], sends: Sequence[Branch], got: type[Got], gets: Sequence[Branch]
) -> Codec[Sent, Got]:
    """Build the codec of an end that sends `sends` in `sent` and gets `gets` in `got`."""
    by_type = {branch.core: branch for branch in sends}
    by_field = {branch.field: branch for branch in gets}

    def encode(message: CoreMessage) -> Sent:
        branch = by_type.get(type(message))
        if branch is None:
            require(False, f"{sent.DESCRIPTOR.full_name} cannot carry {type(message).__name__}")
            raise AssertionError
        return sent(**{branch.field: branch.encode(message)})

    def decode(envelope: Got) -> CoreMessage:
        field = envelope.WhichOneof("message")
        if field is None:
            raise RemoteProtocolError(
                f"message: {got.DESCRIPTOR.full_name} is empty or of a kind unknown here"
            )
        branch = by_field[field]
        return branch.decode(getattr(envelope, field))

    return Codec(encode, decode, "more" in sent.DESCRIPTOR.fields_by_name)
