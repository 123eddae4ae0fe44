"""Thousands of requests of a real unit, in every way that they can end: the segments meet, and
their sum is what the client measured."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from duplet_client import AsyncClient, GenerateError, Rows, SamplingOptions, Timeline
from duplet_core.timeline import CUT, NETWORK, POINTS, SEGMENTS
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import live_unit
from tests.e2e.streams import Ask, known_spec

REQUESTS = 2_400
AT_ONCE = 8
SETTINGS = {"DUPLET_DECODE_SLOTS": "6", "DUPLET_LB_QUEUE_WAIT_MS": "5"}
"""Fewer slots than clients, so that some requests are refused."""

STOPPED_AT_ONCE = SEGMENTS[: SEGMENTS.index("to kvproxy")] + SEGMENTS[-2:]


class Clients:
    """Sends the requests; keeps how each ended and what it measured."""

    def __init__(self, client: AsyncClient, spec: ModelSpec) -> None:
        self._client = client
        self._spec = spec
        self._sent = 0
        self.ends: Counter[str] = Counter()
        self.rows = 0

    async def work(self) -> None:
        """One client: a request after the other until all are sent."""
        while self._sent < REQUESTS:
            self._sent += 1
            await self._send(self._sent)

    async def _send(self, number: int) -> None:
        choice = random.Random(number)
        kind = choice.choices(("read", "leave", "junk", "late"), (70, 15, 10, 5))[0]
        ask = Ask(number, "x", voice_rows=choice.choice((8, 40)))
        prompt = ask.prompt(self._spec)
        if kind == "junk":
            prompt[0, 0] = -1
        began_ns = time.monotonic_ns()
        generation = self._client.generate(
            prompt,
            max_rows=choice.randint(1, 6),
            rows_per_message=choice.randint(1, 3),
            sampling=SamplingOptions(seed=number),
            timeout_s=0.004 if kind == "late" else 60.0,
        )
        leave_at = choice.randint(0, 2) if kind == "leave" else None
        end, pause_s = "finished", 0.0
        async with generation:
            try:
                async for event in generation:
                    self.rows += len(event.rows) if isinstance(event, Rows) else 0
                    if leave_at is not None and generation.timing.rows >= leave_at:
                        end = "left"
                        break
            except GenerateError as error:
                end, pause_s = error.reason or error.code.name, error.retry_after_s or 0.0
        took_ns = time.monotonic_ns() - began_ns
        assert generation.timeline is not None
        if generation.timing.finished_ns is not None:
            end = "finished"
        check(generation.timeline, end, took_ns)
        self.ends[end] += 1
        await asyncio.sleep(pause_s)  # as the unit asked


def check(timeline: Timeline, end: str, took_ns: int) -> None:
    """The segments meet, nothing runs backwards, and the sum is the client's whole time."""
    segments = timeline.segments()
    assert sum(segment.duration_ns for segment in segments) == timeline.total_ns
    assert 0 <= timeline.total_ns <= took_ns
    assert all(segment.duration_ns >= 0 for segment in segments), (end, segments)
    names = tuple(segment.name for segment in segments)
    assert NETWORK not in names, (end, timeline)
    if end == "finished":
        assert names in (SEGMENTS, STOPPED_AT_ONCE)
        check_beside(timeline)
    else:
        assert names.count(CUT) == 1, (end, names)
        assert len(set(names)) == len(names)


def check_beside(timeline: Timeline) -> None:
    """Steps fill the time between the first and the last, and side spans lie within the chain."""
    at_ns = dict(timeline.points)
    if "first_step" in at_ns:
        assert at_ns["first_step"] + sum(timeline.step_gaps_ns) == at_ns["last_step"]
        assert len(timeline.beside()) == 3
    for span in timeline.beside():
        assert at_ns[POINTS[0]] <= span.start_ns <= span.end_ns <= at_ns[POINTS[-1]], span


@pytest.mark.timeout(300)
async def test_segments_meet_and_add_up_however_a_request_ends() -> None:
    async with live_unit(SETTINGS) as unit, AsyncClient(unit.listen) as client:
        clients = Clients(client, await known_spec(client))
        await asyncio.gather(*(clients.work() for _ in range(AT_ONCE)))
    assert sum(clients.ends.values()) == REQUESTS
    assert clients.ends["finished"] > REQUESTS / 3, clients.ends
    for end in ("left", "INVALID_PROMPT", "OVERLOADED", "DEADLINE_EXCEEDED"):
        assert clients.ends[end] > 5, clients.ends
