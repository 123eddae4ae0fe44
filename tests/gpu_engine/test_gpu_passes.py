"""A pass over prompts' rows is the same whether a graph replays it or its kernels are queued."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.gpu_pass_graphs import MOST_ROWS, Span
from duplet_engine.model_config import ModelConfig
from duplet_engine.shapes import SHAPES, random_weights
from duplet_pages.engine_config import EngineConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(120),
]

CACHED = 300
PASSES: dict[str, list[Span]] = {
    "one row": [(0, CACHED, 1)],
    "a full graph": [(0, CACHED, 64)],
    "padding of 63": [(0, CACHED, 65)],
    "cold": [(0, 0, 129)],
    "behind a prefix": [(0, CACHED, 204)],
    "the largest": [(0, CACHED, MOST_ROWS)],
    "many prompts": [(table, CACHED * (table % 2), 7 + table) for table in range(8)],
}
NEAR = 0.01
"""Of bfloat16 states, whose products may be summed in another order."""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def few_layers() -> ModelConfig:
    """S2-Pro's widths."""
    shape = SHAPES["s2-pro"]
    small = shape.codebook_transformer
    assert small is not None
    return replace(
        shape,
        backbone=replace(shape.backbone, layers=2),
        codebook_transformer=replace(small, layers=1),
        longest_sequence=640,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[GpuEngine]:
    with torch.inference_mode():
        config = few_layers()
        weights = random_weights(config, torch.device("cuda", 0), torch.bfloat16)
        settings = EngineConfig(
            "prefill", model="tiny", dtype="bfloat16", pool_pages=320, slots=8, chunk_rows=512
        )
        engine = GpuEngine(settings, config, weights)
        yield engine
        engine.close()


def run_pass(engine: GpuEngine, spans: list[Span], graphs: bool) -> Tensor:
    """Hidden states, on the host. Tables of all prompts lie in pages of their own."""
    passes = engine._passes
    assert passes is not None
    chance = torch.Generator().manual_seed(5)
    config = engine.model_config
    count = sum(rows for _, _, rows in spans)
    rows = torch.randint(0, 1024, (count, config.columns), generator=chance, dtype=torch.int32)
    rows[:, 0] += config.semantic_first
    tables = torch.arange(8 * 40, dtype=torch.int32).view(8, 40)
    kept = passes._graphs
    assert kept is not None and kept.holds(count)
    try:
        if not graphs:
            passes._graphs = None
        return passes._forward(rows, tables, spans, engine._kv).float().cpu()
    finally:
        passes._graphs = kept


@pytest.mark.parametrize("name", PASSES)
def test_a_graph_gives_what_its_kernels_give(engine: GpuEngine, name: str) -> None:
    """Behind KV that is whatever the earlier passes left there, the same for both."""
    spans = PASSES[name]
    plain = run_pass(engine, spans, graphs=False)
    found = [run_pass(engine, spans, graphs=True) for _ in range(3)]
    assert torch.isfinite(plain).all()
    assert float(plain.norm()) > 0
    assert float((found[0] - plain).norm() / plain.norm()) < NEAR
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
