"""grpc.health.v1 over named conditions.

Names: every condition, `live`, `ready`, and "" (the same as `ready`). `ready` is the
conjunction of `live` and all conditions that were not set as beside it. Everything is
NOT_SERVING until it is set. The detail of a condition travels as trailing metadata of Check
(`duplet-detail-bin`, UTF-8).

grpcio's own asyncio servicer is not used: it holds a lock while it writes to a watcher, so one
watcher that does not read stops everybody's health, and a watcher that leaves takes the
notifications of the others with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from duplet_core.errors import Reason, Unavailable
from duplet_runtime.logs import get_logger
from duplet_runtime.status import abort

DETAIL_KEY = "duplet-detail-bin"
MOST_DETAIL_CHARS = 1000
"""Longest detail sent: details travel in headers, which have room for 8 KiB. Beyond it the call
would fail, and whoever probes would take a service for dead."""
MAX_WATCHERS = 64
"""One more ends the oldest of the connection that has most: who takes all keeps out nobody."""

LIVE = "live"
READY = "ready"

_SERVING: int = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_log = get_logger("duplet.health")


class _Watcher:
    """One call of Watch. Owned by its handler."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        """Its connection."""
        self.changed = asyncio.Event()
        self.is_out = False
        """Another one has its place."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Conditions of one service, and the servicer that tells them. One event loop, no locks."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: the conditions that must all be ok before the service is ready."""
        self._conditions: dict[str, tuple[bool, str]] = dict.fromkeys(
            (LIVE, *names), (False, "not yet known")
        )
        self._beside: set[str] = set()
        """Conditions for which `ready` does not wait; its detail names them all the same."""
        self._over = False
        self._watchers: dict[_Watcher, None] = {}
        """Oldest first."""

    def set(self, name: str, ok: bool, detail: str, *, for_ready: bool = True) -> None:
        """Set one condition; a name not given before becomes a condition of `ready` too, unless
        it is said not to."""
        if self._conditions.get(name) == (ok, detail):
            return
        if not for_ready:
            self._beside.add(name)
        was_ok, was_ready = self.ok(name), self.ok(READY)
        self._conditions[name] = (ok, detail)
        if was_ok != ok:
            _log.info("health", condition=name, ok=ok, detail=detail)
        if was_ready != self.ok(READY):
            _log.info("health", condition=READY, ok=self.ok(READY), detail=self.detail(READY))
        self._wake()

    def shut_down(self) -> None:
        """Everything is NOT_SERVING from now on, and every watcher's call ends."""
        self._over = True
        self._wake()

    def ok(self, name: str) -> bool | None:
        """Whether `name` is well; None for an unknown name."""
        if name in (READY, ""):
            conditions = self._conditions.items()
            return not self._over and all(ok or n in self._beside for n, (ok, _) in conditions)
        if name not in self._conditions:
            return None
        return not self._over and self._conditions[name][0]

    def detail(self, name: str) -> str:
        """Why `name` is as it is; for `ready`, the conditions that are not met."""
        if name not in (READY, ""):
            return self._conditions[name][1]
        return "; ".join(
            f"{name}: {detail}" for name, (ok, detail) in self._conditions.items() if not ok
        )

    def details(self) -> dict[str, tuple[bool, str]]:
        """All conditions, in the order in which they were named: ok, detail."""
        return dict(self._conditions)

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no condition {request.service!r}")
        detail = self.detail(request.service)
        if len(detail) > MOST_DETAIL_CHARS:
            detail = f"{detail[: MOST_DETAIL_CHARS - 1]}…"
        context.set_trailing_metadata(((DETAIL_KEY, detail.encode()),))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        if len(self._watchers) >= MAX_WATCHERS:
            self._push_out()
        watcher = _Watcher(context.peer())
        self._watchers[watcher] = None
        try:
            sent: int | None = None
            while True:
                watcher.changed.clear()
                if watcher.is_out:
                    await abort(context, Unavailable(Reason.OVERLOADED, "too many health watchers"))
                over = self._over
                status = self._status(request.service)
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                if over:
                    return
                await watcher.changed.wait()
        finally:
            self._watchers.pop(watcher, None)

    def _push_out(self) -> None:
        counts = Counter(watcher.peer for watcher in self._watchers)
        greedy, _ = counts.most_common(1)[0]
        oldest = next(watcher for watcher in self._watchers if watcher.peer == greedy)
        del self._watchers[oldest]
        oldest.is_out = True
        oldest.changed.set()

    def _status(self, name: str) -> int:
        ok = self.ok(name)
        if ok is None:
            return _UNKNOWN
        return _SERVING if ok else _NOT_SERVING

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.changed.set()
