"""The pool as torch reads and writes it: gathers of blocks, scatters of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from duplet_memory.pool import Pool

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK_ROWS = 128
"""Rows of one attention block; borders lie at multiples of it, counted from row 0."""


class KvStore:
    """KV of one pool in either arrangement, addressed by slab (see `duplet_memory.layout`).

    Holds views of the pool's mapping, no memory of its own; the owner of the pool drops the
    store before it closes the pool.
    """

    def __init__(self, pool: Pool) -> None:
        d = pool.description
        self.page_rows = d.page_rows
        self.pages_per_block = max(1, BLOCK_ROWS // d.page_rows)
        self.block_rows = self.pages_per_block * d.page_rows
        self._page_stride, self._layer_stride, self._kv_stride = d.slab_strides
        # NumPy has no bfloat16: the pool's array is its bit patterns.
        flat = torch.from_numpy(pool.array).view(DTYPES[d.dtype]).view(-1)
        self._rows = flat.view(-1, d.kv_heads, d.head_dim)
        self._vectors = flat.view(-1, d.head_dim)
        self._heads = torch.arange(d.kv_heads)[:, None]

    def blocks_for(self, rows: int) -> int:
        """Blocks that cover rows [0, rows)."""
        return -(-rows // self.block_rows)

    def row_places(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Where rows lie in layer 0's keys, for `write`.

        Args:
            pages: int64 [n], the page of each row.
            positions: int64 [n], the row's position in its sequence.
        """
        return pages * self._page_stride * self.page_rows + positions % self.page_rows

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key, value [n, kv_heads, head_dim]` at `places [n]` of `row_places`."""
        key_places = places + layer * self._layer_stride * self.page_rows
        self._rows.index_copy_(0, key_places, key)
        self._rows.index_copy_(0, key_places + self._kv_stride * self.page_rows, value)

    def block_vectors(self, tables: Tensor, invalid: Tensor) -> Tensor:
        """Where the vectors of whole blocks lie in layer 0's keys, for `gather`.

        Args:
            tables: int64 [n, blocks * pages_per_block], pages of n sequences in row order;
                entries past a sequence's last page may name any page.
            invalid: bool, broadcastable to [n, blocks, block_rows], rows that hold nothing of
                their sequence. Its first row stands in for them: a weight of zero would not
                neutralise a NaN that another sequence has left there.

        Returns:
            int64 [n, blocks, kv_heads, block_rows]
        """
        first_rows = tables * (self._page_stride * self.page_rows)
        rows = first_rows[:, :, None] + torch.arange(self.page_rows)
        rows = rows.view(tables.shape[0], -1, self.block_rows)
        rows = torch.where(invalid, rows[:, :1, :1], rows)
        return rows[:, :, None] * self._heads.shape[0] + self._heads

    def gather(self, layer: int, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks of keys and values out of the pool.

        Args:
            layer: the layer.
            vectors: of `block_vectors`, contiguous.

        Returns:
            keys and values, [n, blocks, kv_heads, block_rows, head_dim] each, of the pool's
            dtype.
        """
        slab_vectors = self.page_rows * self._heads.shape[0]
        shape = (*vectors.shape, self._vectors.shape[1])
        places = vectors.reshape(-1) + layer * self._layer_stride * slab_vectors
        keys = self._vectors.index_select(0, places)
        values = self._vectors.index_select(0, places + self._kv_stride * slab_vectors)
        return keys.view(shape), values.view(shape)
