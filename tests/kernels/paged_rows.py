"""Random paged KV, and attention over it in plain torch, float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplet_engine.gpu_kv import PagedKv
from duplet_memory.layout import describe_pool
from duplet_pages.engine_config import Arrangement


@dataclass(frozen=True)
class Sequences:
    """Some sequences' KV in one pool, and the same rows side by side."""

    kv: PagedKv
    tables: Tensor
    """int32 [sequences, pages]; pages past a sequence's rows are not in the pool."""
    keys: Tensor
    """[sequences, layers, rows, kv_heads, head_dim]."""
    values: Tensor


def make_sequences(
    arrangement: Arrangement,
    page_rows: int,
    count: int,
    rows: int,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Sequences:
    """Make `count` sequences of `rows` rows in random pages; everything else in the pool is NaN."""
    layers, pages_each = 2, -(-rows // page_rows)
    pool = describe_pool(
        layers=layers,
        page_rows=page_rows,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype={torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype],
        pages=count * pages_each + 3,
        arrangement=arrangement,
    )
    chance = torch.Generator().manual_seed(page_rows * 100 + rows)
    memory = torch.zeros(pool.total_bytes, dtype=torch.uint8, device=device)
    kv = PagedKv.of_pool(memory, pool)
    kv.items.fill_(float("nan"))
    order = torch.randperm(pool.pages, generator=chance)[: count * pages_each]
    used = order.view(count, pages_each).int()
    content = torch.randn((2, count, layers, rows, kv_heads, head_dim), generator=chance)
    content = content.to(device, dtype)
    view = kv.items.view(pool.shape)
    for sequence in range(count):
        for row in range(rows):
            page, inside = int(used[sequence, row // page_rows]), row % page_rows
            if arrangement == "page-major":
                view[page, :, :, inside] = content[:, sequence, :, row].transpose(0, 1)
            else:
                view[:, :, page * page_rows + inside] = content[:, sequence, :, row].transpose(0, 1)
    strangers = torch.full((count, 2), 1 << 30, dtype=torch.int32)
    tables = torch.cat((used, strangers), dim=1).to(device)
    return Sequences(kv, tables, content[0], content[1])


def plain_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`query [heads, dim]` over `keys, values [rows, kv_heads, dim]` -> float64 [heads * dim]."""
    heads, dim = query.shape
    group = heads // keys.shape[1]
    keys = keys.double().repeat_interleave(group, dim=1)
    values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,rhd->hr", query.double(), keys) / dim**0.5
    return torch.einsum("hr,rhd->hd", scores.softmax(-1), values).flatten()
