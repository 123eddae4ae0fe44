"""Steps that are timed before anybody has a stream: which, over which pages, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplet_core.engine import FromEngine, Ready, Start, StepTime
from duplet_engine import step_times
from duplet_engine.process import serve
from duplet_engine.step_times import TIMED_STEPS, contexts, pages_of, sizes_up_to, time_steps
from duplet_engine.tiny import TINY
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import FakeLink, make_requests, run_alone
from tests.engine.conftest import MakeEngine

MILLISECOND = 1_000_000


class ReadyLink(FakeLink):
    """Takes the descriptor of the pool, too."""

    def send(self, message: FromEngine, fds: Sequence[int] = ()) -> None:
        assert len(fds) == 1
        super().send(message)


class Clocked:
    """An engine whose steps take 1 ms for each stream and 10 µs for each page, by its own clock;
    the first step of a batch takes a second, and one more has a pause of as much."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model_config = TINY
        self.now_ns = 0
        self.starts: list[Start] = []
        self.steps = 0

    def new_batch(self) -> Any:
        self.starts, self.steps = [], 0
        return SimpleNamespace(join=self.starts.append)

    def decode_step(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.steps += 1
        pages = sum(len(start.pages) for start in self.starts)
        self.now_ns += len(self.starts) * MILLISECOND + pages * MILLISECOND // 100
        self.now_ns += 10**9 * (self.steps in (1, 3))
        return torch.empty(0), torch.empty(0)

    def monotonic_ns(self) -> int:
        return self.now_ns


def time_clocked(monkeypatch: pytest.MonkeyPatch, longest_ms: float, **settings: Any) -> list[Any]:
    engine = Clocked(EngineConfig("decode", "tiny", **settings))
    monkeypatch.setattr(step_times, "time", engine)
    return list(time_steps(engine, round(longest_ms * MILLISECOND)))


def test_every_size_is_timed_at_two_contexts_without_first_steps_and_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = time_clocked(monkeypatch, 1000, slots=6)
    assert times == [
        StepTime(n, n * pages, n * MILLISECOND + n * pages * MILLISECOND // 100)
        for pages in (2, 128)
        for n in (1, 2, 4, 6)
    ]


def test_the_first_size_that_takes_too_long_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = time_clocked(monkeypatch, 5, slots=64)
    assert [(t.streams, t.pages) for t in times] == [
        *((1, 2), (2, 4), (4, 8), (8, 16)),
        *((1, 128), (2, 256), (4, 512)),
    ]


@pytest.mark.parametrize(
    ("slots", "sizes"), [(1, [1]), (2, [1, 2]), (16, [1, 2, 4, 8, 16]), (5, [1, 2, 4, 5])]
)
def test_sizes_double_up_to_the_slots(slots: int, sizes: list[int]) -> None:
    assert list(sizes_up_to(slots)) == sizes


@pytest.mark.parametrize("pool", [1, 2, 5, 300])
def test_streams_read_pages_of_their_own_and_end_in_page_0(pool: int) -> None:
    count = min(pool, 4)
    streams = [pages_of(stream, count, pool) for stream in range(70)]
    for pages in streams:
        assert len(set(pages)) == count
        assert all(0 <= page < pool for page in pages)
        assert pages[-1] == 0
    read = {page for pages in streams for page in pages[:-1]}
    assert len(read) == min(70 * (count - 1), pool - 1), "as many as there are"


@pytest.mark.parametrize("page_rows", [1, 3, 16])
@pytest.mark.parametrize("pool", [1, 2, 40])
def test_an_engine_of_any_pool_times_its_steps_and_writes_one_page(
    page_rows: int, pool: int, make_engine: MakeEngine
) -> None:
    engine = make_engine(page_rows=page_rows, pool_pages=pool, slots=3)
    times = time_steps(engine, 10**12)
    found = contexts(engine.config, engine.model_config.longest_sequence)
    assert [(t.streams, t.pages) for t in times] == [(n, n * p) for p in found for n in (1, 2, 3)]
    assert (not times) == (page_rows * pool == 1)
    assert all(t.taken_ns > 0 for t in times)
    written = engine.pool.array.reshape(-1).view("u1")[-pool * engine.pool.description.page_bytes :]
    per_page = written.reshape(pool, -1).any(axis=1).tolist()
    assert per_page == [bool(times), *[False] * (pool - 1)]


def test_requests_after_it_get_the_rows_that_they_get_without_it(make_engine: MakeEngine) -> None:
    (request,) = make_requests(np.random.default_rng(4), [37])
    plain, timed = make_engine(), make_engine()
    time_steps(timed, 10**12)
    assert run_alone(timed, request, [0, 5, 2, 9], 6) == run_alone(plain, request, [0, 5, 2, 9], 6)
    assert TIMED_STEPS % 2 == 1, "the middle one is one of them"


@pytest.mark.parametrize("longest_step_ns", [0, 10**12])
def test_an_engine_that_is_asked_says_what_it_timed_with_its_first_word(
    longest_step_ns: int,
) -> None:
    link = ReadyLink()
    serve(EngineConfig("decode", "tiny", slots=2, longest_step_ns=longest_step_ns), link)
    (ready,) = link.sent
    assert isinstance(ready, Ready)
    assert [step.streams for step in ready.step_times] == ([1, 2, 1, 2] if longest_step_ns else [])
