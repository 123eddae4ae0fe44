"""A real kvproxy process, and prefill's and decode's ends of it, for tests. The pools are given:
their owners are whoever the test says."""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from duplet.kvproxy.v1 import kvproxy_pb2_grpc
from duplet_core.effects import Received, StreamOpened
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role, TransferId
from duplet_core.messages import Grant, Handoff, Hello, Landed, Message, Move, Route
from duplet_memory.layout import PoolDescription
from duplet_runtime.health import DETAIL_KEY
from duplet_runtime.lifeline import LifelineClient
from duplet_runtime.peers import Dialer
from duplet_runtime.service import new_instance
from duplet_wire.streams import CODECS

LIMIT_S = 60
ROW = bytes(44)


@dataclass(frozen=True)
class OwnedPool:
    """What a lifeline carries of a pool; its owner keeps the descriptors open."""

    description: PoolDescription
    fd: int
    pidfds: Mapping[str, int]


@dataclass
class KvproxyEnd:
    """prefill's or decode's end. `peer_end` owns its tasks."""

    role: Role
    run_dir: Path
    pool: OwnedPool
    held: tuple[TransferId, ...] = ()
    """What its Hellos list."""
    instance: InstanceId = field(default_factory=new_instance)
    heard: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    """All but Hellos."""
    hellos: asyncio.Queue[Hello] = field(default_factory=asyncio.Queue)
    died: asyncio.Queue[InstanceId] = field(default_factory=asyncio.Queue)
    _stream: int = 0
    _watched: asyncio.Event = field(default_factory=asyncio.Event)
    _kvproxy: InstanceId | None = None

    def __post_init__(self) -> None:
        codec = CODECS[self.role, Role.KVPROXY]

        def method(channel: grpc.aio.Channel) -> Any:
            stub = kvproxy_pb2_grpc.KvProxyStub(channel)
            return stub.ConnectPrefill if self.role is Role.PREFILL else stub.ConnectDecode

        self._dialer: Dialer[Any] = Dialer(
            Role.KVPROXY,
            f"unix:{self.run_dir}/kvproxy.sock",
            method,
            codec.encode,
            codec.decode,
            self._take,
            together=codec.together,
        )

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._dialer.send(self._stream, message)

    async def hear(self, kind: type[Any]) -> Any:
        """The next message of a kind; what comes before it is dropped."""
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(message := await self.heard.get(), kind):
                pass
        return message

    async def next_hello(self) -> Hello:
        async with asyncio.timeout(LIMIT_S):
            return await self.hellos.get()

    async def run(self) -> None:
        """Watch kvproxy, then keep a stream to it."""
        lifeline = LifelineClient(
            self.run_dir / "lifeline.sock",
            self.role,
            self.instance,
            self.pool.pidfds,
            self.pool.description.to_json(),
            self.pool.fd,
            self._meet,
            self.died.put_nowait,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lifeline.run())
            await self._watched.wait()
            tasks.create_task(self._dialer.run())

    def _meet(self, kvproxy: InstanceId) -> None:
        self._kvproxy = kvproxy
        self._watched.set()

    def _take(self, event: Any) -> None:
        if isinstance(event, StreamOpened):
            self._stream = event.stream
            ids = (self.role, self.instance, PROTOCOL_VERSION, event.stream, self._kvproxy)
            self.say(Hello(*ids, held=self.held))
        elif isinstance(event, Received) and isinstance(event.message, Hello):
            self.hellos.put_nowait(event.message)
        elif isinstance(event, Received):
            self.heard.put_nowait(event.message)


@asynccontextmanager
async def peer_end(
    role: Role, run_dir: Path, pool: OwnedPool, held: tuple[TransferId, ...] = ()
) -> AsyncIterator[KvproxyEnd]:
    """An end that runs; it has met kvproxy, and both have said Hello."""
    end = KvproxyEnd(role, run_dir, pool, held)
    running = asyncio.create_task(end.run())
    try:
        hello = asyncio.create_task(end.next_hello())
        await asyncio.wait({running, hello}, return_when=asyncio.FIRST_COMPLETED)
        end.hellos.put_nowait(await hello)
        yield end
    finally:
        running.cancel()
        await asyncio.wait({running})


class KvproxyProcess:
    """Owns the process and its log."""

    def __init__(self, process: asyncio.subprocess.Process, run_dir: Path, metrics: int) -> None:
        self.process = process
        self.run_dir = run_dir
        self._metrics = metrics

    @property
    def log(self) -> str:
        return log_path(self.run_dir).read_text()

    async def health(self, name: str) -> tuple[bool, str]:
        """Whether a condition is met, and its detail."""
        async with grpc.aio.insecure_channel(f"unix:{self.run_dir}/kvproxy.sock") as channel:
            call = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S
            )
            answer = await call
            detail = (await call.trailing_metadata())[DETAIL_KEY]
        is_met = answer.status == health_pb2.HealthCheckResponse.SERVING
        return is_met, bytes(detail).decode()

    async def metric(self, name: str, **labels: str) -> float:
        """The value of one Prometheus sample."""
        url = f"http://127.0.0.1:{self._metrics}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"duplet_kvproxy_{name}" and sample.labels == labels:
                    return float(sample.value)
        raise AssertionError(f"no {name} {labels}")


def log_path(run_dir: Path) -> Path:
    return run_dir / "kvproxy.log"


@asynccontextmanager
async def running_kvproxy(
    run_dir: Path,
    transports: str,
    metrics: int,
    module: str = "duplet_kvproxy",
    *arguments: str,
    settings: Mapping[str, str] | None = None,
) -> AsyncIterator[KvproxyProcess]:
    """A process that logs JSON; killed at the end, should it still run. `metrics`: a free port;
    `settings`: more of them, by their environment's names."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("DUPLET_")}
    environment = base | {
        "DUPLET_RUN_DIR": str(run_dir),
        "DUPLET_LOG_FORMAT": "json",
        "DUPLET_KVPROXY_TRANSPORTS": transports,
        "DUPLET_KVPROXY_METRICS_PORT": str(metrics),
        **(settings or {}),
    }
    with log_path(run_dir).open("a") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, env=environment, stdout=log, stderr=log
        )
    try:
        yield KvproxyProcess(process, run_dir, metrics)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def both_ends(
    run_dir: Path, source: OwnedPool, dest: OwnedPool
) -> AsyncIterator[tuple[KvproxyEnd, KvproxyEnd]]:
    """prefill's and decode's ends, decode's first."""
    async with AsyncExitStack() as stack:
        decode = await stack.enter_async_context(peer_end(Role.DECODE, run_dir, dest))
        prefill = await stack.enter_async_context(peer_end(Role.PREFILL, run_dir, source))
        yield prefill, decode


def move_all(
    ends: tuple[KvproxyEnd, KvproxyEnd],
    number: int,
    source_pages: Sequence[int],
    dest_pages: Sequence[int],
    rows: int,
) -> TransferId:
    """Grant and move a prompt in one part."""
    transfer = TransferId(f"{number:032x}")
    prefill, decode = ends
    decode.say(Grant(transfer, tuple(dest_pages), rows))
    handoff = Handoff(ROW, tuple(bytes(16) for _ in dest_pages), (0, 0, 0))
    prefill.say(Move(transfer, 0, rows, tuple(source_pages), handoff))
    return transfer


async def wait_landed(decode: KvproxyEnd, transfer: TransferId) -> Landed:
    """Wait for one transfer; earlier ones' messages are dropped."""
    while (landed := await decode.hear(Landed)).transfer != transfer:
        pass
    found: Landed = landed
    return found


async def told_path(decode: KvproxyEnd) -> str:
    """How KV goes, as kvproxy tells decode: the Route that follows when prefill comes last."""
    route: Route = await decode.hear(Route)
    return route.transport
