"""Runs one of core's pure machines on the event loop: events in, effects out, one timer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from duplet_core.errors import require

E = TypeVar("E")
F = TypeVar("F")
E_contra = TypeVar("E_contra", contravariant=True)
F_co = TypeVar("F_co", covariant=True)

MAX_PENDING = 65_536
"""Events that effects may feed back while one event is handled; more is a loop without end."""


class Machine(Protocol[E_contra, F_co]):
    """What core's machines have in common. Times are ns of the monotonic clock."""

    def receive(self, event: E_contra, now_ns: int) -> Sequence[F_co]: ...

    def handle_timer(self, now_ns: int) -> Sequence[F_co]: ...

    def next_timer(self) -> int | None: ...


class MachineDriver(Generic[E, F]):
    """Owns one machine: nobody else calls it. Lives in one event loop, without locks.

    Effects are executed in order and all of them before the next event; an effect that feeds
    an event back queues it. A machine that raised is never called again, for its state is
    unknown: every later feed raises too.
    """

    def __init__(
        self,
        machine: Machine[E, F],
        execute: Callable[[F], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._machine = machine
        self._execute = execute
        self._clock = clock
        self._pending: deque[E] = deque()
        self._running = False
        self._broken = False
        self._closed = False
        # Owned here; cancelled when it is re-armed and by close().
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns: int | None = None

    def feed(self, event: E) -> None:
        """Hand the machine one event and execute what it returns.

        Raises:
            InvariantError: from the machine, or because it raised before.
        """
        require(not self._broken, "the machine raised before; its state is unknown")
        require(len(self._pending) < MAX_PENDING, "effects feed events without end")
        self._pending.append(event)
        if not self._running:
            self._run()

    def close(self) -> None:
        """Disarm the timer; the machine is not called by itself any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self, timer: bool = False) -> None:
        self._running = True
        went_well = False
        try:
            if timer:
                self._execute_all(self._machine.handle_timer(self._clock()))
            while self._pending:
                event = self._pending.popleft()
                self._execute_all(self._machine.receive(event, self._clock()))
            went_well = True
        finally:
            self._running = False
            self._broken = not went_well
        self._arm()

    def _execute_all(self, effects: Sequence[F]) -> None:
        for effect in effects:
            self._execute(effect)

    def _fire(self) -> None:
        self._timer = None
        self._armed_ns = None
        if not self._broken:
            self._run(timer=True)

    def _arm(self) -> None:
        due_ns = self._machine.next_timer()
        if self._closed or (due_ns == self._armed_ns and self._timer is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_ns = due_ns
        if due_ns is not None:
            delay_s = max(0, due_ns - self._clock()) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)


class FatalErrors:
    """Reports what left the block, whoever is the caller: gRPC would answer an exception from a
    handler with a status and forget it, while the machine's state is unknown."""

    def __init__(self, on_fatal: Callable[[BaseException], None]) -> None:
        self._on_fatal = on_fatal

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._on_fatal(error)
