"""A pass over prompts' rows is the same whether a graph replays it or its kernels are queued."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from duplet_engine.gpu_attend_chunk import (
    ChunkTiles,
    launch_attend_chunk,
)
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.gpu_pass_graphs import MOST_ROWS, Span
from duplet_engine.model_config import ModelConfig
from duplet_engine.shapes import SHAPES, random_weights
from duplet_pages.engine_config import EngineConfig
from tests.kernels.paged_rows import make_sequences, plain_attention

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(120),
]

DEVICE = "cuda"
CACHED = 300
PAGE_ROWS = 16
TABLE_PAGES = -(-(CACHED + MOST_ROWS) // PAGE_ROWS)
"""Of a prompt, so that the largest pass ends within it."""
PROMPTS = 8
PASSES: dict[str, list[Span]] = {
    "one row": [(0, CACHED, 1)],
    "a full graph": [(0, CACHED, 64)],
    "padding of 63": [(0, CACHED, 65)],
    "cold": [(0, 0, 129)],
    "behind a prefix": [(0, CACHED, 204)],
    "the largest": [(0, CACHED, MOST_ROWS)],
    "many prompts": [(table, CACHED * (table % 2), 7 + table) for table in range(PROMPTS)],
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
        longest_sequence=TABLE_PAGES * PAGE_ROWS,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[GpuEngine]:
    with torch.inference_mode():
        config = few_layers()
        weights = random_weights(config, torch.device(DEVICE, 0), torch.bfloat16)
        settings = EngineConfig(
            "prefill",
            model="tiny",
            dtype="bfloat16",
            pool_pages=PROMPTS * TABLE_PAGES,
            page_rows=PAGE_ROWS,
            slots=PROMPTS,
            chunk_rows=MOST_ROWS,
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
    tables = torch.arange(PROMPTS * TABLE_PAGES, dtype=torch.int32).view(PROMPTS, -1)
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


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_attention_of_a_small_pass(splits: int) -> None:
    """Two prompts, one behind a prefix, against plain torch; what pads is answered with zeros,
    however much it is, though the numbers in front of the first table name pages full of numbers.
    """
    heads, rows = 32, 700
    s = make_sequences("page-major", 16, 2, rows, 8, 128, torch.bfloat16, DEVICE)
    s.kv.items.nan_to_num_(nan=3.0)
    memory = torch.ones((200, s.tables.shape[1]), dtype=torch.int32, device=DEVICE)
    memory[-2:] = s.tables
    spans = [(1, 0, 70), (0, 650, 50), (0, -300, 300)]
    tiles = ChunkTiles.of(spans, heads, 8, torch.device(DEVICE))
    query = torch.randn((420, heads * 128), device=DEVICE).bfloat16()
    out = launch_attend_chunk(query, s.kv, 1, memory[-2:], tiles, heads, splits).cpu()
    assert not out[120:].any()
    for table, first, count, row in ((1, 0, 70, 0), (0, 650, 50, 70)):
        for position in range(first, first + count, 7):
            keys, values = (x[table, 1, : position + 1].cpu() for x in (s.keys, s.values))
            at = row + position - first
            expected = plain_attention(query[at].view(heads, 128).cpu(), keys, values)
            assert float((out[at].double() - expected).norm() / expected.norm()) < NEAR
