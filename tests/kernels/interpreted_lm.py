"""Plain language models on a GPU: draws among many entries, and whole steps against the CPU engine.
Run by test_kernels_interpreted.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from duplet_core.engine import Start
from duplet_core.messages import Sampling
from duplet_engine.engine import Engine
from duplet_engine.gpu_attend_chunk import ChunkTiles, launch_attend_chunk
from duplet_engine.gpu_draw_wide import launch_draw_wide
from duplet_engine.gpu_heads import Places
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_model import GpuModel
from duplet_engine.gpu_state import Drawn, StreamState
from duplet_engine.sampling import LONGEST_WINDOW, as_int64, draw, draw_token
from duplet_engine.sequences import open_prefill
from duplet_engine.shapes import SHAPES, random_weights
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import all_noise, table
from tests.kernels.interpreted_step import draws_of, make_state

CPU = torch.device("cpu")
LM = SHAPES["small-lm"]
PAGES = (5, 2, 7)
PROMPT_ROWS = 37
SAMPLINGS = (Sampling(77, 0.9, 0.9, 40, 10), Sampling(78, 0.0, 1.0, 0, 0))


def empty_drawn(count: int, stop: int) -> Drawn:
    index, broken = torch.full((count,), -1).int(), torch.full((count,), -1).int()
    return Drawn(index, torch.empty((count, 0)).int(), broken, stop, 0, None)


@pytest.mark.parametrize(("entries", "decimals"), [(300, 1), (1030, 0), (256, 3)])
def test_wide_draws_are_the_cpus(entries: int, decimals: int) -> None:
    """With many equal logits and with few."""
    count, stop = 8, 5
    state = make_state(count, entries)
    chance = torch.Generator().manual_seed(entries)
    slots = torch.randperm(count, generator=chance).int()
    logits = torch.randn((count, entries), generator=chance).mul_(2).round(decimals=decimals)
    draws = draws_of(state, slots)
    noise = all_noise(draws.seed, draws.position, torch.tensor([0, 1]), entries)
    first = draw(logits, draws.temperature, draws.top_p, draws.top_k, table(noise[:, 0]))
    # Each stream has just drawn what it would draw now.
    newest = (draws.position - 1) % LONGEST_WINDOW
    for row in range(count):
        state.recent[int(slots[row]), int(newest[row])] = int(first[row])
    age = torch.arange(LONGEST_WINDOW, 0, -1)
    ring = (draws.position[:, None] - age) % LONGEST_WINDOW
    recent = state.recent[slots].gather(1, ring).long()
    expected = draw_token(logits, draws, recent, stop, table(noise[:, 0]), table(noise[:, 1]))
    assert (first != expected).any(), "some draw repeats"
    drawn = empty_drawn(count, stop)
    launch_draw_wide(logits[None], entries, state, slots, drawn)
    assert drawn.index.tolist() == expected.tolist()
    assert not drawn.broken.any()


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_a_wide_logit_that_is_no_number_marks_its_row() -> None:
    logits = torch.zeros(3, 300)
    logits[1, 299] = float("nan")
    logits[2] = float("nan")
    drawn = empty_drawn(3, 299)
    launch_draw_wide(logits[None], 300, make_state(3, 300), torch.arange(3).int(), drawn)
    assert drawn.broken.tolist() == [0, 1, 1]
    assert ((drawn.index >= 0) & (drawn.index < 300)).all()


def join(state: StreamState, slot: int, sampling: Sampling, row: Tensor, position: int) -> None:
    state.tables[slot, : len(PAGES)] = torch.tensor(PAGES)
    state.rows[slot], state.positions[slot] = row, position
    state.seeds[slot], state.top_p[slot] = as_int64(sampling.seed), sampling.top_p
    state.temperature[slot], state.top_k[slot] = sampling.temperature, sampling.top_k
    state.window[slot] = sampling.repetition_window
    state.recent[slot, position % LONGEST_WINDOW] = int(row[0])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_plain_language_models_rows_are_the_cpu_engines(sampling: Sampling) -> None:
    """A prompt and three steps of a model with biases, three query heads a key head, and a head
    that is its embedding table."""
    engine = Engine(EngineConfig("monolith", model=LM.name, pool_pages=8))
    tokens = np.random.default_rng(5).integers(0, LM.vocab, (PROMPT_ROWS, 1)).astype("<i4")
    start = Start(0, PAGES, tokens.tobytes(), 0, 0, sampling)
    first = engine.prefill_chunk(open_prefill(LM, start, 16, 8))
    assert first is not None
    batch = engine.new_batch()
    batch.join(Start(0, PAGES, first.numpy().astype("<i4").tobytes(), PROMPT_ROWS, 4, sampling))
    expected = [first.tolist(), *(engine.decode_step(batch)[0][0].tolist() for _ in range(3))]

    pool = engine.pool.description
    kv = PagedKv.of_pool(torch.zeros(pool.total_bytes, dtype=torch.uint8), pool)
    model = GpuModel(LM, random_weights(LM, CPU, torch.float32), 2)
    tables = torch.tensor([PAGES], dtype=torch.int32)
    places = Places(tables, torch.zeros(PROMPT_ROWS).int(), torch.arange(PROMPT_ROWS).int())
    heads = LM.backbone.heads, LM.backbone.kv_heads
    tiles = ChunkTiles.of([(0, 0, PROMPT_ROWS)], *heads, CPU)

    def attend(layer: int, query: Tensor) -> Tensor:
        return launch_attend_chunk(query, kv, layer, tables, tiles, heads[0])

    hidden = model.forward(torch.from_numpy(tokens), kv, places, attend)
    there = torch.from_numpy(engine.pool.array.copy()).view(-1)
    engine.close()
    state = StreamState.empty(1, 3, 1, CPU)
    join(state, 0, sampling, torch.from_numpy(tokens[-1]), PROMPT_ROWS - 1)
    state.recent.fill_(-1)
    slots = torch.zeros(1, dtype=torch.int32)
    rows = [model.draw_rows(hidden[-1:], state, slots)[0].tolist()]
    join(state, 0, sampling, first, PROMPT_ROWS)
    rows += [model.step(state, slots, kv, splits=2)[0].tolist() for _ in range(3)]
    assert rows == [[*row, 0] for row in expected]
    torch.testing.assert_close(kv.items, there, rtol=0, atol=1e-4)


def test_every_stop_id_is_told_as_the_stop_id() -> None:
    model = GpuModel(
        replace(LM, stop_id=2, other_stop_ids=(7, 9)), random_weights(LM, CPU, torch.float32), 1
    )
    state = StreamState.empty(1, 3, 1, CPU)
    state.temperature.fill_(0.0)
    state.positions.fill_(0)
    hidden = torch.zeros(1, LM.backbone.width)
    hidden[0] = model._head[9] * 100
    drawn = model.draw_rows(hidden, state, torch.zeros(1, dtype=torch.int32))
    assert drawn.tolist() == [[2, 0]]
    assert state.recent[0].max() == 9
