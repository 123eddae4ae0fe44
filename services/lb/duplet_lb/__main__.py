"""Starts lb: `python -m duplet_lb`."""

from __future__ import annotations

import asyncio
import sys

from duplet.decode.v1 import decode_pb2_grpc
from duplet.prefill.v1 import prefill_pb2_grpc
from duplet.speech.v1 import speech_pb2_grpc
from duplet_core.front import FrontMachine
from duplet_core.front_state import FrontConfig
from duplet_core.ids import Role
from duplet_lb.door import Door
from duplet_lb.settings import LbSettings
from duplet_lb.speech import LbExecutor, Speech
from duplet_runtime.addresses import check_free
from duplet_runtime.server import create_server, public_server_options, running_server
from duplet_runtime.service import Service, run_service
from duplet_runtime.settings import SettingsError, load_settings_or_exit

CONDITIONS = ("peer.prefill", "peer.decode", "unit")
STOP_GRACE_S = 1.0


async def serve(service: Service[LbSettings]) -> None:
    """Run lb until it has drained."""
    settings = service.settings
    config = FrontConfig(settings.queue_limit, settings.queue_wait_ms * 1_000_000)
    executor = LbExecutor(service, FrontMachine(service.instance, config))
    if settings.otlp_endpoint:
        from duplet_lb.tracing import Tracing  # it takes memory, which without spans is free

        executor.tracing = Tracing(settings.otlp_endpoint, service.instance)
    executor.metrics.serve(settings.metrics_port, settings.metrics_host)
    try:
        check_free(settings.listen)
    except OSError as error:
        raise SettingsError(f"listen: {settings.listen}: {error.strerror}") from error
    door = Door(executor)
    options = public_server_options(settings.longest_s)
    server = create_server(options, service.health, service.fail, [door])
    speech_pb2_grpc.add_SpeechServicer_to_server(Speech(executor, service), server)
    executor.dial(Role.PREFILL, lambda c: prefill_pb2_grpc.PrefillPeerStub(c).Connect)
    executor.dial(Role.DECODE, lambda c: decode_pb2_grpc.DecodePeerStub(c).Connect)
    names = ["duplet.speech.v1.Speech"]
    async with running_server(
        server, [settings.listen], service.health, names, STOP_GRACE_S
    ) as ports:
        service.log.info("listening", address=settings.listen, port=ports[0])
        await service.draining.wait()
        await executor.drain(settings.drain_s)
    door.close()
    executor.driver.close()
    if executor.tracing is not None:
        await asyncio.to_thread(executor.tracing.close)
    executor.metrics.close()


def main() -> int:
    return run_service(load_settings_or_exit(LbSettings), serve, CONDITIONS)


if __name__ == "__main__":
    sys.exit(main())
