"""Starts prefill's I/O process: `python -m duplet_prefill`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc.aio

from duplet.kvproxy.v1 import kvproxy_pb2_grpc
from duplet.prefill.v1 import prefill_pb2_grpc
from duplet_core.engine import Ready
from duplet_core.ids import Role
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_state import PrefillConfig
from duplet_pages.engine_config import EngineConfig
from duplet_pages.prefix import RadixIndex
from duplet_pages.spec import ModelSpec
from duplet_runtime.engine_host import EngineSettings, by_device
from duplet_runtime.engine_service import EngineService
from duplet_runtime.metrics import Metrics
from duplet_runtime.peers import Acceptor
from duplet_runtime.service import Service, run_service
from duplet_runtime.settings import load_settings_or_exit

CONDITIONS = ("engine", "peer.kvproxy")


class PrefillSettings(EngineSettings):
    """Settings of prefill, environment prefix DUPLET_PREFILL_."""

    role: ClassVar[Role] = Role.PREFILL

    chunk_rows: int = by_device(cpu=256, cuda=2_048, ge=1, le=1_000_000)
    """Most prompt rows one forward pass computes."""
    prefix_cache: bool = True
    """Keep computed pages and share them between prompts that begin with equal rows."""


class PrefillPeer(prefill_pb2_grpc.PrefillPeerServicer):
    """lb's streams."""

    def __init__(self, acceptor: Acceptor[Any]) -> None:
        self._acceptor = acceptor

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        await self._acceptor.serve(context)


def _register(server: grpc.aio.Server, acceptor: Acceptor[Any]) -> str:
    prefill_pb2_grpc.add_PrefillPeerServicer_to_server(PrefillPeer(acceptor), server)
    return "duplet.prefill.v1.PrefillPeer"


def observe(metrics: Metrics, machine: PrefillMachine) -> None:
    """Add prefill's gauges."""
    jobs = machine.jobs
    metrics.gauge("pages_total", "Pages of the pool", lambda: jobs.pages.total)
    metrics.gauge("pages_free", "Pages that nobody holds", lambda: jobs.pages.free)
    metrics.gauge("pages_cached", "Pages that the prefix cache keeps", lambda: len(jobs.index))
    metrics.gauge(
        "transfers", "Transfers that hold pages or wait for them", lambda: len(jobs.by_transfer)
    )
    metrics.gauge("queued", "Prompts that wait for pages", lambda: len(jobs.queue))
    metrics.gauge("computing", "Prompts that the engine has", lambda: len(jobs.by_seq))
    kvproxy = machine.links[Role.KVPROXY]
    metrics.gauge("writers", "Living instances of kvproxy that are watched", lambda: kvproxy.living)


async def serve(service: Service[PrefillSettings]) -> None:
    """Run prefill until it has drained."""
    settings = service.settings
    config = EngineConfig(
        role="prefill",
        device=settings.device,
        model=settings.model,
        dtype=settings.dtype,
        pool_pages=settings.pool_pages,
        page_rows=settings.page_rows,
        chunk_rows=settings.chunk_rows,
        arrangement=settings.arrangement,
        threads=settings.threads,
        overlap=settings.overlap,
    )

    def make_machine(ready: Ready) -> PrefillMachine:
        spec = ModelSpec.from_json(ready.spec)
        index = RadixIndex(ready.page_rows, spec.columns) if settings.prefix_cache else None
        config = PrefillConfig(ready.pages, ready.page_rows, ready.spec)
        return PrefillMachine(service.instance, config, index)

    host = EngineService(service, lambda c: kvproxy_pb2_grpc.KvProxyStub(c).ConnectPrefill)
    await host.run(config, make_machine, observe, {Role.PREFILL: _register})


def main() -> int:
    return run_service(load_settings_or_exit(PrefillSettings), serve, CONDITIONS)


if __name__ == "__main__":
    sys.exit(main())
