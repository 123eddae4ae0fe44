from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]
    reflection_pb2,
    reflection_pb2_grpc,
)

from duplet_runtime.health import DETAIL_KEY, MAX_WATCHERS, Health
from duplet_runtime.server import (
    create_server,
    peer_channel_options,
    peer_server_options,
    running_server,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def ask(name: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


def raise_it(error: BaseException) -> None:
    raise error


@pytest.fixture
def health() -> Health:
    return Health(["peer.decode", "kvproxy"])


@pytest.fixture
async def channel(health: Health, run_dir: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = create_server(peer_server_options(), health, raise_it)
    address = f"unix:{run_dir}/h.sock"
    async with (
        running_server(server, [address], health, [], 5),
        grpc.aio.insecure_channel(address, options=peer_channel_options()) as opened,
    ):
        yield opened


def test_ready_needs_every_condition(health: Health) -> None:
    assert not health.ok("live")
    health.set("live", True, "")
    health.set("peer.decode", True, "")
    assert not health.ok("ready")
    assert health.detail("ready") == "kvproxy: not yet known"
    health.set("kvproxy", True, "")
    assert health.ok("ready") and health.ok("")


def test_ready_tells_what_it_does_not_wait_for(health: Health) -> None:
    for name in ("live", "peer.decode", "kvproxy"):
        health.set(name, True, "")
    for detail in ("one came", "another came"):
        health.set("protocol.lb", False, detail, for_ready=False)
        assert health.ok("ready") and not health.ok("protocol.lb")
        assert health.detail("ready") == f"protocol.lb: {detail}"
    health.set("protocol.lb", True, "", for_ready=False)
    assert health.ok("ready") and health.detail("ready") == ""
    health.set("kvproxy", False, "away")
    assert not health.ok("ready")
    health.set("quarantine", False, "26 % of pages")
    assert not health.ok("ready")
    health.set("quarantine", True, "")
    health.shut_down()
    assert not any(health.ok(name) for name in ("ready", "live", "kvproxy", ""))
    assert health.ok("nobody") is None


async def test_check(health: Health, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    assert (await stub.Check(ask("live"))).status == SERVING
    assert (await stub.Check(ask(""))).status == NOT_SERVING
    health.set("kvproxy", False, "not réachable")
    call = stub.Check(ask("kvproxy"))
    assert (await call).status == NOT_SERVING
    trailers = await call.trailing_metadata()
    assert trailers[DETAIL_KEY].decode() == "not réachable"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(ask("nobody"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_watchers_come_and_go(health: Health, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    first, second = stub.Watch(ask("kvproxy")), stub.Watch(ask("kvproxy"))
    assert (await first.read()).status == (await second.read()).status == NOT_SERVING
    first.cancel()
    health.set("kvproxy", True, "")
    assert (await second.read()).status == SERVING
    stranger = stub.Watch(ask("later"))
    assert (await stranger.read()).status == UNKNOWN
    health.set("later", True, "")
    assert (await stranger.read()).status == SERVING
    health.shut_down()
    assert (await second.read()).status == NOT_SERVING
    assert await second.read() is grpc.aio.EOF
    stranger.cancel()


async def watching(stub: health_pb2_grpc.HealthStub) -> Any:
    """A call of Watch that the server has begun to answer."""
    call = stub.Watch(ask("live"))
    await call.read()
    return call


async def test_watchers_are_bounded(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    calls = [await watching(stub) for _ in range(MAX_WATCHERS)]
    one_more = stub.Watch(ask("live"))
    await one_more.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls[0].read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in (one_more, *calls):
        call.cancel()


async def test_who_takes_all_watchers_pushes_out_only_itself(
    health: Health,
) -> None:
    server = create_server(peer_server_options(), health, raise_it)
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    async with running_server(server, ["127.0.0.1:0"], health, [], 5) as (port,):
        address = f"127.0.0.1:{port}"
        async with (
            grpc.aio.insecure_channel(address, options=own_connection) as quiet,
            grpc.aio.insecure_channel(address, options=own_connection) as greedy,
        ):
            modest = health_pb2_grpc.HealthStub(quiet).Watch(ask("live"))
            await modest.read()
            stub = health_pb2_grpc.HealthStub(greedy)
            calls = [await watching(stub) for _ in range(MAX_WATCHERS + 5)]
            health.set("live", False, "changed")
            assert (await modest.read()).status == NOT_SERVING
            for call in (modest, *calls):
                call.cancel()


async def test_reflection_tells_health(channel: grpc.aio.Channel) -> None:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.done_writing()
    answer = await call.read()
    names = [entry.name for entry in answer.list_services_response.service]
    assert "grpc.health.v1.Health" in names


async def test_a_long_detail_does_not_cost_the_answer(
    health: Health, channel: grpc.aio.Channel
) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("peer.decode", "kvproxy", "more"):
        health.set(name, name == "kvproxy", "→" * 10_000)
    for name, status in (("kvproxy", SERVING), ("more", NOT_SERVING), ("ready", NOT_SERVING)):
        call = stub.Check(ask(name), timeout=10)
        assert (await call).status == status
        detail = (await call.trailing_metadata())[DETAIL_KEY].decode()
        assert detail.endswith("→…") and len(detail) == 1000
