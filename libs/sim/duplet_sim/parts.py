"""What a world is made of: processes, streams, copies, clients.

A world owns all of its parts. A fork of a world shares them and copies a part before it
changes it (`owner` says whose the part is), so a search can keep many worlds.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from duplet_core.effects import Submit
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.messages import Message
from duplet_sim.content import EMPTY, Rows
from duplet_sim.engines import DecodeEngine, PrefillEngine
from duplet_sim.nodes import Node
from duplet_sim.staging import Staging

ACCEPTOR = 0
DIALER = 1
"""The two sides of a stream; `queues[side]` is what that side has still to take."""

DIALED: dict[Role, tuple[Role, ...]] = {
    Role.LB: (Role.PREFILL, Role.DECODE),
    Role.PREFILL: (Role.KVPROXY,),
    Role.DECODE: (Role.KVPROXY,),
    Role.KVPROXY: (),
}
"""Whom each service dials."""

WATCHED: dict[Role, tuple[Role, ...]] = {
    Role.LB: (),
    Role.PREFILL: (Role.KVPROXY,),
    Role.DECODE: (Role.KVPROXY,),
    Role.KVPROXY: (Role.PREFILL, Role.DECODE),
}
"""Whose death each service is told by the kernel."""

StreamKey = tuple[InstanceId, Role, int]
"""Dialer, dialed service, the dialer's number."""


class Stream:
    """One peer stream: first in, first out in both directions while it lives."""

    __slots__ = (
        "acceptor", "broken", "closed", "dialer", "due", "held", "local", "name", "number",
        "owner", "queues",
    )  # fmt: skip

    def __init__(self, owner: object, name: StreamKey, acceptor: InstanceId) -> None:
        self.owner = owner
        self.name = name
        self.dialer = name[0]
        self.acceptor = acceptor
        self.local: tuple[tuple[Role, int], tuple[Role, int]] = ((Role.LB, 0), (Role.LB, 0))
        """For each side: the peer and the number under which its machine knows the stream."""
        self.queues: tuple[list[Message], list[Message]] = ([], [])
        self.closed = [False, False]
        """Sides that were told the end, or have exited."""
        self.due = [0, 0]
        """When the last message queued for this side arrives: first in, first out."""
        self.held = [0, 0]
        """Until when a broken stream holds back what this side has still to take."""
        self.broken = False
        """Nothing sent from now on arrives; what was sent before may, until a side closes."""
        self.number: int | None = None
        """Stands for the state, in one search; None: not looked up since the last change."""

    def copy(self, owner: object) -> Stream:
        other = Stream(owner, self.name, self.acceptor)
        other.local = self.local
        other.queues = (list(self.queues[0]), list(self.queues[1]))
        other.closed = list(self.closed)
        other.broken = self.broken
        return other

    def state(self) -> Hashable:
        """All that counts; queued messages are compared by identity."""
        queues = (tuple(map(id, self.queues[0])), tuple(map(id, self.queues[1])))
        return (self.dialer, self.local, self.acceptor, queues, tuple(self.closed), self.broken)


class Process:
    """One life of a service: its I/O process and, where it has one, its engine process."""

    def __init__(self, owner: object, role: Role, instance: InstanceId, node: Node) -> None:
        self.owner = owner
        self.role = role
        self.instance = instance
        self.node = node
        self.engine: PrefillEngine | DecodeEngine | None = None
        self.rows: list[Rows] = []
        """True contents of its pool; stay while kvproxy maps them."""
        self.page_rows = 1
        self.staging: Staging | None = None
        """kvproxy, where its copies are staged."""
        self.outbox: list[Any] = []
        """From the engine, not yet taken by the I/O process."""
        self.stopped = False
        """By SIGSTOP: does nothing, its queued copies go on."""
        self.exited = False
        self.asked = False
        """Asked to drain."""
        self.drained = False
        self.leaves = False
        """Its machine asked to exit."""
        self.red: frozenset[str] = frozenset()
        """Names of conditions that are bad."""
        self.timed = False
        """Its machine has timers."""
        self.skew = 0
        self.dialed = 0
        self.accepted = 0
        self.dialing: dict[Role, StreamKey] = {}
        """The stream dialed to each service, until its end was told."""
        self.streams: dict[tuple[Role, int], StreamKey] = {}
        self.watching: frozenset[InstanceId] = frozenset()
        self.mapped: frozenset[InstanceId] = frozenset()
        """kvproxy: pools that it has mapped."""
        self.acked: frozenset[TransferId] = frozenset()
        """kvproxy: transfers of which it has told decode that nothing can write any more."""
        self.charged: frozenset[tuple[TransferId, InstanceId]] = frozenset()
        """kvproxy: (transfer, prefill) of which it has said SourceReleased."""
        self.landed: frozenset[TransferId] = frozenset()
        """kvproxy: transfers of which it has told prefill that they landed."""
        self.granted: tuple[GrantTold, ...] = ()
        """decode: the grants that it has told. No part of the state: which of them are open is told
        by `acked`, and by who lives."""
        self.told: tuple[int, Any] = (0, None)
        """On which stream, and what: prefill to lb, why it refuses; kvproxy to decode, that it
        leaves."""
        self.number: int | None = None
        """Stands for the state, in one search; None: not looked up since the last change."""

    def copy(self, owner: object) -> Process:
        other = Process.__new__(Process)
        other.__dict__.update(self.__dict__)
        other.owner = owner
        if self.engine is not None:
            other.engine = self.engine.copy()
        other.rows = list(self.rows)
        other.outbox = list(self.outbox)
        other.dialing = dict(self.dialing)
        other.streams = dict(self.streams)
        return other

    @property
    def runs(self) -> bool:
        return not self.exited and not self.stopped

    def state(self) -> Hashable:
        """All that counts; nodes are compared by identity."""
        return (
            self.instance,
            id(self.node) if not self.exited else 0,
            self.engine.key() if self.engine is not None and not self.exited else None,
            tuple(self.rows),
            tuple(self.outbox),
            (self.stopped, self.exited, self.asked, self.drained),
            (self.red, self.watching, self.mapped, self.acked, self.charged),
            (tuple(self.dialing.items()), self.dialed, self.accepted),
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """One queued copy in the copy engine: an actor of its own, that outlives what ordered it."""

    writer: InstanceId
    number: int
    transfer: TransferId
    source: InstanceId
    source_pages: tuple[int, ...]
    dest: InstanceId
    dest_pages: tuple[int, ...]
    start: int
    count: int
    written: int = 0
    """Rows that are in place; a copy may stand half done."""
    told: bool = False
    """Its end was reported as unknown: it may still write."""


@dataclass(frozen=True, slots=True)
class GrantTold:
    """A grant as decode said it. Open until its writer has told an end of it, or has exited."""

    transfer: TransferId
    writer: InstanceId
    pages: tuple[int, ...]
    told_ns: int
    """By decode's clock."""


@dataclass(frozen=True, slots=True)
class Client:
    """A request that was submitted and has not ended."""

    submit: Submit
    content: int
    lb: InstanceId
    rows: int = 0
    """Output rows that it got."""


def empty_pool(pages: int, page_rows: int) -> list[Rows]:
    return [(EMPTY,) * page_rows] * pages
