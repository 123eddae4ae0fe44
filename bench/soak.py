"""Many requests through one unit, with clients that cancel, vanish, or read nothing.

    make soak                       10,000 requests
    SOAK_REQUESTS=500 make soak     so many

Passes when
- every request ended as its client meant it to (what the unit refuses as overload is sent again);
- no service exited, and no KV check failed;
- in the end no request or transfer is left, decode's pages are all free and prefill's are free or
  cached;
- no process's resident memory grew by more than GROWTH_MIB from the first third to the last third
  of what follows the warm-up (the first WARM_UP of the requests), medians of samples;
- no service has more than FDS_MORE descriptors more in the end than after the warm-up.

The last line is `soak ok: …` with the figures, or `soak FAILED: …` and exit code 1.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc
import grpc.aio

from bench.processes import clean_environment
from bench.soak_metrics import held_by_unit, scrape
from duplet.speech.v1 import speech_pb2 as pb
from duplet.speech.v1.speech_pb2_grpc import SpeechStub
from duplet_client import AsyncClient, GenerateError, Rows, SamplingOptions, Unit, rows_from_text
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from duplet_unit.events import Event
from duplet_unit.supervisor import Supervisor
from duplet_unit.unit import free_local_addresses, owned_run_dir, unit_environment, unit_services
from duplet_unit.up import in_background, make_supervisor

REQUESTS = 10_000
AT_ONCE = 8
WARM_UP = 0.3
SAMPLES = 60
GROWTH_MIB = 4.0
FDS_MORE = 16
MOST_ROWS = 16
TIMEOUT_S = 60.0
SETTLE_S = 30.0
UNREAD_S = 0.5
"""How long a client that reads nothing stays."""

SETTINGS = {
    # Small pools: they are full, and the cache evicts, long before the warm-up is over.
    "DUPLET_PREFILL_POOL_PAGES": "256",
    "DUPLET_DECODE_POOL_PAGES": "256",
    "DUPLET_LB_UNREAD_ROWS": "8",
    "DUPLET_DECODE_RECHECK_AT_END": "true",
}
LAZY: list[tuple[str, int]] = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
"""A connection that lets in no more than its calls have asked for."""


@dataclass(slots=True)
class Soak:
    """One run. The unit and the client belong to `main`."""

    address: str
    client: AsyncClient
    spec: ModelSpec
    requests: int
    sent: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def work(self) -> None:
        """One client: requests one after the other until all are sent."""
        while self.sent < self.requests:
            self.sent += 1
            choice = random.Random(self.sent)
            kind: Kind = choice.choices(list(KINDS), weights=list(KINDS.values()))[0]
            name = kind.__name__
            try:
                await kind(self, choice)
            except GenerateError as error:
                self.faults.append(f"{name}: {error}")
            self.ended[name] += 1

    def prompt(self, choice: random.Random) -> bytes:
        """Sixty voices of different lengths, so that the cache hits, misses and evicts."""
        voice = choice.randrange(60)
        rows = rows_from_text(self.spec, f"text {choice.random()}", f"v{voice}", 16 + 2 * voice)
        return rows.tobytes()

    async def finish(self, choice: random.Random) -> None:
        """Read to the end."""
        while True:
            try:
                await self.read(self.client, choice, leave_after=None)
                return
            except GenerateError as error:
                if error.reason != "OVERLOADED" or error.retry_after_s is None:
                    raise
                self.ended["refused and sent again"] += 1
                await asyncio.sleep(error.retry_after_s)

    async def cancel(self, choice: random.Random) -> None:
        """Leave the stream, at once or after some rows."""
        await self.read(self.client, choice, leave_after=choice.randrange(4))

    async def vanish(self, choice: random.Random) -> None:
        """Close the whole connection in the middle."""
        async with AsyncClient(self.address) as client:
            await self.read(client, choice, leave_after=1)

    async def read_nothing(self, choice: random.Random) -> None:
        """Ask for many rows and read none."""
        async with grpc.aio.insecure_channel(self.address, options=LAZY) as channel:
            request = pb.GenerateRequest(
                prompt=self.prompt(choice), columns=self.spec.columns, max_rows=8 * MOST_ROWS
            )
            call = SpeechStub(channel).Generate(request, timeout=TIMEOUT_S)
            await asyncio.sleep(UNREAD_S)
            call.cancel()

    async def send_junk(self, choice: random.Random) -> None:
        """A prompt that is refused."""
        rows = bytearray(self.prompt(choice))
        rows[-1] = 0x7F
        try:
            async for _ in self.client.generate(bytes(rows), columns=self.spec.columns):
                pass
        except GenerateError as error:
            if error.reason != "INVALID_PROMPT":
                raise

    async def read(
        self, client: AsyncClient, choice: random.Random, leave_after: int | None
    ) -> None:
        generation = client.generate(
            self.prompt(choice),
            columns=self.spec.columns,
            max_rows=choice.randint(1, MOST_ROWS),
            rows_per_message=choice.randint(1, 4),
            sampling=SamplingOptions(seed=self.sent),
            timeout_s=TIMEOUT_S,
        )
        async with generation:
            rows = 0
            try:
                async for event in generation:
                    rows += len(event.rows) if isinstance(event, Rows) else 0
                    if leave_after is not None and rows >= leave_after:
                        return
            except GenerateError as error:
                if leave_after is None or error.reason != "OVERLOADED":
                    raise


Kind = Callable[[Soak, random.Random], Awaitable[None]]
KINDS: dict[Kind, int] = {
    Soak.finish: 76,
    Soak.cancel: 10,
    Soak.vanish: 5,
    Soak.read_nothing: 4,
    Soak.send_junk: 5,
}


class Watch:
    """Memory of the unit's processes, sampled while requests are sent."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._processes: dict[str, int] = {}
        for role in (Role.LB, Role.PREFILL, Role.DECODE, Role.KVPROXY):
            pid = supervisor.pid(role)
            assert pid is not None
            self._processes[role] = pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self._processes |= {f"{role}'s engine": int(child) for child in children}
        self._resident: dict[str, list[float]] = defaultdict(list)
        self._fds: dict[str, list[int]] = defaultdict(list)

    def sample(self) -> None:
        for name, pid in self._processes.items():
            self._resident[name].append(resident_mib(pid))
            self._fds[name].append(len(os.listdir(f"/proc/{pid}/fd")))

    def growth(self) -> dict[str, tuple[float, float]]:
        """By process: MiB after the warm-up and what was added until the end."""
        third = len(next(iter(self._resident.values()))) // 3
        return {
            name: (median(values[:third]), median(values[-third:]) - median(values[:third]))
            for name, values in self._resident.items()
        }

    def more_fds(self) -> dict[str, int]:
        """By process: descriptors more in the end than at first."""
        return {name: values[-1] - values[0] for name, values in self._fds.items()}


def resident_mib(pid: int) -> float:
    """Resident memory of a process now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def send_all(soak: Soak, watch: Watch) -> None:
    """Send the requests; sample memory at equal steps after the warm-up."""
    steps = [round(soak.requests * (WARM_UP + (1 - WARM_UP) * n / SAMPLES)) for n in range(SAMPLES)]
    workers = [asyncio.create_task(soak.work()) for _ in range(AT_ONCE)]
    while not all(worker.done() for worker in workers):
        await asyncio.wait(workers, timeout=0.2)
        if steps and soak.sent >= steps[0]:
            watch.sample()
            steps = [step for step in steps if step > soak.sent]
            print(f"  {soak.sent} of {soak.requests}", flush=True)
    for worker in workers:
        worker.result()


async def settle(metrics: dict[str, str]) -> dict[str, float]:
    """Wait until the unit holds nothing; what it holds still when that takes too long."""
    until = time.monotonic() + SETTLE_S
    while held := await asyncio.to_thread(held_by_unit, metrics):
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.1)
    return held


def judge(soak: Soak, watch: Watch, unit: Unit, held: dict[str, float]) -> list[str]:
    """What is wrong; empty when all is well."""
    problems = [f"{len(soak.faults)} requests failed, first {fault}" for fault in soak.faults[:1]]
    problems += [f"{what} still held: {count:g}" for what, count in held.items()]
    if unit.kv_mismatches:
        problems.append(f"{unit.kv_mismatches} KV checks failed")
    for name, (_, added) in watch.growth().items():
        if added > GROWTH_MIB:
            problems.append(f"{name} grew by {added:.1f} MiB")
    for name, more in watch.more_fds().items():
        if more > FDS_MORE:
            problems.append(f"{name} has {more} descriptors more")
    return problems


async def run(requests: int) -> tuple[list[str], str]:
    """Start a unit, send the requests, stop it. Returns what is wrong, and the figures."""
    listen, *addresses = free_local_addresses(1 + len(Role))
    metrics = dict(zip(map(str, Role), addresses, strict=True))
    ports = {
        f"DUPLET_{role.upper()}_METRICS_PORT": address.rpartition(":")[2]
        for role, address in metrics.items()
    }
    environment = unit_environment(clean_environment({**SETTINGS, **ports}))
    events: list[Event] = []
    with owned_run_dir(None) as run_dir:
        supervisor = make_supervisor(
            unit_services(run_dir, listen, environment), run_dir, events.append
        )
        async with in_background(supervisor):
            if not await supervisor.wait_ready():
                return [f"the unit does not start: {supervisor.failure}"], ""
            async with AsyncClient(listen) as client:
                spec = (await client.unit()).spec
                assert spec is not None
                soak, watch = Soak(listen, client, spec, requests), Watch(supervisor)
                began = time.monotonic()
                await send_all(soak, watch)
                took_s = time.monotonic() - began
                held = await settle(metrics)
                watch.sample()
                unit = await client.unit()
                died = [str(event.service) for event in events if event.kind == "exited"]
                cached = scrape(metrics[Role.PREFILL])["duplet_prefill_pages_cached"]
    problems = [f"{name} exited" for name in died] + judge(soak, watch, unit, held)
    print_figures(soak, watch, unit, took_s, cached)
    most = max(added for _, added in watch.growth().values())
    checks = f"kv checks {unit.kv_checks}, mismatches {unit.kv_mismatches}"
    return problems, f"{checks}, most growth of a process {most:+.2f} MiB"


def print_figures(soak: Soak, watch: Watch, unit: Unit, took_s: float, cached: float) -> None:
    print(f"\n{soak.requests} requests in {took_s:.0f} s")
    print("as clients meant them:", dict(soak.ended))
    print("as lb ended them:     ", dict(unit.requests))
    print(f"KV checks {unit.kv_checks}, mismatches {unit.kv_mismatches}, cached pages {cached:g}")
    for name, (at_first, added) in watch.growth().items():
        print(f"  {name:18} {at_first:7.1f} MiB, {added:+.2f} MiB")


def main() -> int:
    requests = int(os.environ.get("SOAK_REQUESTS", REQUESTS))
    if requests < 3 * SAMPLES:
        print(f"soak FAILED: SOAK_REQUESTS={requests}: fewer than {3 * SAMPLES} show nothing")
        return 1
    problems, figures = asyncio.run(run(requests))
    if problems:
        print(f"soak FAILED: {'; '.join(problems)}")
        return 1
    print(f"soak ok: {requests} requests, {figures}, no page or transfer left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
