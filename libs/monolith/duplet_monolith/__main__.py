"""Starts the monolith's host, I/O process: `python -m duplet_monolith`.

lb finds prefill and decode here, both on their usual sockets. There is no kvproxy: a request's
KV stays in the pages in which it was computed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc.aio

from duplet.decode.v1 import decode_pb2_grpc
from duplet.prefill.v1 import prefill_pb2_grpc
from duplet_core.engine import Ready
from duplet_core.host import HostMachine
from duplet_core.host_state import HostConfig
from duplet_core.ids import Role
from duplet_pages.engine_config import EngineConfig
from duplet_pages.prefix import RadixIndex
from duplet_pages.spec import ModelSpec
from duplet_runtime.engine_host import EngineHost, EngineSettings, by_device
from duplet_runtime.engine_process import EngineProcess, EngineReady
from duplet_runtime.executor import Executor
from duplet_runtime.metrics import Metrics
from duplet_runtime.peers import Acceptor
from duplet_runtime.service import Service, run_service
from duplet_runtime.settings import MONOLITH, load_settings_or_exit

CONDITIONS = ("engine",)


class MonolithSettings(EngineSettings):
    """Settings of the monolith's host, environment prefix DUPLET_MONOLITH_."""

    role: ClassVar[str] = MONOLITH

    slots: int = by_device(cpu=16, cuda=64, ge=1, le=4096)
    """Most streams at once."""
    chunk_rows: int = by_device(cpu=256, cuda=512, ge=1, le=1_000_000)
    """Most prompt rows between two decode steps; more than any prompt has: whole prompts."""
    prefix_cache: bool = True
    """Keep computed pages and share them between prompts that begin with equal rows."""


class Peer(prefill_pb2_grpc.PrefillPeerServicer, decode_pb2_grpc.DecodePeerServicer):
    """lb's streams with one of the roles: both services have the same one method."""

    def __init__(self, acceptor: Acceptor[Any]) -> None:
        self._acceptor = acceptor

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        await self._acceptor.serve(context)


class MonolithHost(EngineHost):
    """lb's two streams lead to one machine, which tells them apart by the role."""

    def accept(self, executor: Executor, role: Role) -> Acceptor[Any]:
        return executor.accept_as(role)

    def join(self, engine: EngineProcess, ready: EngineReady, executor: Executor) -> None:
        os.close(ready.pool_fd)  # nobody else maps the pool


def _register_prefill(server: grpc.aio.Server, acceptor: Acceptor[Any]) -> str:
    prefill_pb2_grpc.add_PrefillPeerServicer_to_server(Peer(acceptor), server)
    return "duplet.prefill.v1.PrefillPeer"


def _register_decode(server: grpc.aio.Server, acceptor: Acceptor[Any]) -> str:
    decode_pb2_grpc.add_DecodePeerServicer_to_server(Peer(acceptor), server)
    return "duplet.decode.v1.DecodePeer"


def observe(metrics: Metrics, machine: HostMachine) -> None:
    """Add the host's gauges."""
    stays = machine.stays
    metrics.gauge("pages_total", "Pages of the pool", lambda: stays.pages.total)
    metrics.gauge("pages_free", "Pages that nobody holds", lambda: stays.pages.free)
    metrics.gauge("pages_cached", "Pages that the prefix cache keeps", lambda: len(stays.index))
    metrics.gauge("pages_reserved", "Pages that are spoken for", lambda: stays.reserved)
    metrics.gauge(
        "requests", "Requests that hold pages or await some", lambda: len(stays.by_transfer)
    )


async def serve(service: Service[MonolithSettings]) -> None:
    """Run the host until it has drained."""
    settings = service.settings
    config = EngineConfig(
        role="monolith",
        device=settings.device,
        model=settings.model,
        dtype=settings.dtype,
        pool_pages=settings.pool_pages,
        page_rows=settings.page_rows,
        slots=settings.slots,
        chunk_rows=settings.chunk_rows,
        arrangement=settings.arrangement,
        threads=settings.threads,
        overlap=settings.overlap,
    )

    def make_machine(ready: Ready) -> HostMachine:
        spec = ModelSpec.from_json(ready.spec)
        index = RadixIndex(ready.page_rows, spec.columns) if settings.prefix_cache else None
        return HostMachine(
            service.instance,
            HostConfig(
                pages=ready.pages,
                page_rows=ready.page_rows,
                slots=ready.slots,
                longest_sequence=spec.longest_sequence,
                spec=ready.spec,
            ),
            index,
        )

    plays = {Role.PREFILL: _register_prefill, Role.DECODE: _register_decode}
    await MonolithHost(service).run(config, make_machine, observe, plays)


def main() -> int:
    return run_service(load_settings_or_exit(MonolithSettings), serve, CONDITIONS)


if __name__ == "__main__":
    sys.exit(main())
