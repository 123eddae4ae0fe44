"""The prefix cache in a real unit: what a voice costs the first time, and what after that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from statistics import median

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from duplet_client import AsyncClient, Rows, SamplingOptions, Usage
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from tests.e2e.live_unit import LiveUnit, live_unit, until
from tests.e2e.streams import Ask, Stream, assert_same, known_spec, read_all

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL_PAGES = 300
VOICES = 4
"""Asks whose seeds differ by so many have one voice."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit() -> AsyncIterator[LiveUnit]:
    """Prefill's pool holds two prompts of the longest used here, not three."""
    async with live_unit({"DUPLET_PREFILL_POOL_PAGES": str(POOL_PAGES)}) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(unit: LiveUnit) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(unit.listen) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spec(client: AsyncClient) -> ModelSpec:
    found = await known_spec(client)
    # Once something was computed, prefill's counters are there.
    await Stream(Ask(seed=1, max_rows=1)).read(client, found)
    return found


def matchable(rows: int, spec: ModelSpec) -> int:
    """Pages of a prompt that may come from the cache: its last row is always computed."""
    return (rows - 1) // spec.page_rows


def shared_rows(a: NDArray[np.int32], b: NDArray[np.int32], spec: ModelSpec) -> int:
    """Rows of `b` that lie in whole pages equal to those of `a`, from the beginning on."""
    pages = min(len(a) // spec.page_rows, matchable(len(b), spec))
    for page in range(pages):
        rows = slice(page * spec.page_rows, (page + 1) * spec.page_rows)
        if not np.array_equal(a[rows], b[rows]):
            return page * spec.page_rows
    return pages * spec.page_rows


def rows_to_compute(prompts: Sequence[NDArray[np.int32]], spec: ModelSpec) -> int:
    """Rows that a unit computes of these prompts when each page is computed once."""
    pages = set()
    rest = 0
    for prompt in prompts:
        whole = matchable(len(prompt), spec)
        pages |= {prompt[: (n + 1) * spec.page_rows].tobytes() for n in range(whole)}
        rest += len(prompt) - whole * spec.page_rows
    return len(pages) * spec.page_rows + rest


def usage_of(stream: Stream) -> Usage:
    assert stream.finished is not None, str(stream.error)
    return stream.finished.usage


async def counters(unit: LiveUnit) -> tuple[int, int]:
    """Rows of all prompts that prefill began with, and those of them that were cached."""
    names = ("prompt_rows_total", "cached_rows_total")
    values = [await unit.gauge(Role.PREFILL, name) for name in names]
    return int(values[0]), int(values[1])


async def first_row_s(client: AsyncClient, spec: ModelSpec, ask: Ask) -> float:
    """Seconds to the first row."""
    sampling = SamplingOptions(seed=ask.seed)
    generation = client.generate(ask.prompt(spec), sampling=sampling, max_rows=1)
    async with generation:
        async for event in generation:
            if isinstance(event, Rows):
                assert generation.timing.ttft_s is not None
                return generation.timing.ttft_s
    raise AssertionError("no row")


async def test_sixteen_requests_for_one_cold_voice_compute_it_once(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec
) -> None:
    asks = [Ask(seed, voice_rows=500, max_rows=30) for seed in range(100, 164, VOICES)]
    assert len(asks) == 16
    assert len({ask.voice for ask in asks}) == 1
    prompts = [ask.prompt(spec) for ask in asks]
    before = await counters(unit)
    streams = await read_all(client, spec, asks)
    after = await counters(unit)
    rows, cached = after[0] - before[0], after[1] - before[1]
    assert rows == sum(len(prompt) for prompt in prompts)
    assert rows - cached == rows_to_compute(prompts, spec)
    told = sorted(usage_of(stream).cached_rows for stream in streams)
    assert sum(told) == cached
    assert told[0] == 0, "somebody computed the voice"
    assert told[1] >= 500 // spec.page_rows * spec.page_rows, "and nobody else did"
    for stream in streams[:3]:
        again = await Stream(stream.ask).read(client, spec)
        assert_same(again, stream)
        rows = usage_of(again).prompt_rows
        assert usage_of(again).cached_rows == matchable(rows, spec) * spec.page_rows


async def test_an_edited_transcript_shares_exactly_what_is_equal(
    client: AsyncClient, spec: ModelSpec
) -> None:
    first = Ask(seed=201, text="the quick brown fox jumps over the lazy dog and runs away")
    edits = [
        Ask(seed=201, text="the quick brown fox jumps over the lazy cat and runs away"),
        Ask(seed=201, text="The quick brown fox jumps over the lazy dog and runs away"),
        Ask(seed=201, text=first.text + " and comes back again, as foxes sometimes do"),
        Ask(seed=201, text=first.text, voice_rows=63),
    ]
    await Stream(first).read(client, spec)
    known = [first.prompt(spec)]
    shared = []
    for ask in edits:
        prompt = ask.prompt(spec)
        expected = max(shared_rows(old, prompt, spec) for old in known)
        assert usage_of(await Stream(ask).read(client, spec)).cached_rows == expected
        known.append(prompt)
        shared.append(expected)
    assert len(set(shared)) > 2, "the edits cut at different pages"


async def test_others_go_on_when_the_one_that_computes_is_cancelled(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec
) -> None:
    asks = [Ask(seed, voice_rows=1500, max_rows=20) for seed in (302, 306, 310)]
    others = [Stream(ask) for ask in asks[1:]]

    async def started() -> bool:
        return all(stream.started is not None for stream in others)

    async with client.generate(asks[0].prompt(spec), max_rows=1000) as first:
        await anext(first)  # It is admitted, and computes what the others need.
        reading = [asyncio.create_task(stream.read(client, spec)) for stream in others]
        await until(started, "the others are admitted")
    await asyncio.gather(*reading)
    for stream in others:
        assert_same(await Stream(stream.ask).read(client, spec), stream)
    await unit.wait_idle()


async def test_a_full_cache_makes_room(
    unit: LiveUnit, client: AsyncClient, spec: ModelSpec
) -> None:
    """Every voice fits by itself, all of them do not: each finds room, with the same rows."""
    asks = [Ask(seed, voice_rows=2000 + seed, max_rows=10) for seed in range(4)]
    assert sum(spec.pages_for(len(ask.prompt(spec))) for ask in asks) > POOL_PAGES
    rounds = [[await Stream(ask).read(client, spec) for ask in asks] for _ in range(2)]
    for once, again in zip(*rounds, strict=True):
        assert_same(again, once)
        assert usage_of(again).cached_rows < usage_of(again).prompt_rows
    at_once = await read_all(client, spec, asks)
    for stream, once in zip(at_once, rounds[0], strict=True):
        assert_same(stream, once)
    await unit.wait_idle()
    assert await unit.gauge(Role.PREFILL, "pages_cached") <= POOL_PAGES
    told = await unit.wait_pages_free()
    assert told.kv_mismatches == 0


async def test_time_to_first_row(
    client: AsyncClient, spec: ModelSpec, record_property: Callable[[str, object], None]
) -> None:
    """Cold and cached times go into the report; a busy machine makes them no test."""
    cold, hits = [], []
    for seed in (500, 501, 502):
        ask = Ask(seed, voice_rows=1000)
        cold.append(await first_row_s(client, spec, ask))
        hits.append(await first_row_s(client, spec, ask))
        assert usage_of(await Stream(ask).read(client, spec)).cached_rows > 900
    record_property("ttft_cold_ms", round(median(cold) * 1000, 1))
    record_property("ttft_cached_ms", round(median(hits) * 1000, 1))
    print(f"TTFT of 1,000 rows: cold {median(cold):.3f} s, cached {median(hits):.3f} s")
