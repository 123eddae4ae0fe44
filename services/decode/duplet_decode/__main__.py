"""Starts decode's I/O process: `python -m duplet_decode`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, ClassVar

import grpc.aio
from pydantic import Field

from duplet.decode.v1 import decode_pb2_grpc
from duplet.kvproxy.v1 import kvproxy_pb2_grpc
from duplet_core.decode import DecodeMachine
from duplet_core.decode_state import DecodeConfig
from duplet_core.engine import Ready
from duplet_core.ids import Role
from duplet_core.ledger import PageState
from duplet_core.step_guard import StepGuard, longest_step_ns
from duplet_pages.engine_config import EngineConfig
from duplet_pages.spec import ModelSpec
from duplet_runtime.engine_host import EngineSettings, by_device
from duplet_runtime.engine_service import EngineService
from duplet_runtime.metrics import Metrics
from duplet_runtime.peers import Acceptor
from duplet_runtime.service import Service, run_service
from duplet_runtime.settings import load_settings_or_exit

CONDITIONS = ("engine", "peer.kvproxy", "quarantine")


class DecodeSettings(EngineSettings):
    """Settings of decode, environment prefix DUPLET_DECODE_."""

    role: ClassVar[Role] = Role.DECODE

    slots: int = by_device(cpu=16, cuda=64, ge=1, le=4096)
    """Most streams at once."""
    floor_rows_per_s: float = by_device(cpu=0, cuda=42, ge=0, allow_inf_nan=False)
    """Admit only what lets every stream keep this rate; 0: as many streams as there are slots."""
    transfer_deadline_s: float = Field(default=10.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds from a transfer's first queued copy until its request is given up (S5)."""
    quarantine_percent: int = Field(default=25, ge=1, le=100)
    """Above this share of quarantined pages decode takes nothing new (S9)."""
    recheck_at_end: bool = False
    """Check the prompt's digests again when a stream ends (fault tests)."""
    damage_pages: int = Field(default=0, ge=0, le=1024)
    """Fault tests, as the canary's drill, only, on a CPU: so many pages of every prompt are
    overwritten with those of the prompt before it. Listeners then hear the wrong thing."""

    def warnings(self) -> list[str]:
        if not self.damage_pages:
            return []
        wrong = "KV is damaged on purpose, listeners hear the wrong thing"
        return [f"damage_pages is {self.damage_pages}: {wrong}"]


class DecodePeer(decode_pb2_grpc.DecodePeerServicer):
    """lb's streams."""

    def __init__(self, acceptor: Acceptor[Any]) -> None:
        self._acceptor = acceptor

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        await self._acceptor.serve(context)


def _register(server: grpc.aio.Server, acceptor: Acceptor[Any]) -> str:
    decode_pb2_grpc.add_DecodePeerServicer_to_server(DecodePeer(acceptor), server)
    return "duplet.decode.v1.DecodePeer"


def observe(metrics: Metrics, machine: DecodeMachine) -> None:
    """Add decode's gauges."""
    transfers = machine.transfers
    metrics.gauge("pages_total", "Pages of the pool", lambda: transfers.ledger.total)
    for state in PageState:
        read = partial(transfers.ledger.count, state)
        metrics.gauge(f"pages_{state}", f"Pages that are {state}", read)
    metrics.gauge("aborts_pending", "ABORTs that wait for a proof", transfers.pending_aborts)
    metrics.gauge("transfers", "Transfers that hold pages", lambda: len(transfers.by_transfer))
    metrics.gauge("kv_checks", "Checks of landed KV that were made", lambda: transfers.kv_checks)
    metrics.gauge("streams", "Sequences that the engine has", lambda: len(transfers.by_seq))
    if machine.guard is not None:
        _observe_guard(metrics, machine, machine.guard)
    kvproxy = machine.links[Role.KVPROXY]
    metrics.gauge("writers", "Living instances of kvproxy that are watched", lambda: kvproxy.living)
    damaged = machine.config.damaged_pages
    metrics.gauge("damage_pages", "Pages of every prompt damaged on purpose", lambda: damaged)


def _observe_guard(metrics: Metrics, machine: DecodeMachine, guard: StepGuard) -> None:
    transfers = machine.transfers

    def predict_s() -> float:
        return guard.predict_ns(transfers.streams(), transfers.reserved_pages()) / 1e9

    metrics.gauge(
        "step_predicted_seconds",
        "A step's time once every admitted stream is as long as it may become",
        predict_s,
    )
    metrics.gauge(
        "step_longest_seconds",
        "The longest step that is planned, by the floor",
        lambda: guard.longest_step_ns / 1e9,
    )


async def serve(service: Service[DecodeSettings]) -> None:
    """Run decode until it has drained."""
    settings = service.settings
    floor = settings.floor_rows_per_s
    config = EngineConfig(
        role="decode",
        device=settings.device,
        model=settings.model,
        dtype=settings.dtype,
        pool_pages=settings.pool_pages,
        page_rows=settings.page_rows,
        slots=settings.slots,
        arrangement=settings.arrangement,
        threads=settings.threads,
        overlap=settings.overlap,
        longest_step_ns=longest_step_ns(floor) if floor else 0,
        recheck_at_end=settings.recheck_at_end,
        damage_pages=settings.damage_pages,
    )

    def make_machine(ready: Ready) -> DecodeMachine:
        spec = ModelSpec.from_json(ready.spec)
        return DecodeMachine(
            service.instance,
            DecodeConfig(
                pages=ready.pages,
                page_rows=ready.page_rows,
                slots=ready.slots,
                longest_sequence=spec.longest_sequence,
                spec=ready.spec,
                floor_rows_per_s=floor,
                step_times=ready.step_times,
                transfer_deadline_ns=round(settings.transfer_deadline_s * 1e9),
                quarantine_percent=settings.quarantine_percent,
                damaged_pages=settings.damage_pages,
            ),
        )

    service.health.set("quarantine", True, "no page is quarantined")
    host = EngineService(service, lambda c: kvproxy_pb2_grpc.KvProxyStub(c).ConnectDecode)
    await host.run(config, make_machine, observe, {Role.DECODE: _register})


def main() -> int:
    return run_service(load_settings_or_exit(DecodeSettings), serve, CONDITIONS)


if __name__ == "__main__":
    sys.exit(main())
