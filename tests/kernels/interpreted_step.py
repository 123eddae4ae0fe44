"""Kernels around attention, and whole decode steps of `tiny` in float32 against the CPU engine.
Run by test_kernels_interpreted.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from duplet_core.engine import Start
from duplet_core.errors import InvalidInput
from duplet_core.messages import Sampling
from duplet_engine.checkpoint import load_checkpoint
from duplet_engine.engine import Engine
from duplet_engine.gpu_attend_chunk import ChunkTiles, launch_attend_chunk
from duplet_engine.gpu_draw import launch_draw
from duplet_engine.gpu_heads import Places
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_model import GpuModel
from duplet_engine.gpu_norm import launch_add_norm
from duplet_engine.gpu_state import Drawn, StreamState
from duplet_engine.model_config import ModelConfig
from duplet_engine.sampling import LONGEST_WINDOW, Draws, draw, draw_token
from duplet_engine.sequences import open_prefill
from duplet_engine.shapes import SHAPES, random_weights
from duplet_engine.tiny import TINY, tiny_weights
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import all_noise, make_requests, run_prefill_alone, table

CPU = torch.device("cpu")


@pytest.mark.parametrize(("parts", "width"), [(0, 64), (1, 70), (3, 64)])
def test_add_norm_is_its_formula(parts: int, width: int) -> None:
    chance = torch.Generator().manual_seed(width)
    x = torch.randn((5, width), generator=chance)
    delta = torch.randn((parts, 5, width), generator=chance)
    weight = torch.rand(width, generator=chance)
    total = x.double() + delta.double().sum(0)
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    out = launch_add_norm(x, delta if parts else None, weight, 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(x.double(), total, rtol=0, atol=1e-5)


def make_state(count: int, entries: int) -> StreamState:
    """Streams of every kind of sampling at different positions, with a past that repeats."""
    kinds = [(0.8, 0.8, 30, 10), (1.0, 1.0, 0, 0), (0.0, 1.0, 0, 10), (1.3, 0.95, 3, 128)]
    chance = torch.Generator().manual_seed(entries)
    state = StreamState.empty(count, 4, TINY.columns, CPU)
    for slot in range(count):
        temperature, top_p, top_k, window = kinds[slot % len(kinds)]
        state.temperature[slot], state.top_p[slot] = temperature, top_p
        state.top_k[slot], state.window[slot] = top_k, window
        state.seeds[slot] = int(torch.randint(-(2**62), 2**62, (1,), generator=chance))
        state.positions[slot] = slot * 97
        state.recent[slot] = torch.randint(-1, entries, (LONGEST_WINDOW,), generator=chance)
    return state


def draws_of(state: StreamState, slots: torch.Tensor) -> Draws:
    return Draws(
        seed=state.seeds[slots],
        position=state.positions[slots].long() + 1,
        temperature=state.temperature[slots].double(),
        top_p=state.top_p[slots].double(),
        top_k=state.top_k[slots].long(),
        window=state.window[slots].long(),
    )


def make_drawn(count: int, stop: int, code_entries: int, chance: torch.Generator) -> Drawn:
    return Drawn(
        index=torch.full((count,), -1).int(),
        codes=torch.full((count, TINY.codebooks), -1).int(),
        broken=torch.full((count,), -1).int(),
        stop_index=stop,
        code_entries=code_entries,
        code_embeddings=torch.randn((128, 24), generator=chance).bfloat16(),
    )


@pytest.mark.parametrize("column", [0, 4])
@pytest.mark.parametrize("entries", [24, 100])
def test_draws_are_the_cpus(column: int, entries: int) -> None:
    count, stop = 8, 5
    state = make_state(count, entries)
    chance = torch.Generator().manual_seed(entries + column)
    slots = torch.randperm(count, generator=chance).int()
    logits = torch.randn((count, entries), generator=chance).mul_(2).round(decimals=1)
    halves = torch.stack((logits * 0.25, logits * 0.75))
    drawn = make_drawn(count, stop, 60, chance)
    x = torch.full((2 * count, 24), -1.0)
    launch_draw(halves, entries, state, slots, column, drawn, x[1::2])
    code = drawn.codes[:, max(0, column - 1)].long()
    assert drawn.code_embeddings is not None
    assert torch.equal(x[1::2], drawn.code_embeddings[code].float())
    assert (x[::2] == -1.0).all()

    draws = draws_of(state, slots)
    noise = all_noise(draws.seed, draws.position, torch.tensor([column, 11]), entries)
    if column:
        expected = draw(logits, draws.temperature, draws.top_p, draws.top_k, table(noise[:, 0]))
        assert code.tolist() == expected.tolist()
        assert (drawn.index == -1).all()
        return
    # The CPU keeps the past newest last; the GPU by position.
    age = torch.arange(LONGEST_WINDOW, 0, -1)
    ring = (draws.position[:, None] - age) % LONGEST_WINDOW
    recent = state.recent[slots].gather(1, ring).long()
    first = draw(logits, draws.temperature, draws.top_p, draws.top_k, table(noise[:, 0]))
    expected = draw_token(logits, draws, recent, stop, table(noise[:, 0]), table(noise[:, 1]))
    assert (first != expected).any(), "some draw repeats"
    assert drawn.index.tolist() == expected.tolist()
    assert code.tolist() == expected.clamp_max(59).tolist()
    assert not drawn.broken.any()


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_a_logit_that_is_no_number_marks_its_row() -> None:
    state = make_state(3, 64)
    logits = torch.zeros(3, 64)
    logits[1, 63] = float("nan")
    logits[2] = float("nan")
    drawn = make_drawn(3, 63, 64, torch.Generator())
    launch_draw(logits[None], 64, state, torch.arange(3).int(), 0, drawn, None)
    assert drawn.broken.tolist() == [0, 1, 1]
    assert ((drawn.index >= 0) & (drawn.index < 64)).all()


def test_steps_are_the_cpu_engines() -> None:
    """Streams of every kind of sampling, padded, in shuffled slots: the CPU engine's rows."""
    steps, slots = 2, 6
    engine = Engine(
        EngineConfig("monolith", model="tiny", pool_pages=64, arrangement="layer-major")
    )
    requests = make_requests(np.random.default_rng(3), [20, 33, 47])
    pages = [list(range(8 * i, 8 * i + 4)) for i in range(len(requests))]
    firsts = [run_prefill_alone(engine, r, p) for r, p in zip(requests, pages, strict=True)]
    memory = torch.from_numpy(engine.pool.memory.copy())
    kv = PagedKv.of_pool(memory, engine.pool.description)
    untouched = kv.items.clone()

    batch = engine.new_batch()
    model = GpuModel(TINY, tiny_weights(), slots + 2)
    state = StreamState.empty(slots, 5, TINY.columns, CPU)
    order = [4, 1, 5]
    for seq, request in enumerate(requests):
        batch.join(request.decode(seq, pages[seq], firsts[seq], steps + 1))
        slot, sampling = order[seq], request.sampling
        state.tables[slot, :4] = torch.tensor(pages[seq])
        state.rows[slot] = firsts[seq]
        state.positions[slot] = request.rows
        state.seeds[slot], state.top_p[slot] = sampling.seed, sampling.top_p
        state.temperature[slot], state.top_k[slot] = sampling.temperature, sampling.top_k
        state.window[slot] = sampling.repetition_window
        index = TINY.drawable_index(int(firsts[seq][0]))
        state.recent[slot, request.rows % LONGEST_WINDOW] = -1 if index is None else index
    padded = torch.tensor([*order, slots], dtype=torch.int32)
    for _ in range(steps):
        expected, broken = engine.decode_step(batch)
        assert not broken.any()
        out = model.step(state, padded, kv, splits=2)
        assert out[:3, :-1].tolist() == expected.tolist()
        assert not out[:3, -1].any()
    assert int(state.positions[slots]) == -1, "the spare stands still"
    there = torch.from_numpy(engine.pool.array.copy()).view(-1)
    torch.testing.assert_close(kv.items, there, rtol=0, atol=1e-4)
    assert not torch.equal(kv.items, untouched)
    engine.close()


def test_a_projected_hidden_states_rows_are_the_cpu_engines() -> None:
    """A codebook transformer of another width than the backbone, three query heads a key head."""
    config = SHAPES["small-dual-ar"]
    sampling = Sampling(5, 0.8, 0.8, 30, 10)
    chance = np.random.default_rng(6)
    prompt = np.zeros((20, config.columns), "<i4")
    prompt[:, 1:] = chance.integers(0, config.codebook_sizes, (20, config.codebooks))
    prompt[:, 0] = config.semantic_first + prompt[:, 1]
    engine = Engine(EngineConfig("monolith", model=config.name, pool_pages=4))
    start = Start(0, (2, 1), prompt.tobytes(), 0, 0, sampling)
    first = engine.prefill_chunk(open_prefill(config, start, 16, 4))
    assert first is not None
    kv = PagedKv.of_pool(torch.from_numpy(engine.pool.memory.copy()), engine.pool.description)
    batch = engine.new_batch()
    batch.join(Start(0, (2, 1), first.numpy().astype("<i4").tobytes(), 20, 4, sampling))
    expected = [engine.decode_step(batch)[0][0].tolist() for _ in range(3)]
    engine.close()

    model = GpuModel(config, random_weights(config, CPU, torch.float32), 1)
    state = StreamState.empty(1, 2, config.columns, CPU)
    state.tables[0] = torch.tensor([2, 1])
    state.rows[0], state.positions[0], state.seeds[0] = first, 20, sampling.seed
    state.temperature[0], state.top_p[0] = sampling.temperature, sampling.top_p
    state.top_k[0], state.window[0] = sampling.top_k, sampling.repetition_window
    slots = torch.zeros(1, dtype=torch.int32)
    rows = [model.step(state, slots, kv, splits=2)[0].tolist() for _ in range(3)]
    assert rows == [[*row, 0] for row in expected]


def test_chunks_leave_the_cpu_engines_kv() -> None:
    """A prompt in two chunks, the second behind a cached prefix: keys, values and rows."""
    engine = Engine(EngineConfig("monolith", model="tiny", pool_pages=8))
    request = make_requests(np.random.default_rng(4), [41])[0]
    pages = [5, 2, 7]
    first_row = run_prefill_alone(engine, request, pages)
    pool = engine.pool.description
    kv = PagedKv.of_pool(torch.zeros(pool.total_bytes, dtype=torch.uint8), pool)
    model = GpuModel(TINY, tiny_weights(), 1)
    rows = torch.from_numpy(request.prompt)
    tables = torch.tensor([pages], dtype=torch.int32)
    for first, count in ((0, 29), (29, 12)):
        positions = torch.arange(first, first + count, dtype=torch.int32)
        places = Places(tables, torch.zeros(count, dtype=torch.int32), positions)
        tiles = ChunkTiles.of([(0, first, count)], 4, 2, CPU)

        def attend(layer: int, query: torch.Tensor, tiles: ChunkTiles = tiles) -> torch.Tensor:
            return launch_attend_chunk(query, kv, layer, tables, tiles, 4)

        hidden = model.forward(rows[first : first + count], kv, places, attend)
    there = torch.from_numpy(engine.pool.array.copy()).view(-1)
    torch.testing.assert_close(kv.items, there, rtol=0, atol=1e-4)
    assert there.any()
    engine.close()

    state = StreamState.empty(1, 3, TINY.columns, CPU)
    sampling = request.sampling
    state.positions[0], state.seeds[0] = request.rows - 1, sampling.seed
    state.temperature[0], state.top_p[0] = sampling.temperature, sampling.top_p
    state.top_k[0], state.window[0] = sampling.top_k, sampling.repetition_window
    drawn = model.draw_rows(hidden[-1:], state, torch.zeros(1, dtype=torch.int32))
    assert drawn[0].tolist() == [*first_row.tolist(), 0]


@pytest.mark.parametrize("name", ["wren", "tiny"])
def test_the_built_in_models_are_covered(name: str) -> None:
    config, weights = load_checkpoint(name, "cpu", torch.float32, lambda *_: None)
    weights = dict(weights)
    GpuModel(config, weights, 1)
    assert not weights, "all of them are taken"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (replace(TINY, backbone=replace(TINY.backbone, out_bias=True)), "out_bias is true"),
        (
            replace(TINY, backbone=replace(TINY.backbone, head_dim=24)),
            "head_dim is 24, no power of two",
        ),
        (replace(TINY, codebooks=17), "codebooks is 17, at most 16 can be"),
    ],
)
def test_a_model_that_is_not_covered_is_refused_by_its_field(config: ModelConfig, why: str) -> None:
    with pytest.raises(InvalidInput, match=f"model 'tiny' on a GPU: {why}$"):
        GpuModel(config, tiny_weights(), 1)
