"""Paged KV as the GPU's kernels address it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplet_core.errors import require
from duplet_memory.layout import PoolDescription

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PagedKv:
    """KV of a pool in either arrangement. Borrows the pool's memory or owns a scratch of its own.

    Row r of page p in layer l has its keys at item

        p * page_stride + l * layer_stride + r * kv_heads * head_dim

    of `items`, as `[kv_heads, head_dim]`, and its values `kv_stride` items behind them.
    """

    items: Tensor
    """One dimension, the KV's dtype, from the first page on."""
    pages: int
    page_rows: int
    kv_heads: int
    head_dim: int
    page_stride: int
    layer_stride: int
    kv_stride: int

    @staticmethod
    def of_pool(memory: Tensor, description: PoolDescription) -> PagedKv:
        """View a pool: `memory` is its whole allocation, uint8 `[total_bytes]`, lent."""
        d = description
        require(memory.numel() == d.total_bytes, f"{memory.numel()} bytes for {d.total_bytes}")
        slab_items = d.page_rows * d.kv_heads * d.head_dim
        page, layer, kv = (stride * slab_items for stride in d.slab_strides)
        items = memory[d.offset :].view(_DTYPES[d.dtype])
        return PagedKv(items, d.pages, d.page_rows, d.kv_heads, d.head_dim, page, layer, kv)

    @staticmethod
    def scratch(
        layers: int,
        pages: int,
        page_rows: int,
        kv_heads: int,
        head_dim: int,
        like: Tensor,
    ) -> PagedKv:
        """Make page-major KV on the device and in the dtype of `like`. The result owns it."""
        slab = page_rows * kv_heads * head_dim
        items = like.new_zeros(pages * layers * 2 * slab)
        return PagedKv(
            items, pages, page_rows, kv_heads, head_dim, 2 * layers * slab, 2 * slab, slab
        )

    def layer(self, layer: int) -> Tensor:
        """From one layer's first key on; a view."""
        return self.items[layer * self.layer_stride :]
