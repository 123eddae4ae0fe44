"""One peer, one current stream: the rules of Hello (S11, Reconnect).

A dialer numbers its streams, growing over its life. Of all streams between two services
only the newest one's messages count: an older stream can still deliver what was written
before it broke, and acting on that is how a late ABORT_ACK frees a page twice. A Hello
supersedes only a stream of the same instance: a stranger cannot push out a peer that may be
merely stopped. A dead instance's buffered messages are not heard any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from duplet_core.errors import Reason
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_core.messages import Hello

_REMEMBERED_INSTANCES = 64
"""Instances whose newest number or death is remembered; older ones no longer have sockets."""


@dataclass(frozen=True, slots=True)
class Current:
    """The stream that counts."""

    stream: int
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason
    detail: str


def versions_differ(peer: Role, version: int) -> str:
    """Both versions of the transfer protocol in words."""
    return f"{peer} speaks transfer protocol {version}, its peer speaks {PROTOCOL_VERSION}"


class Link:
    """State of the connection to one peer service. Owned by one machine."""

    def __init__(
        self,
        peer: Role,
        own: InstanceId,
        *,
        dials: bool,
        needs_lifeline: bool,
        name: Role | None = None,
    ) -> None:
        """`name`: how events and effects call this link where one peer has two of them, by the
        role that we play on it; else they call it by the peer's role."""
        self.peer = peer
        self.name = peer if name is None else name
        self.dials = dials
        self.needs_lifeline = needs_lifeline
        self.current: Current | None = None
        self.pending: int | None = None
        """Dialer: the opened stream whose Hello is not answered yet."""
        self._watched: OrderedDict[InstanceId, None] = OrderedDict()
        """Living instances whose death the kernel will tell us, oldest first: two of them, while
        one is stopped and another has taken its place."""
        self._own = own
        self._newest: OrderedDict[InstanceId, int] = OrderedDict()
        self._dead: OrderedDict[InstanceId, None] = OrderedDict()

    @property
    def watched(self) -> InstanceId | None:
        """The newest living instance whose death the kernel will tell us."""
        return next(reversed(self._watched), None)

    @property
    def living(self) -> int:
        """Instances whose death the kernel will tell us."""
        return len(self._watched)

    def watch(self, instance: InstanceId) -> None:
        """The kernel will tell us this instance's death."""
        self._watched[instance] = None
        self._watched.move_to_end(instance)

    def check_hello(self, stream: int, hello: Hello) -> Refusal | None:
        """Decide on a peer's Hello; None accepts it."""
        if hello.version != PROTOCOL_VERSION:
            return Refusal(Reason.VERSION_MISMATCH, versions_differ(hello.role, hello.version))
        if hello.role is not self.peer:
            return Refusal(Reason.PEER_PROTOCOL, f"hello from {hello.role}, expected {self.peer}")
        if hello.to_instance is not None and hello.to_instance != self._own:
            return Refusal(Reason.OTHER_INSTANCE, f"hello is for instance {hello.to_instance}")
        if hello.instance in self._dead:
            return Refusal(Reason.PEER_DIED, f"instance {hello.instance} has exited")
        # A dialer's Hello was for the newest; an acceptor takes whoever is watched.
        known = hello.instance == self.watched if self.dials else hello.instance in self._watched
        if self.needs_lifeline and not known:
            return Refusal(Reason.NO_LIFELINE, f"no lifeline of instance {hello.instance}")
        if self.dials:
            if stream != self.pending or hello.number != stream:
                return Refusal(Reason.STALE_STREAM, f"hello answers stream {hello.number}")
            return None
        if self.current is not None and self.current.instance != hello.instance:
            return Refusal(
                Reason.OTHER_INSTANCE,
                f"instance {self.current.instance} holds the stream and has not exited",
            )
        newest = self._newest.get(hello.instance, 0)
        if hello.number <= newest:
            return Refusal(Reason.STALE_STREAM, f"stream {hello.number}, newest is {newest}")
        return None

    def accept(self, stream: int, hello: Hello) -> None:
        """Make the stream the one that counts."""
        self.current = Current(stream, hello.instance)
        self.pending = None
        self._newest[hello.instance] = hello.number
        self._newest.move_to_end(hello.instance)
        while len(self._newest) > _REMEMBERED_INSTANCES:
            self._newest.popitem(last=False)

    def close(self, stream: int) -> InstanceId | None:
        """Forget a closed stream; the instance if it was the one that counts."""
        if self.pending == stream:
            self.pending = None
        if self.current is None or self.current.stream != stream:
            return None
        instance = self.current.instance
        self.current = None
        return instance

    def bury(self, instance: InstanceId) -> int | None:
        """Remember a death; the number of its current stream, which no longer counts."""
        self._dead[instance] = None
        while len(self._dead) > _REMEMBERED_INSTANCES:
            self._dead.popitem(last=False)
        self._watched.pop(instance, None)
        if self.current is not None and self.current.instance == instance:
            return self.current.stream
        return None

    def is_dead(self, instance: InstanceId) -> bool:
        return instance in self._dead
