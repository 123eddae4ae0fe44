"""Executes the effects that every core machine may return; services add their own.

One branch an effect and no protocol state: what an effect means was decided in core.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc.aio

from duplet_core.effects import (
    Close,
    Count,
    Drain,
    Drained,
    Effect,
    Event,
    Exit,
    Log,
    Received,
    Send,
    SetHealth,
    ToEngineEffect,
)
from duplet_core.engine import ToEngine
from duplet_core.errors import Reason, require
from duplet_core.ids import Role
from duplet_core.messages import Admit, Message, Prefill
from duplet_runtime.counters import COUNTERS, EVERYWHERE
from duplet_runtime.machine import FatalErrors, Machine, MachineDriver
from duplet_runtime.metrics import Metrics
from duplet_runtime.peer_stream import OUTBOX_ANSWERS, OUTBOX_MESSAGES
from duplet_runtime.peers import Acceptor, Dialer, PeerEvent
from duplet_runtime.service import Service
from duplet_wire.streams import CODECS

EXIT_FOR_PROOF = 75
"""Exit code of a process whose exit is the proof that others wait for (S9)."""

ADMISSION = "From a request's arrival until it is admitted and handed on"


class PeerEnd(Protocol):
    """Our end of the streams with one peer: a Dialer or an Acceptor."""

    def send(self, stream: int, message: Message) -> None: ...

    def close(self, stream: int, reason: Reason, detail: str) -> None: ...


class Executor:
    """Joins one machine with the process around it. Owns the driver; lives in one event loop."""

    def __init__(self, service: Service[Any], machine: Machine[Event, Effect]) -> None:
        self.service = service
        self.metrics = Metrics(service.settings.role)
        for name, meaning in {**EVERYWHERE, **COUNTERS[service.settings.role]}.items():
            self.metrics.counter(name, meaning)
        self.driver: MachineDriver[Event, Effect] = MachineDriver(machine, self.execute)
        self.to_engine: Callable[[ToEngine], None] | None = None
        self._ends: dict[Role, PeerEnd] = {}
        self._drained = asyncio.Event()

    def feed(self, event: Event) -> None:
        """Hand the machine an event; an exception on the way ends the service."""
        with FatalErrors(self.service.fail):
            self.driver.feed(event)

    def execute(self, effect: Effect) -> None:
        """Carry out one effect."""
        if isinstance(effect, Send):
            self._ends[effect.peer].send(effect.stream, effect.message)
        elif isinstance(effect, ToEngineEffect):
            assert self.to_engine is not None
            self.to_engine(effect.message)
        elif isinstance(effect, Count):
            self.metrics.count(effect.name, effect.by)
        elif isinstance(effect, Log):
            self._log(effect)
        elif isinstance(effect, SetHealth):
            health = self.service.health
            health.set(effect.name, effect.ok, effect.detail, for_ready=effect.for_ready)
        elif isinstance(effect, Close):
            self._ends[effect.peer].close(effect.stream, effect.reason, effect.detail)
        elif isinstance(effect, Drained):
            self._drained.set()
        elif isinstance(effect, Exit):
            self._exit(effect)
        else:
            self.execute_own(effect)

    def execute_own(self, effect: Effect) -> None:
        """An effect of this service alone."""
        require(False, f"no branch for {type(effect).__name__}")

    def dials(self, peer: Role) -> bool:
        """Whether `dial` was called for this peer."""
        return peer in self._ends

    def dial(
        self, peer: Role, method: Callable[[grpc.aio.Channel], Any], address: str | None = None
    ) -> None:
        """Keep a stream to `peer` open for as long as the service runs."""
        own = self.service.settings.role
        codec = CODECS[own, peer]
        target = self.service.settings.peer_address(peer) if address is None else address
        ways = (method, codec.encode, codec.decode, self.feed)
        dialer: Dialer[Any] = Dialer(peer, target, *ways, **_waiting(codec.together))
        self._ends[peer] = dialer
        self.service.spawn(dialer.run(), f"dialer {peer}")

    def accept(self, peer: Role) -> Acceptor[Any]:
        """Take streams of `peer`; the servicer's method awaits the acceptor's `serve`."""
        return self._accept(peer, self.service.settings.role, peer)

    def accept_as(self, role: Role) -> Acceptor[Any]:
        """Take lb's streams with `role`, which the machine calls by the role that it plays."""
        return self._accept(role, role, Role.LB)

    def _accept(self, name: Role, own: Role, peer: Role) -> Acceptor[Any]:
        codec = CODECS[own, peer]
        feed: Callable[[PeerEvent], None] = self.feed
        decode = codec.decode
        if peer is Role.LB:
            decode, feed = self._time_admission(decode)
        ways = (codec.encode, decode, feed, self.service.fail)
        acceptor: Acceptor[Any] = Acceptor(name, *ways, **_waiting(codec.together))
        self._ends[name] = acceptor
        return acceptor

    def _time_admission(
        self, decode: Callable[[Any], Message]
    ) -> tuple[Callable[[Any], Message], Callable[[PeerEvent], None]]:
        """`decode` and `feed` of a stream of lb's, with a clock around both.

        A stream decodes a message and hands it on without giving the loop a turn in between, so
        one variable holds the time at which the message was taken off its stream.
        """
        taken_ns = 0
        admission = self.metrics.histogram("admission_seconds", ADMISSION)

        def decode_timed(proto: Any) -> Message:
            nonlocal taken_ns
            taken_ns = time.monotonic_ns()
            return decode(proto)

        def feed_timed(event: PeerEvent) -> None:
            self.feed(event)
            if isinstance(event, Received) and isinstance(event.message, Admit | Prefill):
                admission.observe((time.monotonic_ns() - taken_ns) / 1e9)

        return decode_timed, feed_timed

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new and wait until nothing runs; False when the limit passed first."""
        self.feed(Drain())
        try:
            await wait_at_most(self._drained.wait(), limit_s)
        except TimeoutError:
            self.service.log.warning("drain limit passed", limit_s=limit_s)
            return False
        return True

    def _log(self, effect: Log) -> None:
        fields = {"request_id": effect.request_id, "transfer": effect.transfer}
        fields["detail"] = effect.detail
        self.service.log.info(effect.event, **{k: v for k, v in fields.items() if v})

    def _exit(self, effect: Exit) -> None:
        # At once: whatever we would still tidy up could hang, and others wait for this exit.
        self.service.log.critical("leaving", why=effect.detail)
        logging.shutdown()
        os._exit(EXIT_FOR_PROOF)


def _waiting(together: bool) -> dict[str, Any]:
    """How messages of a stream wait, and how many may."""
    return {"together": together, "outbox": OUTBOX_ANSWERS if together else OUTBOX_MESSAGES}


async def wait_at_most(work: Awaitable[Any], limit_s: float) -> None:
    """Wait for `work`.

    Raises:
        TimeoutError: the limit passed first.
    """
    async with asyncio.timeout(limit_s):
        await work
