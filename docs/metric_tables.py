"""docs/metrics.md, made from the registries of the services: `python -m docs.metric_tables`.

Tests keep the page equal to what this writes, and its names equal to what a unit that runs tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from prometheus_client import Metric

from duplet_canary.tally import Tally
from duplet_canary.watch import observe as observe_canary
from duplet_core.decode import DecodeMachine
from duplet_core.decode_state import DecodeConfig
from duplet_core.effects import Effect, Event
from duplet_core.front import FrontMachine
from duplet_core.front_state import FrontConfig
from duplet_core.host import HostMachine
from duplet_core.host_state import HostConfig
from duplet_core.ids import InstanceId, Role
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer import WriterMachine
from duplet_core.writer_state import WriterConfig
from duplet_decode.__main__ import observe as observe_decode
from duplet_kvproxy.__main__ import KvproxyExecutor
from duplet_kvproxy.choice import TRANSPORTS
from duplet_lb.speech import LbExecutor
from duplet_monolith.__main__ import observe as observe_host
from duplet_prefill.__main__ import observe as observe_prefill
from duplet_runtime.engine_meter import EngineMeter
from duplet_runtime.executor import Executor
from duplet_runtime.machine import Machine
from duplet_runtime.metrics import Metrics
from duplet_runtime.settings import MONOLITH

PAGE = Path(__file__).with_name("metrics.md")
CANARY = "canary"
OPENING = """\
# Metrics

Made from the code by `make tables`; do not edit.

Each service tells its own to Prometheus where `DUPLET_METRICS_PORT` opens a port (in containers:
9100, on the network `unit`), the canary with `--metrics-port`. All are there from the start,
counters and histograms at 0. A histogram is asked for as `…_bucket`, `…_sum` and `…_count`. Which
to look at first: [operations](operations.md#metrics); which should wake somebody:
`docker/prometheus/alerts.yml`. Decode has `duplet_decode_step_predicted_seconds` and
`duplet_decode_step_longest_seconds` only where it has a floor to keep
(`DUPLET_DECODE_FLOOR_ROWS_PER_S`; on a GPU by default).
"""

NAME = InstanceId("page")
M = TypeVar("M", bound=Machine[Event, Effect])


def page() -> str:
    """The whole page."""
    parts = [OPENING]
    for service, families in asyncio.run(find_all()).items():
        parts += [f"## {service}\n", "| metric | type | labels | means |", "|---|---|---|---|"]
        parts += [row(family) for family in families]
        parts.append("")
    return "\n".join(parts)


async def find_all() -> dict[str, list[Metric]]:
    """By service, the families of a service that has just started."""
    decode = DecodeConfig(1, 1, 1, 1, "", floor_rows_per_s=42)
    both = (Role.PREFILL, Role.DECODE)
    return {
        Role.LB: families(LbExecutor(service(Role.LB), FrontMachine(NAME, FrontConfig())).metrics),
        Role.PREFILL: of_engine(
            *(Role.PREFILL, PrefillMachine(NAME, PrefillConfig(1, 1, ""))),
            *(observe_prefill, [Role.PREFILL]),
        ),
        Role.DECODE: of_engine(
            Role.DECODE, DecodeMachine(NAME, decode), observe_decode, [Role.DECODE]
        ),
        Role.KVPROXY: of_kvproxy(),
        MONOLITH: of_engine(
            MONOLITH, HostMachine(NAME, HostConfig(1, 1, 1, 1, "")), observe_host, both
        ),
        CANARY: of_canary(),
    }


def of_engine(
    name: str, machine: M, observe: Callable[[Metrics, M], None], plays: Sequence[Role]
) -> list[Metric]:
    """Of a service with an engine, which lb finds as each of the roles `plays`."""
    executor = Executor(service(name), machine)
    observe(executor.metrics, machine)
    EngineMeter(executor.metrics, prefills=Role.PREFILL in plays, decodes=Role.DECODE in plays)
    for role in plays:
        executor.accept_as(role)
    return families(executor.metrics)


def of_kvproxy() -> list[Metric]:
    choice: Any = SimpleNamespace(allowed=TRANSPORTS)
    machine = WriterMachine(NAME, WriterConfig())
    executor = KvproxyExecutor(service(Role.KVPROXY), machine, choice)
    executor.mover.close()
    return families(executor.metrics)


def of_canary() -> list[Metric]:
    watch: Any = SimpleNamespace(tally=Tally(), difference=None, alarm="")
    metrics = Metrics(CANARY)
    observe_canary(watch, metrics)
    return families(metrics)


def service(name: str) -> Any:
    """As much of a service as an executor asks for before it begins."""
    return SimpleNamespace(settings=SimpleNamespace(role=name), fail=None)


def families(metrics: Metrics) -> list[Metric]:
    return sorted(metrics.registry.collect(), key=lambda family: family.name)


def row(family: Metric) -> str:
    labels = sorted({label for s in family.samples for label in s.labels} - {"le"})
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{shown_name(family)}` | {family.type} | {shown} | {family.documentation} |"


def shown_name(family: Metric) -> str:
    """As it is asked for."""
    return f"{family.name}_total" if family.type == "counter" else family.name


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
