"""One client process: `python -m duplet_load.worker`; its plan is JSON on stdin.

Each request that ends is a line of JSON on stdout, so the parent can show progress; the last
line has the gaps between rows and how late this process's own event loop was. Rows are taken,
counted and dropped.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from duplet_client import AsyncClient, Finished, GenerateError, Rows, SamplingOptions
from duplet_core.playback import NS, ROWS_PER_SECOND, Playback
from duplet_load.prompts import PromptMaker
from duplet_load.record import Gaps, Record
from duplet_load.trace import Arrival
from duplet_pages.spec import ModelSpec

TICK_S = 0.05
"""How often the loop's own lateness is measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one client process does."""

    address: str
    spec: str
    """The model's, as canonical JSON."""
    arrivals: tuple[tuple[int, Arrival], ...]
    """(number in the whole trace, request)."""
    concurrency: int
    """Closed loop: so many requests at once, whatever their times. 0: open loop, each at its
    time."""
    begin_ns: int
    """When time 0 of the trace is, on the machine's monotonic clock."""
    stop_ns: int
    """No request is sent after this; 0: all are."""
    first_rows: int = 1
    rows_per_message: int = 1
    timeout_s: float = 120.0
    timelines: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        fields = json.loads(text)
        fields["arrivals"] = tuple(
            (number, Arrival(a["at_s"], tuple(map(tuple, a["parts"])), a["output_rows"]))
            for number, a in fields["arrivals"]
        )
        return Plan(**fields)


class Worker:
    """Runs a plan. The client is `run`'s."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        spec = ModelSpec.from_json(plan.spec)
        self._prompts = PromptMaker(spec)
        self._audio_rate = spec.rows_per_second or ROWS_PER_SECOND
        self._gaps = Gaps()
        self._lateness_s: list[float] = []

    async def run(self) -> None:
        plan = self._plan
        async with AsyncClient(plan.address) as client:
            watching = asyncio.create_task(self._watch_loop())
            try:
                await _sleep_until(plan.begin_ns)
                if plan.concurrency:
                    waiting = iter(plan.arrivals)
                    loops = (self._loop(client, waiting) for _ in range(plan.concurrency))
                    await asyncio.gather(*loops)
                else:
                    await self._send_all(client)
            finally:
                watching.cancel()
        _tell({"gaps": self._gaps.classes, "lateness_s": self._lateness_s})

    async def _loop(self, client: AsyncClient, waiting: Iterator[tuple[int, Arrival]]) -> None:
        """One listener: a request after the other."""
        for number, arrival in waiting:
            if self._over():
                return
            await self._send(client, number, arrival, time.monotonic_ns())

    async def _send_all(self, client: AsyncClient) -> None:
        """Every request at its time, however many run."""
        async with asyncio.TaskGroup() as group:
            for number, arrival in self._plan.arrivals:
                due_ns = self._plan.begin_ns + round(arrival.at_s * NS)
                await _sleep_until(due_ns)
                if self._over():
                    return
                group.create_task(self._send(client, number, arrival, due_ns))

    def _over(self) -> bool:
        return 0 < self._plan.stop_ns <= time.monotonic_ns()

    async def _send(self, client: AsyncClient, number: int, arrival: Arrival, due_ns: int) -> None:
        plan = self._plan
        at_s = (due_ns - plan.begin_ns) / NS
        record = Record(number, arrival.prompt_rows, at_s)
        generation = client.generate(
            self._prompts.prompt(arrival),
            sampling=SamplingOptions(seed=number),
            max_rows=arrival.output_rows,
            first_rows=plan.first_rows,
            rows_per_message=plan.rows_per_message,
            voice=arrival.parts[0][0],
            timeout_s=plan.timeout_s,
        )
        began_ns = time.monotonic_ns()
        record.lag_s = (began_ns - due_ns) / NS
        player = Playback(self._audio_rate)
        last_ns = 0
        try:
            async with generation:
                async for event in generation:
                    if isinstance(event, Rows):
                        now_ns = generation.timing.last_row_ns or 0
                        player.add(len(event.rows), now_ns)
                        if last_ns:
                            gap_s = (now_ns - last_ns) / NS
                            self._gaps.add(gap_s)
                            record.longest_gap_s = max(record.longest_gap_s, gap_s)
                        last_ns = now_ns
                    elif isinstance(event, Finished):
                        record.outcome = event.reason.value
                        record.cached_rows = event.usage.cached_rows
        except GenerateError as error:
            record.outcome = error.reason or error.code.name
        timing = generation.timing
        record.took_s = (time.monotonic_ns() - began_ns) / NS
        record.ttft_s, record.ttfa_s = timing.ttft_s, timing.ttfa_s
        record.rows, record.rows_per_second = timing.rows, timing.rows_per_second
        record.stalls, record.stalled_s = player.stalls, player.stalled_ns / NS
        if plan.timelines and generation.timeline is not None:
            record.timeline = generation.timeline.to_fields()
        _tell(record.to_fields())

    async def _watch_loop(self) -> None:
        """How late the loop wakes: what a client reads later than it came is as late."""
        while True:
            due_ns = time.monotonic_ns() + round(TICK_S * NS)
            await asyncio.sleep(TICK_S)
            self._lateness_s.append(max(0.0, (time.monotonic_ns() - due_ns) / NS))


async def _sleep_until(at_ns: int) -> None:
    await asyncio.sleep(max(0.0, (at_ns - time.monotonic_ns()) / NS))


def _tell(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    plan = Plan.from_json(sys.stdin.read())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Worker(plan).run())


if __name__ == "__main__":
    main()
