"""Starts kvproxy: `python -m duplet_kvproxy`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from pydantic import Field, field_validator

from duplet.kvproxy.v1 import kvproxy_pb2_grpc
from duplet_core.effects import (
    CancelCopy,
    CloseMapping,
    CopyDone,
    Effect,
    Exit,
    InstanceDied,
    LifelineUp,
    OtherVersion,
    StartCopy,
)
from duplet_core.errors import InvalidInput, Reason
from duplet_core.ids import Role
from duplet_core.writer import WriterMachine
from duplet_core.writer_state import WriterConfig
from duplet_kvproxy.choice import Choice, TransportRefused, parse_transports
from duplet_kvproxy.mover import Mover
from duplet_memory.cuda_driver import CudaError
from duplet_memory.cuda_pool import MappedPool, map_cuda_pool
from duplet_memory.layout import PoolDescription
from duplet_memory.pool import Pool, map_pool
from duplet_runtime.executor import Executor
from duplet_runtime.lifeline import LifelinePeer, LifelineServer
from duplet_runtime.peers import Acceptor
from duplet_runtime.server import create_server, peer_server_options, running_server
from duplet_runtime.service import Service, run_service
from duplet_runtime.settings import ServiceSettings, SettingsError, load_settings_or_exit

CONDITIONS = ("writer", "transport")
STOP_GRACE_S = 1.0
RED_BEFORE_EXIT_S = 0.25
SWITCH_INTERVAL_S = 0.0001
"""So long, and not Python's 5 ms, may the event loop keep the mover from its next copy."""


class KvproxySettings(ServiceSettings):
    """Settings of kvproxy, environment prefix DUPLET_KVPROXY_."""

    role: ClassVar[Role] = Role.KVPROXY

    withheld_limit_s: float = Field(default=5.0, gt=0, le=86_400, allow_inf_nan=False)
    """One end of a transfer withheld for so long turns health red, then kvproxy exits (S9)."""
    withheld_after_s: float = Field(default=0.5, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds after which an end that copies keep from being told counts as withheld; three such
    turn health red, then kvproxy exits (S9). Copies take milliseconds."""
    drain_s: float = Field(default=30.0, ge=0, le=86_400, allow_inf_nan=False)
    """Seconds that granted transfers get after SIGTERM."""
    transports: str = "shm"
    """Transports that are allowed, in order of preference, by commas: shm (CPU pools), pages,
    push, pull, staged (GPU pools), host (GPUs without peer access). Nothing else is used."""

    @field_validator("transports")
    @classmethod
    def _known_transports(cls, value: str) -> str:
        parse_transports(value)
        return value


class KvproxyExecutor(Executor):
    """Adds the effects on copies and mappings. Owns the mover."""

    def __init__(self, service: Service[Any], machine: WriterMachine, choice: Choice) -> None:
        super().__init__(service, machine)
        self._choice = choice
        self._writer = machine
        machine.transport = f"allowed: {', '.join(choice.allowed)}"
        self._pools: dict[Role, PoolDescription] = {}
        """Of the newest instance of each role: what the transport in use follows from."""
        self.mover = Mover(self._copy_done, choice, self._mover_failed)
        self._copies = {
            name: self.metrics.counter("copies", "Copies that began", {"transport": name})
            for name in choice.allowed
        }
        self._copied_bytes = self.metrics.counter("copied_bytes", "Bytes of copies that began")
        self._copy = self.metrics.histogram("copy_seconds", "From a copy's begin to its end")
        by_id, pools = machine.transfers.by_id, machine.pools
        self.metrics.gauge("transfers", "Transfers with a grant or a Move", lambda: len(by_id))
        withheld = "Ends of transfers that cannot be told though their copies should be done"
        self.metrics.gauge("ends_withheld", withheld, lambda: machine.ends_withheld)
        self.metrics.gauge("pools", "Pools that are mapped", lambda: len(pools))

    def execute_own(self, effect: Effect) -> None:
        if isinstance(effect, StartCopy):
            self.mover.start_copy(effect)
        elif isinstance(effect, CancelCopy):
            self.mover.cancel_copy(effect.copy)
        elif isinstance(effect, CloseMapping):
            self.mover.close_pool(effect.instance)
        else:
            super().execute_own(effect)

    def _copy_done(self, done: CopyDone) -> None:
        counts = self.mover.counts
        for name, counter in self._copies.items():
            counter.value = counts.copies[name]
        self._copied_bytes.value = counts.copied_bytes
        if done.started_ns:
            self._copy.observe((done.done_ns - done.started_ns) / 1e9)
        self.feed(done)

    def take_lifeline(self, peer: LifelinePeer) -> bool:
        """Map the pool that came with a lifeline; False: without a sound one the peer is refused,
        and asks again."""
        try:
            description = PoolDescription.from_json(peer.pool)
            pool = self._map(peer, description)
        except (InvalidInput, CudaError, OSError) as error:
            self.service.log.warning(
                "pool refused", peer=peer.role, peer_instance=peer.instance, detail=str(error)
            )
            return False
        finally:
            if peer.pool_fd >= 0:
                os.close(peer.pool_fd)
        self._register(peer, pool)
        return True

    def _map(self, peer: LifelinePeer, description: PoolDescription) -> Pool | MappedPool:
        if description.handle != "memfd":
            if not self._choice.devices:
                raise InvalidInput(
                    Reason.PEER_PROTOCOL,
                    "a GPU pool, and DUPLET_KVPROXY_TRANSPORTS allows no transport between GPUs",
                )
            return map_cuda_pool(peer.pool_fd, description, self._choice.devices)
        if "shm" not in self._choice.allowed:
            raise InvalidInput(
                Reason.PEER_PROTOCOL, "a CPU pool, and DUPLET_KVPROXY_TRANSPORTS does not allow shm"
            )
        # Prefill's pool is only read: the kernel refuses a write to it from here.
        return map_pool(peer.pool_fd, description, writable=peer.role is Role.DECODE)

    def _register(self, peer: LifelinePeer, pool: Pool | MappedPool) -> None:
        self.mover.add_pool(peer.instance, pool)
        described = pool.description
        self._pools[peer.role] = described
        shape = (described.pages, described.page_rows)
        self.feed(LifelineUp(peer.role, peer.instance, *shape, self._tell_transport()))

    def _tell_transport(self) -> str:
        """Say which transport the two newest pools use, in log, health, Hello and Route; empty
        while one is missing."""
        source, dest = self._pools.get(Role.PREFILL), self._pools.get(Role.DECODE)
        if source is None or dest is None:
            return ""
        path, ok = self._choice.path_for(source, dest)
        self.service.log.info("transport", path=path, mps=self._choice.mps)
        self.service.health.set("transport", ok, path)
        return path

    def _mover_failed(self, detail: str) -> None:
        """Red first, then out: our exit is the proof that nothing writes any more (S9)."""
        self.service.health.set("writer", False, detail)
        asyncio.get_running_loop().call_later(RED_BEFORE_EXIT_S, self.execute, Exit(detail))


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


def _choose_transports(service: Service[KvproxySettings]) -> Choice:
    """Try what is allowed, before anything is served: it takes GPUs and seconds.

    Raises:
        SettingsError: nothing works; the text says what failed and what to do.
    """
    try:
        return Choice(parse_transports(service.settings.transports))
    except TransportRefused as error:
        raise SettingsError(error.detail) from error


async def serve(service: Service[KvproxySettings]) -> None:
    """Run kvproxy until it has drained. The unit's lock is held for life (S4)."""
    settings = service.settings
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    config = WriterConfig(
        withheld_after_ns=round(settings.withheld_after_s * 1e9),
        withheld_limit_ns=round(settings.withheld_limit_s * 1e9),
    )
    choice = _choose_transports(service)
    service.log.info("transports", found=choice.describe(), mps=choice.mps)
    service.health.set("transport", True, choice.describe())
    executor = KvproxyExecutor(service, WriterMachine(service.instance, config), choice)
    executor.metrics.serve(settings.metrics_port, settings.metrics_host)
    service.health.set("writer", True, "withheld ends are within their bound")
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
        lambda role, version: executor.feed(OtherVersion(role, version)),
    )
    address = settings.peer_address(Role.KVPROXY)
    names = ["duplet.kvproxy.v1.KvProxy"]
    async with running_server(server, [address], service.health, names, STOP_GRACE_S):
        await service.draining.wait()
        await executor.drain(settings.drain_s)
        for end in ends:
            end.close_all(Reason.DRAINING, "the service stops")
    lifelines.close()
    executor.driver.close()
    executor.mover.close()
    executor.metrics.close()


def main() -> int:
    return run_service(load_settings_or_exit(KvproxySettings), serve, CONDITIONS)


if __name__ == "__main__":
    sys.exit(main())
