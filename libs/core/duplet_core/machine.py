"""What the four machines share: events in, effects out, Hello, lost and dead peers.

A subclass says what its peers' messages mean (`_HANDLERS`) and reacts to a peer that is up,
lost (its stream ended: requests end, nothing is proven) or dead (the kernel's word: proof).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from duplet_core.effects import (
    Close,
    Count,
    Drain,
    Effect,
    InstanceDied,
    LifelineUp,
    Log,
    OtherVersion,
    Received,
    Send,
    SetHealth,
    StreamClosed,
    StreamOpened,
)
from duplet_core.errors import Reason, RemoteProtocolError, require
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_core.link import Link, versions_differ
from duplet_core.messages import Hello, Message


class Outlet(Protocol):
    """What a machine's parts may do: the machine itself."""

    def emit(self, effect: Effect) -> None: ...

    def send(self, peer: Role, message: Message, only: InstanceId | None = None) -> bool: ...

    def instance_of(self, peer: Role) -> InstanceId | None: ...


class Machine:
    """Base of the four machines. Fed by one caller; not re-entrant."""

    ROLE: ClassVar[Role]
    _HANDLERS: ClassVar[dict[tuple[Role, type], str]]
    """(peer, message type) to the name of the method that takes (message, now)."""

    def __init__(self, instance: InstanceId, links: tuple[Link, ...]) -> None:
        self.instance = instance
        self.links = {link.name: link for link in links}
        self.draining = False
        self._effects: list[Effect] = []

    # --- the interface ------------------------------------------------------

    def receive(self, event: Any, now: int) -> list[Effect]:
        """Take one event at time `now` (ns); the effects are to be executed in order."""
        self._take(event, now)
        self._settle(now)
        return self._flush()

    def handle_timer(self, now: int) -> list[Effect]:
        """To be called when `next_timer()` is due; early calls are harmless."""
        self._on_timer(now)
        self._settle(now)
        return self._flush()

    def next_timer(self) -> int | None:
        """When (ns) `handle_timer` is next to be called; None: no need."""
        return None

    # --- for subclasses -------------------------------------------------------

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, peer: Role, message: Message, only: InstanceId | None = None) -> bool:
        """Send on the peer's current stream; False (nothing sent) when there is none, or when
        it belongs to another instance than `only`."""
        current = self.links[peer].current
        if current is None or (only is not None and current.instance != only):
            return False
        self.emit(Send(peer, current.stream, message))
        return True

    def instance_of(self, peer: Role) -> InstanceId | None:
        """Whose stream counts now."""
        current = self.links[peer].current
        return None if current is None else current.instance

    def _own_hello(self, peer: Role, number: int, to: InstanceId | None) -> Hello:
        """Our Hello to this peer; subclasses add what the peer must know."""
        return Hello(self.ROLE, self.instance, PROTOCOL_VERSION, number, to)

    def _on_up(self, peer: Role, instance: InstanceId, hello: Hello, now: int) -> None:
        """The peer's stream counts from now on."""

    def _on_lost(self, peer: Role, instance: InstanceId, now: int) -> None:
        """The peer's stream ended. Proves nothing."""

    def _on_watched(self, event: LifelineUp, now: int) -> None:
        """The kernel will tell us this instance's death."""

    def _on_died(self, peer: Role, instance: InstanceId, now: int) -> None:
        """Every process of the instance has exited; its stream was reported lost before."""

    def _on_other(self, event: Any, now: int) -> None:
        """An event that only the subclass knows."""
        require(False, f"{self.ROLE}: unknown event {type(event).__name__}")

    def _on_timer(self, now: int) -> None:
        """Something of `next_timer()` may be due."""

    def _settle(self, now: int) -> None:
        """After each event: tell others what changed."""

    # --- the shared rules -----------------------------------------------------

    def _flush(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _take(self, event: Any, now: int) -> None:
        if isinstance(event, Received):
            self._take_message(event, now)
        elif isinstance(event, StreamOpened):
            self._take_opened(event)
        elif isinstance(event, StreamClosed):
            self._lose(self.links[event.peer], event.stream, now, event.detail)
        elif isinstance(event, LifelineUp):
            link = self.links[event.peer]
            if not link.is_dead(event.instance):
                link.watch(event.instance)
                self._on_watched(event, now)
        elif isinstance(event, OtherVersion):
            self.emit(Count("hellos_refused"))
            self._tell_version(self.links[event.peer], versions_differ(event.peer, event.version))
        elif isinstance(event, InstanceDied):
            self._take_death(event, now)
        elif isinstance(event, Drain):
            self.draining = True
        else:
            self._on_other(event, now)

    def _take_opened(self, event: StreamOpened) -> None:
        link = self.links[event.peer]
        require(link.dials, f"{self.ROLE}: opened a stream to {event.peer}, which dials")
        require(link.current is None and link.pending is None, "one dialed stream at a time")
        if link.needs_lifeline and link.watched is None:
            # Whom to list as held is unknown until we know which instance answers.
            self.emit(Close(event.peer, event.stream, Reason.NO_LIFELINE, "no lifeline yet"))
            return
        link.pending = event.stream
        self.emit(
            Send(event.peer, event.stream, self._own_hello(event.peer, event.stream, link.watched))
        )

    def _take_message(self, event: Received, now: int) -> None:
        link = self.links[event.peer]
        if isinstance(event.message, Hello):
            self._take_hello(link, event.stream, event.message, now)
            return
        if link.current is None or link.current.stream != event.stream:
            self.emit(Count("stale_messages"))
            return
        handler: Callable[[Any, int], None] | None = None
        name = self._HANDLERS.get((event.peer, type(event.message)))
        if name is not None:
            handler = getattr(self, name)
        try:
            if handler is None:
                kind = type(event.message).__name__
                raise RemoteProtocolError(f"{event.peer} may not send {kind}")
            handler(event.message, now)
        except RemoteProtocolError as error:
            self._cut(link, event.stream, error.reason, error.detail, now)

    def _take_hello(self, link: Link, stream: int, hello: Hello, now: int) -> None:
        if link.current is not None and link.current.stream == stream:
            self._cut(link, stream, Reason.PEER_PROTOCOL, "second hello on a stream", now)
            return
        refusal = link.check_hello(stream, hello)
        if refusal is not None:
            if link.pending == stream:
                link.pending = None
            self.emit(Count("hellos_refused"))
            if refusal.reason is Reason.VERSION_MISMATCH:
                self._tell_version(link, refusal.detail)
            self.emit(Close(link.name, stream, refusal.reason, refusal.detail))
            return
        if link.current is not None:
            old = link.current.stream
            self._cut(link, old, Reason.SUPERSEDED, f"superseded by stream {hello.number}", now)
        link.accept(stream, hello)
        if not link.dials:
            answer = self._own_hello(link.name, hello.number, hello.instance)
            self.emit(Send(link.name, stream, answer))
            spoken = f"{link.peer} speaks transfer protocol {hello.version}"
            self._tell_protocol(link, True, spoken)
        self.emit(Log("peer up", detail=f"{link.peer} instance {hello.instance}"))
        if link.dials:  # whom we dial, we need
            self._tell_up(link, hello.transport)
        self._on_up(link.name, hello.instance, hello, now)

    def _tell_up(self, link: Link, transport: str) -> None:
        """Health of a peer that we have; `transport` is a writer's, or empty."""
        assert link.current is not None
        way = f", {transport}" if transport else ""
        self.emit(SetHealth(f"peer.{link.peer}", True, f"instance {link.current.instance}{way}"))

    def _tell_version(self, link: Link, detail: str) -> None:
        """Health where a peer that dials us was refused for its version: not met until one comes
        that speaks ours. While one of ours has the stream nothing is missing."""
        if not link.dials and link.current is None:
            self._tell_protocol(link, False, detail)

    def _tell_protocol(self, link: Link, ok: bool, detail: str) -> None:
        # Who starts the peer in our version may wait until we are ready, and we are, for that one.
        self.emit(SetHealth(f"protocol.{link.peer}", ok, detail, for_ready=False))

    def _cut(self, link: Link, stream: int, reason: Reason, detail: str, now: int) -> None:
        """Close the stream from our side and stop hearing it at once."""
        self.emit(Close(link.name, stream, reason, detail))
        self._lose(link, stream, now)

    def _lose(self, link: Link, stream: int, now: int, why: str = "") -> None:
        instance = link.close(stream)
        if instance is not None:
            self.emit(Log("peer lost", detail=f"{link.peer} instance {instance}"))
        if link.dials and (instance is not None or why):
            # A stream that never counted says why, too: a peer that refuses us is not just away.
            detail = f"no stream to {link.peer}: {why}" if why else f"no stream to {link.peer}"
            self.emit(SetHealth(f"peer.{link.peer}", False, detail))
        if instance is not None:
            self._on_lost(link.name, instance, now)

    def _take_death(self, event: InstanceDied, now: int) -> None:
        link = self.links[event.peer]
        stream = link.bury(event.instance)
        if stream is not None:
            self._cut(link, stream, Reason.PEER_DIED, f"{event.peer} has exited", now)
        self.emit(Log("peer died", detail=f"{event.peer} instance {event.instance}"))
        self._on_died(event.peer, event.instance, now)
