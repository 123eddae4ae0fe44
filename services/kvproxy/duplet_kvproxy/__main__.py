"""Starts kvproxy: `python -m duplet_kvproxy`."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from pydantic import Field

from duplet.kvproxy.v1 import kvproxy_pb2_grpc
from duplet_core.effects import CloseMapping, Effect, InstanceDied, LifelineUp, StartCopy
from duplet_core.errors import InvalidInput, Reason
from duplet_core.ids import Role
from duplet_core.writer import WriterMachine
from duplet_core.writer_state import WriterConfig
from duplet_kvproxy.mover import Mover
from duplet_memory.layout import PoolDescription
from duplet_memory.pool import Pool, map_pool
from duplet_runtime.executor import Executor
from duplet_runtime.lifeline import LifelinePeer, LifelineServer
from duplet_runtime.peers import Acceptor
from duplet_runtime.server import create_server, peer_server_options, start_server, stop_server
from duplet_runtime.service import Service, run_service
from duplet_runtime.settings import ServiceSettings, load_settings_or_exit

CONDITIONS = ("writer",)
STOP_GRACE_S = 1.0


class KvproxySettings(ServiceSettings):
    """Settings of kvproxy, environment prefix DUPLET_KVPROXY_."""

    role: ClassVar[Role] = Role.KVPROXY

    withheld_limit_s: float = Field(default=5.0, gt=0)
    """One end of a transfer withheld for so long turns health red, then kvproxy exits (S9)."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that granted transfers get after SIGTERM."""
    copy_delay_s: float = Field(default=0.0, ge=0)
    """Fault tests only: every copy takes at least so long."""


class KvproxyExecutor(Executor):
    """Adds the effects on copies and mappings. Owns the mover."""

    def __init__(self, service: Service[Any], machine: WriterMachine) -> None:
        super().__init__(service, machine)
        self.mover = Mover(self.feed, service.settings.copy_delay_s)

    def execute_own(self, effect: Effect) -> None:
        if isinstance(effect, StartCopy):
            self.mover.start_copy(effect)
        elif isinstance(effect, CloseMapping):
            self.mover.close_pool(effect.instance)
        else:
            super().execute_own(effect)

    def take_lifeline(self, peer: LifelinePeer) -> None:
        """Map the pool that came with a lifeline; without a sound one the peer stays refused."""
        try:
            description = PoolDescription.from_json(peer.pool)
            # Prefill's pool is only read: the kernel refuses a write to it from here.
            pool = map_pool(peer.pool_fd, description, writable=peer.role is Role.DECODE)
        except (InvalidInput, OSError) as error:
            self.service.log.warning(
                "pool refused", peer=peer.role, peer_instance=peer.instance, detail=str(error)
            )
            return
        finally:
            if peer.pool_fd >= 0:
                os.close(peer.pool_fd)
        self._register(peer, pool)

    def _register(self, peer: LifelinePeer, pool: Pool) -> None:
        self.mover.add_pool(peer.instance, pool)
        described = pool.description
        self.feed(LifelineUp(peer.role, peer.instance, described.pages, described.page_rows))


class KvProxy(kvproxy_pb2_grpc.KvProxyServicer):
    """prefill's and decode's streams."""

    def __init__(self, prefill: Acceptor[Any], decode: Acceptor[Any]) -> None:
        self._prefill = prefill
        self._decode = decode

    async def ConnectPrefill(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        await self._prefill.serve(context)

    async def ConnectDecode(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        await self._decode.serve(context)


async def serve(service: Service[KvproxySettings]) -> None:
    """Run kvproxy until it has drained. The unit's lock is held for life (S4)."""
    settings = service.settings
    config = WriterConfig(withheld_limit_ns=round(settings.withheld_limit_s * 1e9))
    executor = KvproxyExecutor(service, WriterMachine(service.instance, config))
    executor.metrics.serve(settings.metrics_port)
    service.health.set("writer", True, "no end is withheld")
    server = create_server(peer_server_options(), service.health, service.fail)
    ends = (executor.accept(Role.PREFILL), executor.accept(Role.DECODE))
    kvproxy_pb2_grpc.add_KvProxyServicer_to_server(KvProxy(*ends), server)
    assert service.lock is not None
    lifelines = LifelineServer(
        settings.lifeline_path,
        service.lock,
        service.instance,
        executor.take_lifeline,
        lambda role, instance: executor.feed(InstanceDied(role, instance)),
    )
    address = settings.peer_address(Role.KVPROXY)
    await start_server(server, [address], service.health, ["duplet.kvproxy.v1.KvProxy"])
    await service.draining.wait()
    await executor.drain(settings.drain_s)
    for end in ends:
        end.close_all(Reason.DRAINING, "the service stops")
    await stop_server(server, service.health, STOP_GRACE_S)
    lifelines.close()
    executor.driver.close()
    executor.mover.close()
    executor.metrics.close()


def main() -> int:
    return run_service(load_settings_or_exit(KvproxySettings), serve, CONDITIONS)


if __name__ == "__main__":
    sys.exit(main())
