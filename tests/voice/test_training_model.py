"""What is trained is what is served: training's model and the engine's compute the same."""

from __future__ import annotations

import torch

import duplet_models
from duplet_core.messages import Sampling
from duplet_engine.attention import ChunkAttention
from duplet_engine.kv_store import KvStore
from duplet_engine.model import DualAr as EngineModel
from duplet_engine.published_configs import read_model_config
from duplet_engine.sampling import LONGEST_WINDOW, pack_sampling
from duplet_engine.weights import tensor_shapes
from duplet_memory.layout import describe_pool
from duplet_memory.pool import create_pool
from training.dual_ar import DualAr, read_config

ROWS = 64
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, repetition_window=0)


def prompt() -> torch.Tensor:
    """Plain ids and semantic rows, int64 [ROWS, 11]."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 1024, (ROWS, 11), generator=generator)
    rows[:, 0] = rows[:, 1] + 256
    rows[20:30, 0] = torch.arange(16, 26)
    rows[20:30, 1:] = 0
    return rows


def test_the_engine_computes_what_was_trained() -> None:
    directory = duplet_models.directory("wren")
    config = read_model_config(directory)
    torch.manual_seed(1)
    trained = DualAr(read_config(directory / "config.json")).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.normal_(0.0, 0.08).add_(float(parameter.dim() == 1))
    weights = trained.state_dict()
    assert {n: tuple(t.shape) for n, t in weights.items()} == tensor_shapes(config)
    rows = prompt()
    with torch.no_grad():
        hidden = trained.hidden(rows[None])[0]
        logits = trained.token_logits(hidden)
    pool = create_pool(
        describe_pool(
            layers=config.backbone.layers,
            page_rows=16,
            kv_heads=config.backbone.kv_heads,
            head_dim=config.backbone.head_dim,
            dtype="float32",
            pages=4,
            arrangement="page-major",
        )
    )
    store = KvStore(pool)
    engine = EngineModel(config, weights)
    attend = ChunkAttention(store, torch.arange(4), 0, ROWS)
    states = engine.forward(rows, torch.arange(ROWS), attend)
    served = engine.token_logits(states)[:, : config.codebook_entries + 1]
    torch.testing.assert_close(served, logits, rtol=1e-3, atol=1e-3)
    recent = torch.full((8, LONGEST_WINDOW), -1)
    drawn, _ = engine.draw_rows(states[-8:], pack_sampling([GREEDY] * 8, [ROWS] * 8), recent)
    codes = drawn[:, 1:]
    with torch.no_grad():
        wanted = trained.code_logits(hidden[-8:], codes).argmax(dim=-1)
    assert torch.equal(codes[:, 1:], wanted)
    del attend, store
    pool.close()
