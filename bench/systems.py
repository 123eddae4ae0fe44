"""What is compared: the unit, two kinds of monolith, and the mixes of requests they get.

The unit (1P1D) has two cards, a monolith one: with whole prompts between decode steps, or with
chunks of them mixed into the steps. All get the same voices, lengths and seeds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from duplet_load.generator import WORKER
from duplet_load.synth import Synth
from duplet_unit.events import Event
from duplet_unit.gpus import on_gpus
from duplet_unit.unit import (
    MONOLITH_STAGES,
    STAGES,
    free_local_address,
    monolith_services,
    owned_run_dir,
    unit_environment,
    unit_services,
)
from duplet_unit.up import in_background, make_supervisor

READY_S = 150.0
"""No system takes so long to start."""
LOG_BYTES = 1500


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of workload."""

    name: str
    synth: Synth


@dataclass(frozen=True, slots=True)
class System:
    """What is measured."""

    name: str
    cards: int
    chunk_rows: int = 0
    """Of a monolith; 0: whole prompts."""
    lb: str = ""
    """Module that runs as lb; empty: lb itself."""
    worker: str = WORKER
    """Module of the client processes."""


UNIT = System("1P1D", 2)
UNPACKED = System("1P1D, prompts as JSON", 2, 0, "bench.unpacked_lb", "bench.unpacked_worker")
MONOLITH = System("monolith", 1)


def chunked(chunk_rows: int) -> System:
    return System(f"monolith, chunks of {chunk_rows}", 1, chunk_rows)


def mixes(prompt_rows: Sequence[int], output_rows: Sequence[int]) -> list[Mix]:
    """Half of the voices cold, warm, and bursts; lengths: least and most rows."""
    warm = Synth(
        *(1, 1.0, 0.0),
        voices=30,
        cold=0.02,
        prompt_least=prompt_rows[0],
        prompt_most=prompt_rows[1],
        output_least=output_rows[0],
        output_most=output_rows[1],
        seed=11,
    )
    return [
        Mix("half cold", replace(warm, cold=0.5)),
        Mix("warm, smooth", warm),
        Mix("bursts", replace(warm, cold=0.1, burstiness=4.0)),
    ]


@asynccontextmanager
async def running(
    system: System, environment: Mapping[str, str], gpus: Sequence[str], longest_prompt: int
) -> AsyncIterator[str]:
    """Start the system, stop it afterwards; its address. What its services said last is shown
    where it does not start or the context fails.

    Raises:
        RuntimeError, TimeoutError: it does not start.
    """
    is_unit = system.cards == UNIT.cards
    chunk_rows = system.chunk_rows or longest_prompt
    settings = {} if is_unit else {"DUPLET_MONOLITH_CHUNK_ROWS": str(chunk_rows)}
    with owned_run_dir(None) as run_dir:
        listen = free_local_address()
        make = unit_services if is_unit else monolith_services
        services = make(run_dir, listen, unit_environment({**environment, **settings}))
        if system.lb:
            command = (sys.executable, "-m", system.lb)
            services = [replace(s, argv=command) if s.name == "lb" else s for s in services]
        if gpus:
            services = on_gpus(services, gpus if is_unit else gpus[:1])
        stages = STAGES if is_unit else MONOLITH_STAGES

        def tell_trouble(event: Event) -> None:
            if event.kind in ("exited", "gave_up"):
                print(f"{system.name}: {event.service} {event.kind}: {event.how}", flush=True)

        supervisor = make_supervisor(services, run_dir, tell_trouble, stages)
        try:
            async with in_background(supervisor):
                began_s = time.monotonic()
                async with asyncio.timeout(READY_S):
                    is_ready = await supervisor.wait_ready()
                if not is_ready:
                    raise RuntimeError(f"{system.name} does not start: {supervisor.failure}")
                print(f"{system.name}: ready after {time.monotonic() - began_s:.1f} s", flush=True)
                yield listen
        except BaseException:
            _show_logs(run_dir / "logs")
            raise


def _show_logs(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if tail := path.read_bytes()[-LOG_BYTES:].decode(errors="replace"):
            print(f"--- {path.name}\n{tail}", flush=True)
