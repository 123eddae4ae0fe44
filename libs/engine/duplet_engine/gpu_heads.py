"""From the product with `wqkv` to what attention reads: norm, RoPE, keys and values in place.

Per row and head, in float32: a bias is added where the model has one; queries and keys are
normalised where the model does so,

    h = h / sqrt(mean(h^2) + eps) * weight

and turned in adjacent pairs by their position's angles,

    (h[2j], h[2j + 1]) = (h[2j] cos_j - h[2j + 1] sin_j, h[2j + 1] cos_j + h[2j] sin_j)

Queries go to a tensor of their own, keys and values to their row of the paged KV. A row with a
negative position pads the batch and is stored nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import follow

_BLOCK_HEADS = 8
_WARPS = 4


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of one pass stand. All on the device."""

    tables: Tensor
    """int32 [tables, pages], page numbers of each sequence."""
    table_index: Tensor
    """int32 [m], each row's sequence."""
    positions: Tensor
    """int32 [m], a row's position in its sequence; negative where the row pads."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What turns a row's heads. Borrowed from the model."""

    bias: Tensor | None
    """[(heads + 2 * kv_heads) * head_dim], of the product; None where the model has none."""
    q_norm: Tensor | None
    """[head_dim], as is `k_norm`; None where the model has none."""
    k_norm: Tensor | None
    cos: Tensor
    """float32 [positions, head_dim / 2], as is `sin`."""
    sin: Tensor
    eps: float


@triton.jit  # type: ignore[untyped-decorator]
def place_heads(  # type: ignore[no-untyped-def]
    qkv,
    query,
    keys,
    tables,
    table_index,
    positions,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    part_stride,
    table_width,
    page_stride,
    kv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row, block of heads: queries, then keys, then values).

    `qkv` is [PARTS, rows, width].
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    item = tl.arange(0, HEAD_DIM)[None, :]
    real = head < HEADS + 2 * KV_HEADS
    # Where the row stands, and what turns it, are known before the product is through.
    position = tl.load(positions + row)
    seen = tl.maximum(position, 0)
    table = tables + tl.load(table_index + row).to(tl.int64) * table_width
    page = tl.load(table + seen // PAGE_ROWS).to(tl.int64)
    pair = seen * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :]
    c = tl.load(cos + pair)
    s = tl.load(sin + pair)
    weight = c
    if QK_NORM:
        weight = tl.where(head < HEADS, tl.load(q_norm + item), tl.load(k_norm + item))
    if OVERLAP:
        follow()
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + item
    value = tl.zeros((BLOCK_HEADS, HEAD_DIM), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(source + part * part_stride, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + head * HEAD_DIM + item, mask=real, other=0.0).to(tl.float32)
    turned = value
    if QK_NORM:
        mean = tl.sum(turned * turned, axis=1, keep_dims=True) / HEAD_DIM
        turned = turned * tl.rsqrt(mean + eps) * weight.to(tl.float32)
    even, odd = tl.split(tl.reshape(turned, (BLOCK_HEADS, HEAD_DIM // 2, 2)))
    turned = tl.join(even * c - odd * s, odd * c + even * s)
    turned = tl.reshape(turned, (BLOCK_HEADS, HEAD_DIM))
    place = query + (row * HEADS + head) * HEAD_DIM + item
    tl.store(place, turned.to(query.dtype.element_ty), mask=head < HEADS)
    if position >= 0:
        is_value = head >= HEADS + KV_HEADS
        kv_head = head - HEADS - tl.where(is_value, KV_HEADS, 0)
        place = keys + page * page_stride + tl.where(is_value, kv_stride, 0)
        place += (position % PAGE_ROWS) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + item
        value = tl.where(is_value, value, turned)
        tl.store(place, value.to(keys.dtype.element_ty), mask=(head >= HEADS) & real)


def launch_place_heads(
    qkv: Tensor, weights: HeadWeights, kv: PagedKv, layer: int, places: Places, heads: int
) -> Tensor:
    """Queue it on the current stream.

    Args:
        qkv: [parts, m, (heads + 2 * kv_heads) * head_dim].
        weights: of the layer.
        kv: written at the rows' places.
        layer: the layer.
        places: of the rows; no two rows that do not pad have one place.
        heads: query heads.

    Returns:
        Queries [m, heads * head_dim] in the KV's dtype.
    """
    parts, m, width = qkv.shape
    query = kv.items.new_empty(m, heads * kv.head_dim)
    q_norm = weights.cos if weights.q_norm is None else weights.q_norm
    k_norm = weights.cos if weights.k_norm is None else weights.k_norm
    place_heads[(m, triton.cdiv(heads + 2 * kv.kv_heads, _BLOCK_HEADS))](
        qkv,
        query,
        kv.layer(layer),
        places.tables,
        places.table_index,
        places.positions,
        qkv if weights.bias is None else weights.bias,
        q_norm,
        k_norm,
        weights.cos,
        weights.sin,
        m * width,
        places.tables.stride(0),
        kv.page_stride,
        kv.kv_stride,
        weights.eps,
        HEADS=heads,
        KV_HEADS=kv.kv_heads,
        HEAD_DIM=kv.head_dim,
        PAGE_ROWS=kv.page_rows,
        PARTS=parts,
        BIAS=weights.bias is not None,
        QK_NORM=weights.q_norm is not None,
        BLOCK_HEADS=_BLOCK_HEADS,
        OVERLAP=qkv.is_cuda,
        num_warps=_WARPS,
        launch_pdl=qkv.is_cuda,
    )
    return query
