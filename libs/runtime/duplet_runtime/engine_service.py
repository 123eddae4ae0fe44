"""What prefill's and decode's I/O processes share: an engine, a lifeline, two peer streams.

Order of a start: engine process (before gRPC has threads) → Ready with the pool → machine →
lifeline to kvproxy → stream to kvproxy, each opened again for ever → server for lb. The
processes of a service share one fate: when the engine exits, this process exits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import grpc.aio
from pydantic import Field

from duplet_core.effects import Effect, Event, FromEngineEvent, InstanceDied, LifelineUp
from duplet_core.engine import FromEngine, Ready
from duplet_core.errors import Reason, Unavailable
from duplet_core.ids import InstanceId, Role
from duplet_pages.engine_config import Arrangement, EngineConfig
from duplet_runtime.engine_process import EngineProcess, EngineReady
from duplet_runtime.executor import Executor
from duplet_runtime.lifeline import LifelineClient
from duplet_runtime.machine import Machine
from duplet_runtime.peers import Acceptor
from duplet_runtime.server import create_server, peer_server_options, start_server, stop_server
from duplet_runtime.service import Service
from duplet_runtime.settings import ServiceSettings

STOP_GRACE_S = 1.0


class EngineSettings(ServiceSettings):
    """What a service with an engine is told."""

    model: str = "tiny"
    """Name of a built-in model."""
    pool_pages: int = Field(default=2048, ge=1)
    """Pages of the KV pool."""
    page_rows: int = Field(default=16, ge=1, le=64)
    """Rows a page; the same in prefill and decode."""
    arrangement: Arrangement = "page-major"
    """Order of the pool's memory; 'layer-major' for comparison."""
    threads: int = Field(default=1, ge=1)
    """Threads of one operator on the CPU."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests get after SIGTERM."""


class EngineService:
    """One service with an engine, from start to stop. Owns engine process and executor."""

    def __init__(self, service: Service[Any], kvproxy: Callable[[grpc.aio.Channel], Any]) -> None:
        """`kvproxy` picks our method of kvproxy's stub."""
        self.service = service
        self._kvproxy = kvproxy
        self._executor: Executor | None = None

    async def run(
        self,
        config: EngineConfig,
        make_machine: Callable[[Ready], Machine[Event, Effect]],
        register: Callable[[grpc.aio.Server, Acceptor[Any]], str],
    ) -> None:
        """Serve until the service drains.

        `register` adds the servicer for lb's streams and returns its full service name.
        """
        engine = EngineProcess.start(config, self._from_engine, self._engine_exited)
        try:
            ready = await self._await_ready(engine)
            if ready is not None:
                await self._serve(engine, ready, make_machine(ready.ready), register)
        finally:
            await engine.stop()

    async def _await_ready(self, engine: EngineProcess) -> EngineReady | None:
        """The engine's Ready; None when the service is to stop before that."""
        ready = asyncio.ensure_future(engine.ready())
        stop = asyncio.ensure_future(self.service.draining.wait())
        try:
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            return ready.result() if ready.done() else None
        finally:
            ready.cancel()
            stop.cancel()
            await asyncio.gather(ready, stop, return_exceptions=True)

    async def _serve(
        self,
        engine: EngineProcess,
        ready: EngineReady,
        machine: Machine[Event, Effect],
        register: Callable[[grpc.aio.Server, Acceptor[Any]], str],
    ) -> None:
        service = self.service
        settings = service.settings
        executor = self._executor = Executor(service, machine)
        executor.to_engine = engine.link.send
        executor.metrics.serve(settings.metrics_port)
        service.health.set("engine", True, f"{ready.ready.pages} pages, {ready.ready.slots} slots")
        io_pidfd = os.pidfd_open(os.getpid())
        lifeline = LifelineClient(
            settings.lifeline_path,
            settings.role,
            service.instance,
            {"io": io_pidfd, "engine": engine.pidfd},
            ready.ready.pool,
            ready.pool_fd,
            self._watch_kvproxy,
            lambda instance: executor.feed(InstanceDied(Role.KVPROXY, instance)),
        )
        server = create_server(peer_server_options(), service.health, service.fail)
        acceptor = executor.accept(Role.LB)
        name = register(server, acceptor)
        service.spawn(lifeline.run(), "lifeline")
        await start_server(server, [settings.peer_address(settings.role)], service.health, [name])
        await service.draining.wait()
        await executor.drain(settings.drain_s)
        acceptor.close_all(Reason.DRAINING, "the service stops")
        await stop_server(server, service.health, STOP_GRACE_S)
        executor.driver.close()
        executor.metrics.close()

    def _watch_kvproxy(self, instance: InstanceId) -> None:
        assert self._executor is not None
        self._executor.feed(LifelineUp(Role.KVPROXY, instance))
        if not self._executor.dials(Role.KVPROXY):
            # Only now: before the first lifeline a stream could only be refused.
            self._executor.dial(Role.KVPROXY, self._kvproxy)

    def _from_engine(self, message: FromEngine) -> None:
        assert self._executor is not None
        self._executor.feed(FromEngineEvent(message))

    def _engine_exited(self, code: int) -> None:
        self.service.fail(Unavailable(Reason.ENGINE_FAILED, f"the engine exited with {code}"))
