"""Attention over fixed blocks, in a fixed order.

For a query the work is cut at absolute block borders: with the largest score `m` of all, each
block gives the sum `l_b` of `exp(score - m)` and the weighted sum `a_b` of its values; then

    out = sum_b a_b / sum_b l_b,

summed from the first block to the last. A block that is masked for a query adds exact zeros,
so neither the chunk that a prompt was cut into nor a longer neighbour in the batch moves a
bit of the result. It is computed in float32, whatever the keys and values are kept in.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from duplet_engine.arithmetic import narrow, widen
from duplet_engine.kv_store import KvStore

QUERY_TILE = 32
"""Rows of one prompt that share one pass over the keys."""
HEAD_TILE = 8
"""Rows of one KV head's queries come in whole tiles: torch's products of fewer than these add up
in another order than those of many."""


class Attention(Protocol):
    """Where a transformer's keys and values live, and which of them a query may see."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store `key, value [m, kv_heads, dim]`; answer `query [m, heads, dim]` with
        [m, heads * dim]."""
        ...


def attend(query: Tensor, keys: Tensor, values: Tensor, masked: Tensor) -> Tensor:
    """Answer n batches of t queries.

    Args:
        query: [n, t, heads, dim].
        keys: [n, blocks, kv_heads, block_rows, dim], contiguous.
        values: the same; finite everywhere.
        masked: bool, broadcastable to [n, blocks, kv_heads, t, 1, block_rows]: keys that a
            query may not see. Each query sees at least one.

    Returns:
        [n, t, heads * dim], of the queries' dtype.
    """
    dtype = query.dtype
    query, keys, values = widen(query), widen(keys), widen(values)
    n, t, heads, dim = query.shape
    _, blocks, kv_heads, block_rows, _ = keys.shape
    group = heads // kv_heads
    rows = -(-t * group // HEAD_TILE) * HEAD_TILE
    tiles = query.new_zeros(n, 1, kv_heads, rows, dim)
    by_head = (query * dim**-0.5).view(n, t, kv_heads, group, dim).transpose(1, 2)
    tiles[:, 0, :, : t * group] = by_head.reshape(n, kv_heads, t * group, dim)
    batch = n * blocks * kv_heads
    tiles = tiles.expand(n, blocks, kv_heads, rows, dim).reshape(batch, rows, dim)
    scores = torch.bmm(tiles, keys.view(batch, block_rows, dim).transpose(1, 2))
    scores = scores.view(n, blocks, kv_heads, rows, block_rows)
    real = scores[:, :, :, : t * group].unflatten(3, (t, group))
    real.masked_fill_(masked, float("-inf"))

    # A query sees a key, so the largest score is a number, and a masked block's weights are zeros.
    weights = scores.sub_(scores.amax(-1, keepdim=True).amax(1, keepdim=True)).exp_()
    block_sum = weights.sum(-1, keepdim=True)
    block_out = torch.bmm(
        weights.view(batch, rows, block_rows), values.view(batch, block_rows, dim)
    ).view(n, blocks, kv_heads, rows, dim)
    total, out = block_sum[:, 0], block_out[:, 0]
    for block in range(1, blocks):
        total = total + block_sum[:, block]
        out = out + block_out[:, block]
    out = (out / total)[:, :, : t * group].view(n, kv_heads, t, group, dim)
    return narrow(out.transpose(1, 2).reshape(n, t, heads * dim), dtype)


class ChunkAttention:
    """Consecutive rows of one sequence: a chunk of a prompt.

    Lives for one chunk. Rows past `count`, which pad the chunk to whole query tiles, are
    answered with something finite and never stored.
    """

    def __init__(self, store: KvStore, pages: Tensor, start_row: int, count: int) -> None:
        """`pages` int64 [pages of the sequence]; rows [start_row, start_row + count)."""
        self._store = store
        self._count = count
        end = start_row + count
        positions = torch.arange(start_row, end)
        self._places = store.row_places(pages[positions // store.page_rows], positions)
        blocks = store.blocks_for(end)
        tables = torch.zeros(1, blocks * store.pages_per_block, dtype=torch.int64)
        used = min(-(-end // store.page_rows), pages.shape[0])
        tables[0, :used] = pages[:used]
        rows = torch.arange(blocks * store.block_rows).view(blocks, store.block_rows)
        self._vectors = store.block_vectors(tables, rows >= end)
        self._tiles = []
        for first in range(0, count, QUERY_TILE):
            last_rows = (start_row + first + torch.arange(QUERY_TILE)).clamp_max(end - 1)
            seen = store.blocks_for(int(last_rows[-1]) + 1)
            masked = rows[:seen, None, :] > last_rows[None, :, None]
            self._tiles.append((first, seen, masked[None, :, None, :, None, :]))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        count = self._count
        self._store.write(layer, self._places, key[:count], value[:count])
        keys, values = self._store.gather(layer, self._vectors)
        outs = [
            attend(
                query[None, first : first + QUERY_TILE], keys[:, :seen], values[:, :seen], masked
            )
            for first, seen, masked in self._tiles
        ]
        return torch.cat(outs, dim=1)[0]


class StepAttention:
    """The newest row of each of several sequences: one decode step.

    Lives for one step. Rows past `count` pad the batch: they are never stored, and answered
    with zeros.
    """

    def __init__(self, store: KvStore, tables: Tensor, positions: Tensor, count: int) -> None:
        """`tables` int64 [m, pages], `positions` int64 [m] of the rows to compute."""
        self._store = store
        self._count = count
        tables, positions = tables[:count], positions[:count]
        page_of_row = tables.gather(1, (positions // store.page_rows)[:, None])[:, 0]
        self._places = store.row_places(page_of_row, positions)
        blocks = store.blocks_for(int(positions.max()) + 1)
        rows = torch.arange(blocks * store.block_rows).view(1, blocks, store.block_rows)
        invalid = rows > positions[:, None, None]
        self._vectors = store.block_vectors(tables[:, : blocks * store.pages_per_block], invalid)
        self._masked = invalid[:, :, None, None, None, :]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        count = self._count
        self._store.write(layer, self._places, key[:count], value[:count])
        keys, values = self._store.gather(layer, self._vectors)
        out = query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        out[:count] = attend(query[:count, None], keys, values, self._masked)[:, 0]
        return out


class RowAttention:
    """The codebook transformer's own short memory: the positions of one output row.

    All of a batch are at the same position, so nothing is padded or cut into blocks: each
    product has the same shape in any company. Computed in float32.

    Owns its cache, which lives for one row of a batch.
    """

    def __init__(self, layers: int, batch: int, positions: int, kv_heads: int, dim: int) -> None:
        self._batch = batch
        caches = torch.empty(layers, 2, batch, kv_heads, positions, dim).unbind(0)
        # Views of each layer: its keys and values, and those of each position.
        self._flat = [cache.flatten(1, 2).unbind(0) for cache in caches]
        self._places = [[at.unbind(0) for at in cache.unbind(3)] for cache in caches]
        self._first = 0

    def advance(self, first: int) -> None:
        """The next call's rows are `[batch, t]` positions from `first` on."""
        self._first = first

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, (rows, kv_heads, dim) = self._batch, key.shape
        t, group = rows // batch, query.shape[1] // kv_heads
        end = self._first + t
        for place in range(t):
            key_place, value_place = self._places[layer][self._first + place]
            key_place.copy_(key[place::t])
            value_place.copy_(value[place::t])
        keys, values = self._flat[layer]
        query32 = (widen(query) * dim**-0.5).view(batch, t, kv_heads, group, dim)
        query32 = query32.transpose(1, 2).reshape(-1, t * group, dim)
        scores = torch.bmm(query32, keys[:, :end].transpose(1, 2))
        if t > 1:
            by_position = scores.view(-1, t, group, end)
            for later in range(t - 1):
                by_position[:, later, :, self._first + later + 1 :] = float("-inf")
        out = torch.bmm(torch.softmax(scores, -1), values[:, :end])
        out = out.view(batch, kv_heads, t, group, dim).transpose(1, 2)
        return narrow(out.reshape(rows, -1), query.dtype)
