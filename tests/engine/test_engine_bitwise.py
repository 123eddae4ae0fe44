"""The same request gives the same bits: KV and rows, in any company, cut and place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from duplet_engine.engine import Engine
from duplet_memory.plan import execute, plan_copy
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import (
    Request,
    make_requests,
    run_alone,
    run_prefill_alone,
    run_together,
)
from tests.engine.conftest import MakeEngine

LENGTHS = (1, 2, 15, 16, 17, 100, 127, 128, 129, 250, 33, 64)
STEPS = 10
POOL_PAGES = 512


def scattered_pages(rng: np.random.Generator, lengths: Sequence[int]) -> list[list[int]]:
    """Pages for each length and its steps, in no order, none shared."""
    free = rng.permutation(POOL_PAGES).tolist()
    return [[free.pop() for _ in range(-(-(n + STEPS) // 16))] for n in lengths]


def poison(engine: Engine) -> None:
    """Fill the pool with what no sequence may ever read."""
    engine.pool.array[:] = np.nan


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(np.random.default_rng(42), LENGTHS)


Truth = list[tuple[tuple[bytes, ...], list[list[int]]]]


@pytest.fixture(scope="module")
def alone(requests: list[Request]) -> Truth:
    """KV digests and rows of each request: alone, prompt in one piece, page-major."""
    torch.set_num_threads(1)
    engine = Engine(
        EngineConfig(role="monolith", model="tiny", chunk_rows=4096, pool_pages=POOL_PAGES)
    )
    with torch.inference_mode():
        truth = [run_alone(engine, request, range(32), STEPS) for request in requests]
    engine.close()
    return truth


def test_cutting_the_prompt_moves_no_bit(
    make_engine: MakeEngine, requests: list[Request], alone: Truth
) -> None:
    rng = np.random.default_rng(1)
    for chunk_rows in (1, 7, 16, 100, 256):
        engine = make_engine(chunk_rows=chunk_rows, pool_pages=POOL_PAGES)
        poison(engine)
        pages = scattered_pages(rng, LENGTHS)
        for index, request in enumerate(requests):
            if chunk_rows > 1 or request.rows in (1, 17, 129):
                assert run_alone(engine, request, pages[index], STEPS) == alone[index]


def test_arrangement_and_page_size_move_no_bit(
    make_engine: MakeEngine, requests: list[Request], alone: Truth
) -> None:
    for page_rows, arrangement in ((16, "layer-major"), (8, "layer-major"), (64, "page-major")):
        engine = make_engine(
            chunk_rows=100, pool_pages=POOL_PAGES, page_rows=page_rows, arrangement=arrangement
        )
        poison(engine)
        for index, request in enumerate(requests):
            digests, rows = run_alone(engine, request, range(300, 340), STEPS)
            assert rows == alone[index][1]
            if page_rows == 16:
                assert digests == alone[index][0]


@pytest.mark.parametrize(
    ("arrangement", "threads", "rounds", "most"),
    [("page-major", 1, 3, 12), ("layer-major", 1, 2, 12), ("page-major", 2, 1, 5)],
)
def test_company_moves_no_bit(
    make_engine: MakeEngine,
    requests: list[Request],
    alone: Truth,
    arrangement: str,
    threads: int,
    rounds: int,
    most: int,
) -> None:
    torch.set_num_threads(threads)
    rng = np.random.default_rng(threads)
    engine = make_engine(pool_pages=POOL_PAGES, arrangement=arrangement)
    for _ in range(rounds):
        poison(engine)
        order = rng.permutation(len(requests))[: int(rng.integers(most // 2, most + 1))]
        some = [requests[i] for i in order]
        pages = scattered_pages(rng, [r.rows for r in some])
        joins = rng.integers(0, STEPS, len(some)).tolist()
        rows = run_together(engine, some, pages, [j - min(joins) for j in joins], STEPS)
        assert rows == [alone[i][1] for i in order]


def test_a_cached_prefix_moves_no_bit(
    make_engine: MakeEngine, requests: list[Request], alone: Truth
) -> None:
    engine = make_engine(chunk_rows=100, pool_pages=POOL_PAGES)
    for index, request in enumerate(requests):
        for cached_rows in {16, 64, (request.rows - 1) // 16 * 16}:
            if not 0 < cached_rows < request.rows:
                continue
            poison(engine)
            run_prefill_alone(engine, request, range(32))
            # The prefix stays where it was computed, the rest gets other pages.
            pages = [*range(cached_rows // 16), *range(40, 72)]
            assert run_alone(engine, request, pages, STEPS, cached_rows) == alone[index]


@pytest.mark.parametrize("source_order", ["page-major", "layer-major"])
@pytest.mark.parametrize("dest_order", ["page-major", "layer-major"])
def test_moving_the_kv_moves_no_bit(
    make_engine: MakeEngine,
    requests: list[Request],
    alone: Truth,
    source_order: str,
    dest_order: str,
) -> None:
    """Two engines, a copy between: what the unit does."""
    source = make_engine(pool_pages=64, arrangement=source_order)
    dest = make_engine(pool_pages=POOL_PAGES, arrangement=dest_order)
    poison(dest)
    pages = scattered_pages(np.random.default_rng(9), LENGTHS)
    batch = dest.new_batch()
    rows: list[list[list[int]]] = []
    for seq, request in enumerate(requests):
        first = run_prefill_alone(source, request, range(20, 52))
        used = -(-request.rows // 16)
        plan = plan_copy(
            source.pool.description,
            range(20, 20 + used),
            dest.pool.description,
            pages[seq][:used],
            0,
            request.rows,
        )
        execute(plan, source.pool.memory, dest.pool.memory)
        batch.join(request.decode(seq, pages[seq], first, STEPS + 1))
        rows.append([first.tolist()])
    for _ in range(STEPS):
        for stream, row in zip(rows, dest.decode_step(batch)[0].tolist(), strict=True):
            stream.append(row)
    assert rows == [truth[1] for truth in alone]


def test_a_broken_neighbour_moves_no_bit(
    make_engine: MakeEngine, requests: list[Request], alone: Truth
) -> None:
    """NaN in one stream's KV ends that stream and nothing else."""
    engine = make_engine(pool_pages=POOL_PAGES)
    pages = scattered_pages(np.random.default_rng(3), LENGTHS)
    batch = engine.new_batch()
    for seq, request in enumerate(requests):
        first = run_prefill_alone(engine, request, pages[seq])
        batch.join(request.decode(seq, pages[seq], first, STEPS + 1))
    engine.pool.array[pages[5][0], 1, 1, 0] = np.nan
    for step in range(STEPS):
        drawn, broken = engine.decode_step(batch)
        assert broken.nonzero()[:, 0].tolist() == [5]
        for seq, row in enumerate(drawn.tolist()):
            assert seq == 5 or row == alone[seq][1][1 + step]


def test_decode_computes_the_bits_that_prefill_would(
    make_engine: MakeEngine, requests: list[Request], alone: Truth
) -> None:
    """A stream whose KV is lost can be rebuilt from its rows."""
    engine = make_engine(pool_pages=POOL_PAGES)
    for index in (4, 9):
        request, rows = requests[index], alone[index][1]
        longer = np.concatenate((request.prompt, np.array(rows[:6], dtype="<i4")))
        rebuilt = Request(longer, request.sampling)
        first = run_prefill_alone(engine, rebuilt, range(32))
        if request.sampling.repetition_window == 0:
            assert first.tolist() == rows[6]
        digests, _ = run_alone(engine, rebuilt, range(32), 0)
        run_alone(engine, request, range(100, 132), STEPS)
        used = -(-len(longer) // 16)
        decoded = engine.pool.array[100 : 100 + used]
        again = engine.pool.array[:used]
        valid = len(longer) - (used - 1) * 16
        assert (decoded[: used - 1] == again[: used - 1]).all()
        assert (decoded[-1][:, :, :valid] == again[-1][:, :, :valid]).all()
        assert len(digests) == used
