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
        self._slabs = flat.view(-1, d.page_rows * d.kv_heads * d.head_dim)
        self._rows = flat.view(-1, d.kv_heads, d.head_dim)
        self._row_shape = (d.kv_heads, d.head_dim)
        self._row_items = d.kv_heads * d.head_dim

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

    def gather(self, layer: int, tables: Tensor, invalid: Tensor) -> tuple[Tensor, Tensor]:
        """Copy whole blocks of keys and values out of the pool.

        Args:
            layer: the layer.
            tables: int64 [n, blocks * pages_per_block], pages of n sequences in row order;
                entries past a sequence's last page may name any page.
            invalid: int64, rows that hold nothing of their sequence, counted over all n
                sequences' blocks. Their values come back as zeros: a weight of zero would
                not neutralise a NaN that another sequence has left there.

        Returns:
            keys and values, [n, blocks, kv_heads, block_rows, head_dim] each, of the pool's
            dtype.
        """
        key_slabs = tables.reshape(-1) * self._page_stride + layer * self._layer_stride
        keys = self._slabs.index_select(0, key_slabs)
        values = self._slabs.index_select(0, key_slabs + self._kv_stride)
        values.view(-1, self._row_items).index_fill_(0, invalid, 0.0)
        return self._by_head(keys, tables.shape[0]), self._by_head(values, tables.shape[0])

    def _by_head(self, slabs: Tensor, sequences: int) -> Tensor:
        rows = slabs.view(sequences, -1, self.block_rows, *self._row_shape)
        return rows.transpose(2, 3).contiguous()
