"""The GPU engine and its loops on whole requests in float32, against the CPU engine.
Run by test_kernels_interpreted.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from duplet_core.engine import (
    ChunkDone,
    FromEngine,
    Shutdown,
    Start,
    StepDone,
    Stopped,
    ToEngine,
    Verified,
    Verify,
)
from duplet_core.ids import TransferId
from duplet_engine.engine import Engine
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.gpu_start import GpuLoop, warm_up
from duplet_engine.step_times import time_steps
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import Request, make_requests, run_alone
from tests.kernels.eager_gpu import OTHER, SMALL, eager_engine, eager_gpu

STEPS = 3
LENGTHS = [37, 20, 50]
PAGES = [[9, 2, 11, 4], [1, 5], [8, 3, 7, 0]]
CONFIG = EngineConfig("monolith", model=SMALL.name, pool_pages=256, slots=4, chunk_rows=48)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with torch.inference_mode(), eager_gpu():
        yield


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    with eager_gpu():
        return make_requests(np.random.default_rng(21), LENGTHS)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> list[list[list[int]]]:
    """`1 + STEPS` rows of each request."""
    with torch.inference_mode(), eager_gpu():
        cpu = Engine(CONFIG)
        rows = [run_alone(cpu, r, p, STEPS)[1] for r, p in zip(requests, PAGES, strict=True)]
        cpu.close()
    return rows


class Answering:
    """The I/O process of a monolith: a prompt's first row starts its stream."""

    def __init__(self, requests: list[Request], pages: list[list[int]]) -> None:
        self._requests = requests
        self._pages = pages
        self._waiting: list[ToEngine] = [
            request.prefill(seq, pages[seq]) for seq, request in enumerate(requests)
        ]
        self.rows: list[list[list[int]]] = [[] for _ in requests]
        self.digests: list[tuple[bytes, ...]] = [() for _ in requests]
        self.stopped = 0

    def poll(self) -> list[ToEngine]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def wait(self) -> list[ToEngine]:
        return self.poll() or [Shutdown()]

    def send(self, message: FromEngine, fds: object = ()) -> None:
        if isinstance(message, ChunkDone):
            self.digests[message.seq] += message.digests
            if message.first_row is not None:
                self._begin(message.seq, message.first_row)
        elif isinstance(message, StepDone):
            rows = np.frombuffer(message.rows, "<i4").reshape(-1, SMALL.columns).tolist()
            for seq, row in zip(message.seqs, rows, strict=True):
                self.rows[seq - 10].append(row)
        else:
            assert isinstance(message, Stopped), message
            self.stopped += 1

    def _begin(self, seq: int, first_row: bytes) -> None:
        self.rows[seq].append(np.frombuffer(first_row, "<i4").tolist())
        request = self._requests[seq]
        self._waiting.append(
            Start(
                10 + seq,
                tuple(self._pages[seq]),
                first_row,
                request.rows,
                1 + STEPS,
                request.sampling,
            )
        )


def cut_at_stop(rows: list[list[int]]) -> list[list[int]]:
    tokens = [row[0] for row in rows]
    return rows[: tokens.index(SMALL.stop_id)] if SMALL.stop_id in tokens else rows


@pytest.mark.parametrize("overlap", [True, False])
def test_a_monoliths_rows_are_the_cpu_engines(
    overlap: bool, requests: list[Request], expected: list[list[list[int]]]
) -> None:
    """Three prompts in shared passes; streams step beside the prompts that are left."""
    engine = eager_engine(replace(CONFIG, overlap=overlap))
    warm_up(engine)
    link = Answering(requests, PAGES)
    GpuLoop(engine)(link)
    assert link.rows == [cut_at_stop(rows) for rows in expected]
    assert link.stopped == len(requests)
    assert link.digests == [(), (), ()], "nothing is moved, so nothing is digested"
    engine.close()


class Script:
    """An I/O process that asks one thing after the other."""

    def __init__(self, *messages: ToEngine) -> None:
        self._waiting = list(messages)
        self.sent: list[FromEngine] = []

    def poll(self) -> list[ToEngine]:
        return [self._waiting.pop(0)] if self._waiting else []

    def wait(self) -> list[ToEngine]:
        return self.poll() or [Shutdown()]

    def send(self, message: FromEngine, fds: object = ()) -> None:
        self.sent.append(message)


def run_loop(engine: GpuEngine, *messages: ToEngine) -> list[FromEngine]:
    link = Script(*messages)
    GpuLoop(engine)(link)
    return link.sent


def test_a_unit_moves_verifies_and_goes_on(
    requests: list[Request], expected: list[list[list[int]]]
) -> None:
    """Prefill's engine, a copy, decode's engine; with one page wrong decode says which."""
    prefill = eager_engine(replace(CONFIG, role="prefill"))
    warm_up(prefill)
    request, pages = requests[2], PAGES[2]
    chunks = run_loop(prefill, request.prefill(1, pages))
    digests: tuple[bytes, ...] = ()
    for chunk in chunks:
        assert isinstance(chunk, ChunkDone)
        digests += chunk.digests
    assert [chunk.rows for chunk in chunks] == [48, 50]  # type: ignore[union-attr]
    assert len(digests) == len(pages)
    last = chunks[-1]
    assert isinstance(last, ChunkDone)
    assert last.first_row is not None
    assert np.frombuffer(last.first_row, "<i4").tolist() == expected[2][0]

    decode = eager_engine(replace(CONFIG, role="decode", recheck_at_end=True))
    assert decode.spec == prefill.spec
    warm_up(decode)
    decode.pool[:] = prefill.pool  # type: ignore[index]
    transfer = TransferId("ab" * 16)
    verify = Verify(1, transfer, tuple(pages), request.rows, digests)
    start = Start(1, tuple(pages), last.first_row, request.rows, 1 + STEPS, request.sampling)
    sent = run_loop(decode, verify, start)
    assert sent[0] == Verified(1, transfer, ok=True, detail="")
    assert sent[-1] == Stopped(1, kv_ok=True)
    rows = [row for m in sent if isinstance(m, StepDone) for row in np.frombuffer(m.rows, "<i4")]
    wanted = [value for row in cut_at_stop(expected[2])[1:] for value in row]
    assert rows == wanted

    moved = replace(verify, seq=2, pages=(8, 3, 0, 7))
    (wrong,) = run_loop(decode, moved)
    assert isinstance(wrong, Verified)
    assert wrong.detail.startswith("page 0 (page 2 of 4 of the prompt): digest ")
    for engine in (prefill, decode):
        engine.close()


def test_a_prefix_that_is_there_is_not_computed(
    requests: list[Request], expected: list[list[list[int]]]
) -> None:
    engine = eager_engine(replace(CONFIG, role="prefill"))
    request, pages = requests[2], PAGES[2]
    run_loop(engine, request.prefill(1, pages))
    (done,) = run_loop(engine, request.prefill(2, pages, start_row=32))
    assert isinstance(done, ChunkDone)
    assert done.first_row is not None
    assert np.frombuffer(done.first_row, "<i4").tolist() == expected[2][0]
    assert len(done.digests) == 2
    engine.close()


def test_an_own_head_and_the_state_before_the_norm(requests: list[Request]) -> None:
    config = replace(CONFIG, model=OTHER.name)
    cpu = Engine(config)
    expected = [run_alone(cpu, requests[1], PAGES[1], STEPS)[1]]
    cpu.close()
    engine = eager_engine(config)
    link = Answering(requests[1:2], PAGES[1:2])
    GpuLoop(engine)(link)
    assert link.rows == [cut_at_stop(rows) for rows in expected]
    engine.close()


def test_timed_steps_write_one_page() -> None:
    engine = eager_engine(replace(CONFIG, role="decode", slots=2))
    with patch.multiple("duplet_engine.step_times", LONG_ROWS=0, TIMED_STEPS=1):
        times = time_steps(engine, 10**15)
    assert [(t.streams, t.pages) for t in times] == [(1, 2), (2, 4)]
    d = engine.pool.description
    pages = engine.pool[d.offset :].reshape(d.pages, d.page_bytes)  # type: ignore[index]
    assert pages.any(axis=1).nonzero()[0].tolist() == [0]
    engine.close()
