from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from duplet_core.engine import ChunkDone, SeqFailed, Shutdown, Start, Stop, Stopped, Verify
from duplet_core.errors import InvariantError
from duplet_core.ids import TransferId
from duplet_engine.prefill_loop import run_prefill
from duplet_engine.sequences import PrefillSequence
from duplet_engine.tiny import TINY
from duplet_memory.digest import page_digests
from tests.engine.company import PLAIN, FakeLink, Request, pack, random_prompt, run_prefill_alone
from tests.engine.conftest import MakeEngine


def request_of(rows: int, seed: int = 0) -> Request:
    return Request(random_prompt(np.random.default_rng(seed), rows), PLAIN)


def test_a_prompt_comes_back_chunk_by_chunk(make_engine: MakeEngine) -> None:
    engine, link = make_engine(chunk_rows=40), FakeLink()
    request, pages = request_of(100), range(30, 37)
    link.inbox = [[request.prefill(7, pages)]]
    run_prefill(engine, link)
    chunks = [m for m in link.sent if isinstance(m, ChunkDone)]
    assert chunks == link.sent
    assert [chunk.rows for chunk in chunks] == [40, 80, 100]
    assert [len(chunk.digests) for chunk in chunks] == [2, 3, 2]
    digests = tuple(d for chunk in chunks for d in chunk.digests)
    assert digests == page_digests(engine.pool, pages, 100)
    assert [chunk.first_row is None for chunk in chunks] == [True, True, False]
    assert chunks[-1].first_row == pack(run_prefill_alone(engine, request, range(10)))
    assert not any(chunk.stopped for chunk in chunks)
    assert {chunk.started_ns for chunk in chunks} == {chunks[0].started_ns}
    times = [chunks[0].started_ns, *(chunk.done_ns for chunk in chunks)]
    assert times == sorted(times)


@pytest.mark.parametrize(("rows", "expected"), [(16, [1]), (32, [2]), (33, [2, 1]), (1, [1])])
def test_digests_cover_each_page_once(
    make_engine: MakeEngine, rows: int, expected: list[int]
) -> None:
    engine, link = make_engine(chunk_rows=32), FakeLink()
    link.inbox = [[request_of(rows).prefill(1, range(4))]]
    run_prefill(engine, link)
    assert [len(m.digests) for m in link.sent if isinstance(m, ChunkDone)] == expected


def test_a_chunk_that_completes_no_page_has_no_digest(make_engine: MakeEngine) -> None:
    engine, link = make_engine(chunk_rows=6), FakeLink()
    link.inbox = [[request_of(20).prefill(1, range(4))]]
    run_prefill(engine, link)
    counts = [(m.rows, len(m.digests)) for m in link.sent if isinstance(m, ChunkDone)]
    assert counts == [(6, 0), (12, 0), (18, 1), (20, 1)]


def test_cached_rows_are_neither_computed_nor_digested(make_engine: MakeEngine) -> None:
    engine, link = make_engine(chunk_rows=40), FakeLink()
    request = request_of(100)
    first = run_prefill_alone(engine, request, range(7))
    pages = (0, 1, 2, 13, 14, 15, 16)
    link.inbox = [[request.prefill(7, pages, start_row=48)]]
    run_prefill(engine, link)
    chunks = [m for m in link.sent if isinstance(m, ChunkDone)]
    assert [chunk.rows for chunk in chunks] == [88, 100]
    assert [len(chunk.digests) for chunk in chunks] == [2, 2]
    assert chunks[-1].first_row == pack(first)


def test_prompts_take_turns(make_engine: MakeEngine) -> None:
    engine, link = make_engine(chunk_rows=16), FakeLink()
    long, short = request_of(64), request_of(16)
    link.inbox = [[long.prefill(1, range(4))], [], [short.prefill(2, range(10, 11))]]
    run_prefill(engine, link)
    order = [(m.seq, m.rows) for m in link.sent if isinstance(m, ChunkDone)]
    assert order == [(1, 16), (1, 32), (1, 48), (2, 16), (1, 64)]


def test_a_stopped_prompt_ends_between_chunks(make_engine: MakeEngine) -> None:
    engine, link = make_engine(chunk_rows=16), FakeLink()
    request = request_of(64)
    link.inbox = [[request.prefill(1, range(4))], [Stop(1)], [Stop(1), Stop(99)]]
    run_prefill(engine, link)
    assert [type(m) for m in link.sent] == [ChunkDone, Stopped]
    assert link.sent[-1] == Stopped(1, kv_ok=None)


def test_stop_after_the_last_chunk_is_not_answered(make_engine: MakeEngine) -> None:
    engine, link = make_engine(), FakeLink()
    link.inbox = [[request_of(20).prefill(1, range(4))], [Stop(1)]]
    run_prefill(engine, link)
    assert [type(m) for m in link.sent] == [ChunkDone]


def test_a_drawn_stop_row_is_said(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, link = make_engine(), FakeLink()
    row = torch.tensor([TINY.stop_id] + [0] * TINY.codebooks)

    def draw_stop(sequence: PrefillSequence) -> torch.Tensor:
        sequence.done_rows = sequence.prompt_rows
        return row

    monkeypatch.setattr(engine, "prefill_chunk", draw_stop)
    link.inbox = [[request_of(20).prefill(1, range(2))]]
    run_prefill(engine, link)
    (chunk,) = link.sent
    assert isinstance(chunk, ChunkDone)
    assert chunk.stopped
    assert chunk.first_row == pack(row)


BAD_STARTS = [
    ({"rows": b""}, "0 bytes are not rows of 11 int32"),
    ({"rows": b"\0" * 45}, "45 bytes"),
    ({"rows": b"\xff" * 44}, "row 0, column 0 is -1"),
    ({"rows": np.array([[0] * 10 + [64]], "<i4").tobytes()}, r"column 10 is 64, not in \[0, 64\)"),
    ({"pages": ()}, "0 pages of 16 rows for 20 rows"),
    ({"pages": (0, 256)}, "page 256 is not in a pool of 256"),
    ({"pages": (1, 1)}, "a page stands twice"),
    ({"start_row": 20}, "20 of 20 rows"),
    ({"start_row": 5}, "not at a page's start"),
    ({"sampling": replace(PLAIN, top_p=2.0)}, r"sampling.top_p is 2.0"),
]


@pytest.mark.parametrize(("change", "message"), BAD_STARTS)
def test_a_bad_start_ends_its_own_sequence_only(
    make_engine: MakeEngine, change: dict[str, object], message: str
) -> None:
    engine, link = make_engine(), FakeLink()
    good = request_of(20).prefill(1, range(2))
    bad: Start = replace(good, seq=2, **change)  # type: ignore[arg-type]
    link.inbox = [[good, bad]]
    run_prefill(engine, link)
    failed, stopped, done = link.sent
    assert isinstance(failed, SeqFailed) and failed.seq == 2
    assert re.search(message, failed.detail)
    assert stopped == Stopped(2, kv_ok=None)
    assert isinstance(done, ChunkDone) and done.seq == 1 and done.first_row


def test_kv_without_numbers_ends_its_own_sequence_only(make_engine: MakeEngine) -> None:
    engine, link = make_engine(chunk_rows=32), FakeLink()
    engine.pool.array[5] = np.nan
    bad = replace(request_of(40), sampling=PLAIN).prefill(1, (5, 6, 7), start_row=16)
    good = request_of(40, seed=3).prefill(2, (8, 9, 10))
    link.inbox = [[bad, good]]
    run_prefill(engine, link)
    failed = [m for m in link.sent if isinstance(m, SeqFailed)]
    assert [m.seq for m in failed] == [1]
    assert "no finite numbers in rows 16 to 40" in failed[0].detail
    assert [m.seq for m in link.sent if isinstance(m, Stopped)] == [1]
    assert [m.rows for m in link.sent if isinstance(m, ChunkDone)] == [32, 40]


def test_shutdown_leaves_at_once(make_engine: MakeEngine) -> None:
    engine, link = make_engine(chunk_rows=16), FakeLink()
    link.inbox = [[request_of(64).prefill(1, range(4))], [Shutdown()]]
    run_prefill(engine, link)
    assert [type(m) for m in link.sent] == [ChunkDone]


def test_misuse_is_our_fault(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_rows=16)
    start = request_of(64).prefill(1, range(4))
    for messages in ([start, start], [Verify(1, TransferId("0" * 32), (0,), 1, (bytes(16),))]):
        link = FakeLink()
        link.inbox = [list(messages)]
        with pytest.raises(InvariantError):
            run_prefill(engine, link)
