"""Paged attention against plain torch. Run by test_kernels_interpreted.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from duplet_engine.gpu_attend_chunk import (
    ChunkTiles,
    choose_chunk_splits,
    launch_attend_chunk,
)
from duplet_engine.gpu_attend_step import choose_splits, launch_attend_step
from duplet_engine.gpu_heads import HeadWeights, Places, launch_place_heads
from duplet_engine.gpu_kv import PagedKv
from duplet_pages.engine_config import Arrangement
from tests.kernels.paged_rows import make_sequences, plain_attention

ARRANGEMENTS: tuple[Arrangement, ...] = ("page-major", "layer-major")
CPU = torch.device("cpu")


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize(
    ("page_rows", "splits", "heads"), [(16, 1, 4), (16, 4, 4), (3, 2, 6), (64, 8, 2), (1, 1, 40)]
)
def test_a_step_is_plain_attention(
    arrangement: Arrangement, page_rows: int, splits: int, heads: int
) -> None:
    """Lengths at block and page borders, among them padding and more splits than blocks."""
    lengths = [1, 0, 16, 17, 33, 64, 70]
    s = make_sequences(arrangement, page_rows, len(lengths), 70)
    chance = torch.Generator().manual_seed(heads)
    wide = torch.randn((len(lengths), heads * 16 + 32), generator=chance)
    index = torch.tensor([3, 0, 1, 2, 6, 5, 4], dtype=torch.int32)
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    layer = 1
    out = launch_attend_step(
        wide, s.kv, layer, s.tables, index, positions, heads, splits, block_rows=16
    )
    for row, length in enumerate(lengths):
        if length == 0:
            assert not out[row].any()
            continue
        sequence = int(index[row])
        query = wide[row, : heads * 16].view(heads, 16)
        keys, values = (x[sequence, layer, :length] for x in (s.keys, s.values))
        expected = plain_attention(query, keys, values)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize(("page_rows", "heads", "splits"), [(16, 4, 1), (5, 6, 2), (16, 4, 8)])
def test_a_chunk_is_plain_attention(
    arrangement: Arrangement, page_rows: int, heads: int, splits: int
) -> None:
    """Two sequences in one launch: one cold, one behind a cached prefix; several tiles, and parts
    of the context in which a tile's first rows see nothing, or no row does."""
    s = make_sequences(arrangement, page_rows, 2, 150)
    spans = [(1, 0, 70), (0, 126, 3)]
    tiles = ChunkTiles.of(spans, heads, 2, CPU)
    assert len(tiles.index) > 2
    tiles = replace(tiles, index=torch.cat((tiles.index, torch.zeros((3, 4), dtype=torch.int32))))
    chance = torch.Generator().manual_seed(heads)
    query = torch.randn((73, heads * 16), generator=chance)
    out = launch_attend_chunk(query, s.kv, 0, s.tables, tiles, heads, splits)
    row = 0
    for sequence, first, count in spans:
        for position in range(first, first + count):
            keys, values = (x[sequence, 0, : position + 1] for x in (s.keys, s.values))
            expected = plain_attention(query[row].view(heads, 16), keys, values)
            torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=2e-6)
            row += 1


@pytest.mark.parametrize("position", [0, 1, 9, 15])
@pytest.mark.parametrize(("heads", "parts", "plain"), [(4, 2, False), (6, 1, True)])
def test_heads_are_turned_and_placed_by_their_formula(
    heads: int, parts: int, plain: bool, position: int
) -> None:
    """With bias and norms, and without; nothing but the row's place in the layer is written."""
    rows, dim = 5, 32
    chance = torch.Generator().manual_seed(10 * heads + position)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance)

    width = (heads + 4) * dim
    angles = random(16, dim // 2), random(16, dim // 2)
    weights = HeadWeights(random(width), random(dim), random(dim), *angles, 1e-5)
    if plain:
        weights = replace(weights, bias=None, q_norm=None, k_norm=None)
    kv = PagedKv.scratch(3, rows, 16, 2, dim, torch.empty(0))
    kv.items.fill_(float("nan"))
    order = torch.randperm(rows, generator=chance).int()
    stand = torch.full((rows,), position, dtype=torch.int32)
    places = Places(torch.arange(rows).int()[:, None].contiguous(), order, stand)
    qkv = random(parts, rows, width)

    query = launch_place_heads(qkv, weights, kv, 1, places, heads)
    query_wanted, keys_wanted, values_wanted = turned_heads(qkv, weights, position, heads)
    torch.testing.assert_close(
        query.view(rows, heads, dim).double(), query_wanted, rtol=0, atol=3e-6
    )
    pages = kv.items.view(rows, 3, 2, 16, 2, dim)
    keys, values = pages[order.long(), 1, :, position].unbind(1)
    assert int(kv.items.isnan().logical_not().sum()) == 2 * rows * 2 * dim
    torch.testing.assert_close(keys.double(), keys_wanted, rtol=0, atol=3e-6)
    torch.testing.assert_close(values.double(), values_wanted, rtol=0, atol=3e-6)


def turned_heads(
    qkv: torch.Tensor, weights: HeadWeights, position: int, heads: int
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, float64 [rows, heads, head_dim], of a product [parts, rows,
    width] whose rows all stand at one position."""
    dim = 2 * weights.cos.shape[1]
    value = qkv.double().sum(0)
    if weights.bias is not None:
        value = value + weights.bias
    value = value.view(qkv.shape[1], -1, dim)
    found = [value[:, :heads], value[:, heads:-2], value[:, -2:]]
    for part, norm in enumerate((weights.q_norm, weights.k_norm)):
        head = found[part]
        if norm is not None:
            head = head / (head.square().mean(-1, keepdim=True) + weights.eps).sqrt() * norm
        angle = torch.complex(weights.cos[position].double(), weights.sin[position].double())
        pairs = torch.view_as_complex(head.reshape(*head.shape[:2], -1, 2))
        found[part] = torch.view_as_real(pairs * angle).flatten(-2)
    return tuple(found)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("padding", [1, 52, 63, 64, 65, 82, 114, 127, 300])
def test_rows_that_pad_see_nothing(padding: int, splits: int) -> None:
    """However many they are. What lies before the first table names pages full of numbers."""
    s = make_sequences("page-major", 16, 1, 40)
    s.kv.items.nan_to_num_(nan=3.0)
    memory = torch.ones((40, s.tables.shape[1]), dtype=torch.int32)
    memory[-1] = s.tables[0]
    spans = [(0, 37, 3), (0, -padding, padding)]
    tiles = ChunkTiles.of(spans, 4, 2, CPU)
    query = torch.ones((3 + padding, 4 * 16))
    out = launch_attend_chunk(query, s.kv, 0, memory[-1:], tiles, 4, splits)
    assert out[:3].all()
    assert not out[3:].any()


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert choose_splits(1, 8, 132) == 32
    assert choose_splits(16, 8, 132) == 4
    assert choose_splits(64, 8, 132) == 1
    assert choose_splits(256, 8, 132) == 1
    found = [choose_chunk_splits(rows, 32, 8, 132) for rows in (16, 64, 128, 192, 256, 1504)]
    assert found == [16, 8, 4, 2, 2, 1]
