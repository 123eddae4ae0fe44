"""Admission in a real unit of four services on the CPU, idle and while forward passes run.

lb's time is exact, from the requests' timelines: `lb_received` to `lb_admitted`. Prefill and
decode tell theirs as histograms (`duplet_prefill_admission_seconds`, …): from a message taken
off lb's stream to its effects executed. A quantile of those is the upper bound of its bucket.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from bench.processes import clean_environment
from bench.results import QUANTILES, Report, quantile
from duplet_client import AsyncClient, Finished, SamplingOptions, rows_from_text
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from duplet_unit.events import Event
from duplet_unit.unit import free_local_addresses, owned_run_dir, unit_environment, unit_services
from duplet_unit.up import in_background, make_supervisor

AT_ONCE = (1, 16)
VOICE_ROWS = 1400
STREAMS = 8
"""Of the load: streams that keep decode's steps running."""
STREAM_ROWS = 256
COLD_PROMPTS = 2
"""Of the load: prompts at once that no cache knows, so that prefill always computes."""
PHASE_S = 20.0
"""No new probe starts after this."""
TIMEOUT_S = 120.0

SETTINGS = {
    # Room for all at once: what is measured is admission, not the wait for a slot or pages.
    "DUPLET_DECODE_SLOTS": "48",
    "DUPLET_DECODE_POOL_PAGES": "8192",
    "DUPLET_PREFILL_POOL_PAGES": "8192",
    "DUPLET_LB_QUEUE_WAIT_MS": "60000",
}
ENGINES = (Role.PREFILL, Role.DECODE)
BUDGET_LB = "<= 1"
BUDGET_ENGINE = "<= 0.5"

Buckets = dict[float, float]
"""Upper bound in seconds to how many times were not above it."""


@dataclass(slots=True)
class Unit:
    """The unit under test and its one client. Owned by `running_unit`."""

    client: AsyncClient
    spec: ModelSpec
    prompt_rows: int
    metrics: Mapping[Role, str]
    """Addresses of the engines' services' metrics."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def ask(self, voice: str, max_rows: int, prompt_rows: int) -> Finished:
        """One request, read to its end."""
        number = next(self.numbers)
        # [begin, voice rows, begin of text, text, end]: three rows are neither voice nor text.
        text = f"{number:08d}" + "." * max(0, prompt_rows - VOICE_ROWS - 3 - 8)
        prompt = rows_from_text(self.spec, text, voice, prompt_rows - len(text) - 3)
        generation = self.client.generate(
            prompt,
            max_rows=max_rows,
            rows_per_message=max_rows,
            sampling=SamplingOptions(seed=number),
            timeout_s=TIMEOUT_S,
        )
        async with generation:
            async for event in generation:
                if isinstance(event, Finished):
                    return event
        raise RuntimeError("a generation ended without Finished and without an error")

    async def probe(self) -> Finished:
        """A prompt of full size whose voice is cached: little for prefill to compute."""
        return await self.ask("probe", 1, self.prompt_rows)

    async def buckets(self, role: Role) -> Buckets:
        """A service's histogram of admission so far; empty before its first."""
        return await asyncio.to_thread(_read_buckets, self.metrics[role], role)


@asynccontextmanager
async def running_unit(prompt_rows: int) -> AsyncIterator[Unit]:
    """A unit of four services, ready, with the probe's voice in prefill's cache."""
    listen, *addresses = free_local_addresses(1 + len(ENGINES))
    metrics = dict(zip(ENGINES, addresses, strict=True))
    ports = {
        f"DUPLET_{role.upper()}_METRICS_PORT": address.rpartition(":")[2]
        for role, address in metrics.items()
    }
    environment = unit_environment(clean_environment({**SETTINGS, **ports}))
    with owned_run_dir(None) as run_dir:
        services = unit_services(run_dir, listen, environment)
        supervisor = make_supervisor(services, run_dir, _print_trouble)
        async with in_background(supervisor):
            if not await supervisor.wait_ready():
                raise RuntimeError(f"the unit did not start: {supervisor.failure}")
            async with AsyncClient(listen) as client:
                spec = (await client.unit()).spec
                if spec is None:
                    raise RuntimeError("a ready unit does not know its model")
                unit = Unit(client, spec, prompt_rows, metrics)
                await unit.probe()
                yield unit


def _print_trouble(event: Event) -> None:
    if event.kind in ("exited", "gave_up"):
        print(f"{event.service}: {event.kind} {event.how} {event.detail}", flush=True)


async def measure_unit(report: Report, prompt_rows: int, probes: int) -> None:
    """lb's, prefill's and decode's admission at each number at once, idle and under load."""
    async with running_unit(prompt_rows) as unit:
        for at_once in AT_ONCE:
            await _measure_phase(report, unit, probes, at_once, "idle")
        async with under_load(unit):
            for at_once in AT_ONCE:
                await _measure_phase(report, unit, probes, at_once, "busy")


@asynccontextmanager
async def under_load(unit: Unit) -> AsyncIterator[None]:
    """Cold prompts and long streams, one after another, while the context lasts."""

    async def stream() -> None:
        while True:
            await unit.ask("stream", STREAM_ROWS, 64)

    async def prefill() -> None:
        while True:
            await unit.ask(f"cold {next(unit.numbers)}", 1, unit.prompt_rows)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream()) for _ in range(STREAMS)]
        tasks += [group.create_task(prefill()) for _ in range(COLD_PROMPTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _measure_phase(report: Report, unit: Unit, probes: int, at_once: int, state: str) -> None:
    before = {role: await unit.buckets(role) for role in ENGINES}
    finished = await _send_probes(unit, probes, at_once)
    after = {role: await unit.buckets(role) for role in ENGINES}
    points = [dict(one.timeline.unit_points) for one in finished]
    where = f"{at_once} at once, {state}"
    lb_ms = [(p["lb_admitted"] - p["lb_received"]) / 1e6 for p in points]
    way_ms = [(p["prefill_received"] - p["lb_admitted"]) / 1e6 for p in points]
    for name, share in QUANTILES.items():
        is_budget = name == "p99"
        report.add(
            f"unit: lb, {where}, {name}",
            quantile(lb_ms, share),
            "ms",
            BUDGET_LB if is_budget else "",
        )
        report.add(f"unit: from lb to prefill, {where}, {name}", quantile(way_ms, share), "ms")
        for role in ENGINES:
            bound_s = bucket_quantile(before[role], after[role], share)
            budget = BUDGET_ENGINE if is_budget else ""
            report.add(f"unit: {role}, {where}, {name}, at most", bound_s * 1e3, "ms", budget)
    report.add(f"unit: probes, {where}", len(finished), "requests")


async def _send_probes(unit: Unit, probes: int, at_once: int) -> list[Finished]:
    """`probes` of them, `at_once` at a time; fewer where that takes too long."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + PHASE_S
    left = iter(range(probes))
    finished: list[Finished] = []

    async def send_some() -> None:
        for _ in left:
            finished.append(await unit.probe())
            if clock() > until_s:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(send_some())
    return finished


def _read_buckets(address: str, role: Role) -> Buckets:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    name = f"duplet_{role}_admission_seconds_bucket"
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def bucket_quantile(before: Buckets, after: Buckets, share: float) -> float:
    """Upper bound in seconds of the bucket in which the quantile of what came between lies.

    Raises:
        ValueError: nothing came between.
    """
    counts = {bound: count - before.get(bound, 0) for bound, count in sorted(after.items())}
    total = counts.get(math.inf, 0)
    if total == 0:
        raise ValueError("no admission was counted")
    return next(bound for bound, count in counts.items() if count >= share * total)
