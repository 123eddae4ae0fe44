"""The engine against the plain model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from duplet_engine.arithmetic import cpu_arithmetic
from duplet_engine.attention import ChunkAttention
from duplet_engine.kv_store import KvStore
from duplet_engine.model import DualAr
from duplet_engine.sampling import LONGEST_WINDOW, pack_sampling
from duplet_engine.tiny import TINY, tiny_weights
from duplet_engine.weights import fingerprint, tensor_shapes, uniform_tensor
from duplet_memory.layout import describe_pool
from duplet_memory.pool import create_pool
from tests.engine.company import PLAIN, Request, random_prompt, run_alone, run_together
from tests.engine.conftest import MakeEngine
from tests.engine.plain_model import PlainModel

PINNED = [[-1092952658, -1107280136], [-1112723689, 1065196282]]
GREEDY = replace(PLAIN, temperature=0.0)


def test_hidden_states_are_the_plain_models(make_engine: MakeEngine) -> None:
    engine = make_engine()
    rows = torch.from_numpy(random_prompt(np.random.default_rng(5), 160).astype(np.int64))
    attend = ChunkAttention(KvStore(engine.pool), torch.arange(10), 0, 160)
    hidden = engine.model.forward(rows, torch.arange(160), attend)
    plain = PlainModel(TINY, tiny_weights()).stream(rows)
    assert plain.square().mean().sqrt() > 0.5
    torch.testing.assert_close(hidden.double(), plain, rtol=0, atol=2e-4)
    del attend


def test_greedy_rows_are_the_plain_models(make_engine: MakeEngine) -> None:
    """Every part takes its turn: cache, head, codebook passes, embeddings of drawn rows."""
    engine = make_engine(chunk_rows=32)
    plain = PlainModel(TINY, tiny_weights())
    for seed, length in ((1, 40), (2, 61)):
        prompt = random_prompt(np.random.default_rng(seed), length)
        _, rows = run_alone(engine, Request(prompt, GREEDY), range(8), steps=8)
        known = prompt.astype(np.int64)
        for row in rows:
            assert plain.greedy_row(torch.from_numpy(known)) == row
            known = np.concatenate((known, [row]))


def test_rows_keep_the_shape_of_the_spec(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = Request(random_prompt(np.random.default_rng(8), 30), replace(PLAIN, temperature=2.0))
    _, rows = run_alone(engine, request, range(16), steps=120)
    stops = [row for row in rows if row[0] == TINY.stop_id]
    others = np.array([row for row in rows if row[0] != TINY.stop_id])
    assert stops and all(row[1:] == [0] * TINY.codebooks for row in stops)
    assert (others[:, 0] >= TINY.semantic_first).all()
    assert (others[:, 0] <= TINY.semantic_last).all()
    assert (others[:, 1] == others[:, 0] - TINY.semantic_first).all()
    assert (others[:, 2:] < 64).all()
    assert (others[:, 2:].max(axis=0) > 48).all()


def test_one_wrong_page_of_kv_changes_the_rows(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for seed in range(3):
        request = Request(random_prompt(np.random.default_rng(seed), 400), PLAIN)
        _, good = run_alone(engine, request, range(40), steps=20)
        batch = engine.new_batch()
        batch.join(request.decode(0, range(40), torch.tensor(good[0]), 21))
        engine.pool.array[7] = engine.pool.array[8]
        rows = [engine.decode_step(batch)[0][0].tolist() for _ in range(20)]
        assert rows != good[1:]


def test_streams_stop_by_themselves_and_not_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    requests = [
        Request(random_prompt(np.random.default_rng(seed), 50), replace(PLAIN, seed=seed))
        for seed in range(16)
    ]
    pages = [range(16 * seq, 16 * seq + 16) for seq in range(16)]
    streams = run_together(engine, requests, pages, joins=[0] * 16, steps=150)
    lengths = []
    for rows in streams:
        tokens = [row[0] for row in rows] + [TINY.stop_id]
        lengths.append(tokens.index(TINY.stop_id))
    assert sum(length <= 150 for length in lengths) >= 3
    assert sum(length >= 20 for length in lengths) >= 6
    assert len(set(lengths)) >= 4


def test_weights_are_pinned(make_engine: MakeEngine) -> None:
    """Bit patterns of the seed: they must not move with a library's version."""
    assert uniform_tensor(1, "a", (2, 2), 1.0).view(torch.int32).tolist() == PINNED
    engines = [make_engine(), make_engine(arrangement="layer-major")]
    assert engines[0].spec == engines[1].spec
    changed = tiny_weights()
    changed["text_model.model.norm.weight"][0] += 1e-6
    assert fingerprint(tiny_weights(), cpu_arithmetic()) == engines[0].spec.fingerprint
    assert fingerprint(changed, cpu_arithmetic()) != engines[0].spec.fingerprint


def test_a_plain_language_model_draws_ids() -> None:
    """Zero codebooks: one column, any id."""
    config = replace(
        TINY,
        codebook_transformer=None,
        codebooks=0,
        codebook_sizes=(),
        vocab=200,
        semantic_first=0,
        semantic_last=0,
        stop_id=3,
    )
    weights = {n: uniform_tensor(9, n, s, 0.2) for n, s in tensor_shapes(config).items()}
    model = DualAr(config, weights)
    rows = torch.arange(32)[:, None]
    pool = create_pool(
        describe_pool(
            layers=3,
            page_rows=16,
            kv_heads=2,
            head_dim=16,
            dtype="float32",
            pages=2,
            arrangement="page-major",
        )
    )
    store = KvStore(pool)
    attend = ChunkAttention(store, torch.arange(2), 0, 32)
    hidden = model.forward(rows, torch.arange(32), attend)[-8:]
    recent = torch.full((8, LONGEST_WINDOW), -1)
    drawn, _ = model.draw_rows(hidden, pack_sampling([GREEDY] * 8, [32] * 8), recent)
    assert drawn.shape == (8, 1)
    assert [drawn[-1, 0].item()] == PlainModel(config, weights).greedy_row(rows)
    del attend, store
    pool.close()
