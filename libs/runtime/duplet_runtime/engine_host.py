"""An I/O process with an engine, from start to stop: engine, machine, server for lb's streams.

Order of a start: engine process (before gRPC has threads) → Ready with the pool → machine →
what the subclass adds → server for lb. The two processes share one fate: when the engine
exits, this process exits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import grpc.aio
from pydantic import Field, ValidationInfo, field_validator

from duplet_core.effects import Effect, Event, FromEngineEvent
from duplet_core.engine import FromEngine, Ready
from duplet_core.errors import Reason, Unavailable
from duplet_core.ids import Role
from duplet_pages.engine_config import (
    SPEAKING_MODEL,
    Arrangement,
    Device,
    Dtype,
    EngineConfig,
    check_model,
)
from duplet_runtime.engine_meter import EngineMeter
from duplet_runtime.engine_process import EngineProcess, EngineReady
from duplet_runtime.executor import Executor
from duplet_runtime.fate import describe_exit
from duplet_runtime.machine import Machine
from duplet_runtime.metrics import Metrics
from duplet_runtime.peers import Acceptor
from duplet_runtime.server import create_server, peer_server_options, running_server
from duplet_runtime.service import Service
from duplet_runtime.settings import ServiceSettings

STOP_GRACE_S = 1.0

M = TypeVar("M", bound=Machine[Event, Effect])
Register = Callable[[grpc.aio.Server, Acceptor[Any]], str]
"""Adds the servicer for lb's streams of one role; returns its full service name."""


def by_device(*, cpu: Any, cuda: Any, **limits: Any) -> Any:
    """A setting's field whose default follows from the setting `device`."""
    return Field(
        default_factory=lambda known: cuda if known["device"] == "cuda" else cpu,
        validate_default=True,
        **limits,
    )


class EngineSettings(ServiceSettings):
    """What a service with an engine is told."""

    device: Device = "cpu"
    """'cuda': the GPU that CUDA_VISIBLE_DEVICES names for this service."""
    model: str = SPEAKING_MODEL
    """A built-in model ('wren', which speaks, or 'tiny', which has random weights),
    'random:<shape>', or the path of a checkpoint's directory."""
    dtype: Dtype = by_device(cpu="float32", cuda="bfloat16")
    """Of weights, arithmetic and KV; the same in prefill and decode."""
    pool_pages: int = by_device(cpu=2048, cuda=0, ge=0)
    """Pages of the KV pool; 0, on a GPU: as many as fit."""
    page_rows: int = Field(default=16, ge=1, le=64)
    """Rows a page; the same in prefill and decode."""
    arrangement: Arrangement = "page-major"
    """Order of the pool's memory; 'layer-major' for comparison."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads of one operator on the CPU."""
    overlap: bool = True
    """On a GPU: launch the next step before the last one is read."""
    drain_s: float = Field(default=30.0, ge=0, le=86_400, allow_inf_nan=False)
    """Seconds that running requests get after SIGTERM."""

    @field_validator("model")
    @classmethod
    def _is_there(cls, value: str) -> str:
        check_model(value)
        return value

    @field_validator("pool_pages")
    @classmethod
    def _needs_pages(cls, value: int, info: ValidationInfo) -> int:
        if value == 0 and info.data.get("device") == "cpu":
            raise ValueError("only on a GPU a pool has as many pages as fit")
        return value


class EngineHost:
    """Owns engine process and executor. A subclass says how lb's streams reach the machine and
    who else hears of the engine."""

    def __init__(self, service: Service[Any]) -> None:
        self.service = service
        self.executor: Executor | None = None
        """From Ready on."""
        self._meter: EngineMeter | None = None

    def accept(self, executor: Executor, role: Role) -> Acceptor[Any]:
        """Our end of lb's streams on which we play `role`."""
        raise NotImplementedError

    def join(self, engine: EngineProcess, ready: EngineReady, executor: Executor) -> None:
        """The engine is ready and lb is not heard yet. `ready.pool_fd` is the subclass's."""
        raise NotImplementedError

    async def run(
        self,
        config: EngineConfig,
        make_machine: Callable[[Ready], M],
        observe: Callable[[Metrics, M], None],
        plays: Mapping[Role, Register],
    ) -> None:
        """Serve until the service drains.

        `observe` adds the gauges of the machine. `plays`: the roles that lb finds here, each on
        its own socket.
        """
        engine = EngineProcess.start(config, self._from_engine, self._engine_exited)
        try:
            ready = await self._await_ready(engine)
            if ready is not None:
                machine = make_machine(ready.ready)
                executor = self.executor = Executor(self.service, machine)
                observe(executor.metrics, machine)
                does = {"prefills": Role.PREFILL in plays, "decodes": Role.DECODE in plays}
                self._meter = EngineMeter(executor.metrics, **does)
                await self._serve(engine, ready, executor, plays)
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
        executor: Executor,
        plays: Mapping[Role, Register],
    ) -> None:
        service = self.service
        settings = service.settings
        executor.to_engine = engine.link.send
        executor.metrics.serve(settings.metrics_port, settings.metrics_host)
        service.health.set("engine", True, f"{ready.ready.pages} pages, {ready.ready.slots} slots")
        server = create_server(peer_server_options(), service.health, service.fail)
        acceptors = {role: self.accept(executor, role) for role in plays}
        names = [register(server, acceptors[role]) for role, register in plays.items()]
        addresses = [settings.peer_address(role) for role in plays]
        self.join(engine, ready, executor)
        async with running_server(server, addresses, service.health, names, STOP_GRACE_S):
            await service.draining.wait()
            await executor.drain(settings.drain_s)
            for acceptor in acceptors.values():
                acceptor.close_all(Reason.DRAINING, "the service stops")
        executor.driver.close()
        executor.metrics.close()

    def _from_engine(self, message: FromEngine) -> None:
        assert self.executor is not None and self._meter is not None
        self._meter.note(message)
        self.executor.feed(FromEngineEvent(message))

    def _engine_exited(self, code: int) -> None:
        how = describe_exit(code)
        self.service.fail(Unavailable(Reason.ENGINE_FAILED, f"the engine ended: {how}"))
