"""Runs a trace against a unit from several client processes and collects what they measured."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from duplet_client import AsyncClient, Unit
from duplet_core.errors import Reason, Unavailable
from duplet_core.playback import NS
from duplet_load.record import Gaps, Record
from duplet_load.trace import Arrival
from duplet_load.worker import Plan

LEAD_S = 0.05
"""From when the last client process is up until time 0, so that each knows of it before."""

LINE_BYTES = 1 << 24
"""Longest line of a client process: a request with its timeline, or all gaps."""

WORKER = "duplet_load.worker"


@dataclass(frozen=True, slots=True)
class Load:
    """How a trace is sent."""

    address: str
    processes: int = 2
    concurrency: int = 0
    """Closed loop: so many listeners, from time 0 on. 0: open loop, each request at its time."""
    seconds: float = 0.0
    """No request is sent after so long; 0: all are."""
    first_rows: int = 1
    rows_per_message: int = 1
    timeout_s: float = 120.0
    timelines: bool = False
    starts_s: tuple[float, ...] = ()
    """Closed loop: when each listener begins, instead of `concurrency`."""
    marks_s: tuple[float, ...] = ()
    """Times, ascending, between which gaps are counted apart."""
    worker: str = WORKER
    """Module of the client processes."""


@dataclass(slots=True)
class Outcome:
    """All that a run measured."""

    records: list[Record] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    gaps_between: list[Gaps] = field(default_factory=list)
    """Before the first of the load's marks, between each two, after the last."""
    lateness_s: list[float] = field(default_factory=list)
    """Of the client processes' event loops."""
    began_ns: int = 0
    """Time 0: all client processes are up."""
    ended_ns: int = 0
    kv_checks: int = 0
    kv_mismatches: int = 0


async def run_load(
    load: Load,
    arrivals: Sequence[Arrival],
    on_record: Callable[[Record], None],
    stop: asyncio.Event | None = None,
) -> Outcome:
    """Send the trace, or what of it came before `stop`, and read every request to its end.

    Raises:
        GenerateError: the unit does not answer.
        Unavailable: it does not know its model yet, or a client process failed.
    """
    before = await _ask(load.address)
    assert before.spec is not None
    outcome = Outcome(gaps_between=[Gaps() for _ in range(len(load.marks_s) + 1)])
    starts_s = load.starts_s or (0.0,) * load.concurrency
    count = max(1, min(load.processes, len(starts_s) or load.processes, len(arrivals)))
    plan = Plan(
        *(load.address, before.spec.to_json(), (), (), load.seconds),
        *(load.first_rows, load.rows_per_message, load.timeout_s, load.timelines, load.marks_s),
    )
    start = _Start(count, outcome)
    numbered = list(enumerate(arrivals))
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            own = replace(
                plan, arrivals=tuple(numbered[index::count]), starts_s=starts_s[index::count]
            )
            group.create_task(_run_process(load.worker, own, start, on_record, stop))
    outcome.ended_ns = time.monotonic_ns()
    after = await _ask(load.address)
    outcome.kv_checks = after.kv_checks - before.kv_checks
    outcome.kv_mismatches = after.kv_mismatches - before.kv_mismatches
    return outcome


class _Start:
    """Sets time 0 when so many client processes are up."""

    def __init__(self, processes: int, outcome: Outcome) -> None:
        self._missing = processes
        self._all_up = asyncio.Event()
        self.outcome = outcome

    async def wait(self) -> int:
        """For the others; the time at which all begin, ns."""
        self._missing -= 1
        if self._missing == 0:
            self.outcome.began_ns = time.monotonic_ns() + round(LEAD_S * NS)
            self._all_up.set()
        await self._all_up.wait()
        return self.outcome.began_ns


async def _ask(address: str) -> Unit:
    async with AsyncClient(address) as client:
        unit = await client.unit()
    if unit.spec is None:
        raise Unavailable(Reason.NOT_READY, "the unit does not know its model yet")
    return unit


async def _run_process(
    worker: str,
    plan: Plan,
    start: _Start,
    on_record: Callable[[Record], None],
    stop: asyncio.Event | None,
) -> None:
    """One client process from start to end; killed when this task is cancelled."""
    command = (sys.executable, "-m", worker)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
        process_group=0,  # A terminal's Ctrl-C is ours.
    )
    assert process.stdin is not None and process.stdout is not None
    stopping = None
    try:
        process.stdin.write(plan.to_json().encode() + b"\n")
        await process.stdin.drain()
        if is_up := await process.stdout.readline():
            process.stdin.write(b"%d\n" % await start.wait())
            stopping = asyncio.create_task(_close_at(stop, process.stdin)) if stop else None
        async for line in process.stdout:
            _take(json.loads(line), start.outcome, on_record)
        code = await process.wait()
        if code != 0 or not is_up:
            raise Unavailable(Reason.ENGINE_FAILED, f"a client process exited with {code}")
    finally:
        if stopping is not None:
            stopping.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _close_at(stop: asyncio.Event, plan: asyncio.StreamWriter) -> None:
    """The end of its plan tells a client process to send nothing more."""
    await stop.wait()
    plan.close()


def _take(fields: dict[str, Any], outcome: Outcome, on_record: Callable[[Record], None]) -> None:
    if "gaps" in fields:
        for between, gaps in zip(outcome.gaps_between, fields["gaps"], strict=True):
            between.merge(gaps)
            outcome.gaps.merge(gaps)
        outcome.lateness_s += fields["lateness_s"]
        return
    record = Record(**fields)
    outcome.records.append(record)
    on_record(record)
