"""One client process: `python -m duplet_load.worker`; its plan is a line of JSON on stdin. When
it could begin it says so with a line, and gets one with the time at which all begin; the end of
stdin tells it to send nothing more.

Each request that ends is a line of JSON on stdout, so the parent can show progress; the last
line has the gaps between rows and how late this process's own event loop was. Rows are taken,
counted and dropped.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from duplet_client import AsyncClient, Finished, GenerateError, Rows, SamplingOptions
from duplet_core.playback import NS, ROWS_PER_SECOND, Playback
from duplet_load.prompts import PromptMaker
from duplet_load.record import Gaps, Record
from duplet_load.trace import Arrival
from duplet_pages.spec import ModelSpec

PLAN_BYTES = 1 << 28
"""Longest plan: far more than a million requests."""
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
    starts_s: tuple[float, ...]
    """Closed loop: when each listener begins, who then sends one request after the other,
    whatever their times. Empty: open loop, each at its time."""
    seconds: float
    """No request is sent after so long; 0: all are."""
    first_rows: int = 1
    rows_per_message: int = 1
    timeout_s: float = 120.0
    timelines: bool = False
    marks_s: tuple[float, ...] = ()
    """Gaps are counted apart before the first, between each two, and after the last."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        fields = json.loads(text)
        fields["arrivals"] = tuple(
            (number, Arrival(a["at_s"], tuple(map(tuple, a["parts"])), a["output_rows"]))
            for number, a in fields["arrivals"]
        )
        for name in ("starts_s", "marks_s"):
            fields[name] = tuple(fields[name])
        return Plan(**fields)


class Worker:
    """Runs a plan. The client is `run`'s."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        spec = ModelSpec.from_json(plan.spec)
        self._prompts = PromptMaker(spec)
        self._audio_rate = spec.rows_per_second or ROWS_PER_SECOND
        self._gaps = [Gaps() for _ in range(len(plan.marks_s) + 1)]
        self._begin_ns = self._stop_ns = 0
        self._marks_ns: list[int] = []
        self._lateness_s: list[float] = []
        self._stopped = asyncio.Event()

    async def run(self, begin_ns: int) -> None:
        """`begin_ns`: when time 0 of the trace is, on the machine's monotonic clock."""
        plan = self._plan
        self._begin_ns = begin_ns
        self._stop_ns = begin_ns + round(plan.seconds * NS) if plan.seconds else 0
        self._marks_ns = [begin_ns + round(mark_s * NS) for mark_s in plan.marks_s]
        async with AsyncClient(plan.address) as client:
            watching = asyncio.create_task(self._watch_loop())
            try:
                await self._sleep_until(begin_ns)
                if plan.starts_s:
                    waiting = iter(plan.arrivals)
                    loops = (self._loop(client, waiting, at_s) for at_s in plan.starts_s)
                    await asyncio.gather(*loops)
                else:
                    await self._send_all(client)
            finally:
                watching.cancel()
        _tell({"gaps": [gaps.classes for gaps in self._gaps], "lateness_s": self._lateness_s})

    def stop(self) -> None:
        """Send nothing more; what was sent is read to its end."""
        self._stopped.set()

    async def _loop(
        self, client: AsyncClient, waiting: Iterator[tuple[int, Arrival]], at_s: float
    ) -> None:
        """One listener: from this time on a request after the other."""
        await self._sleep_until(self._begin_ns + round(at_s * NS))
        for number, arrival in waiting:
            if self._over():
                return
            await self._send(client, number, arrival, time.monotonic_ns())

    async def _send_all(self, client: AsyncClient) -> None:
        """Every request at its time, however many run."""
        async with asyncio.TaskGroup() as group:
            for number, arrival in self._plan.arrivals:
                due_ns = self._begin_ns + round(arrival.at_s * NS)
                await self._sleep_until(due_ns)
                if self._over():
                    return
                group.create_task(self._send(client, number, arrival, due_ns))

    async def _sleep_until(self, at_ns: int) -> None:
        """Until then, or until it is told to stop."""
        while True:
            left_s = max(0.0, (at_ns - time.monotonic_ns()) / NS)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), left_s)
            # uvloop's timers count milliseconds, and wake up to one early.
            if self._stopped.is_set() or time.monotonic_ns() >= at_ns:
                return

    def _over(self) -> bool:
        return self._stopped.is_set() or 0 < self._stop_ns <= time.monotonic_ns()

    async def _send(self, client: AsyncClient, number: int, arrival: Arrival, due_ns: int) -> None:
        plan = self._plan
        at_s = (due_ns - self._begin_ns) / NS
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
                            self._gaps[bisect_right(self._marks_ns, now_ns)].add(gap_s)
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


def _tell(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)


async def run_plan() -> None:
    """Take the plan from stdin and run it."""
    given = asyncio.StreamReader(PLAN_BYTES)
    loop = asyncio.get_running_loop()
    # Closed by the transport, which lives as long as the process.
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(given), sys.stdin)
    worker = Worker(Plan.from_json((await given.readline()).decode()))
    _tell({"up": True})
    begin = await given.readline()
    if not begin:
        worker.stop()
    stopping = asyncio.create_task(given.read())
    stopping.add_done_callback(lambda _: worker.stop())
    try:
        await worker.run(int(begin or time.monotonic_ns()))
    finally:
        stopping.cancel()


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_plan())


if __name__ == "__main__":
    main()
