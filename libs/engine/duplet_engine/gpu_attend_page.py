"""Attention of rows whose whole sequence is one page: those of the codebook transformer.

One kernel does for a row what `gpu_heads` and `gpu_attend_step` do in two, by their formulas: it
turns the row's heads, puts its key and value into the page, and attends to it and to the rows
before it. There is so little to compute that a kernel less counts.
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_heads import HeadWeights, Places, turn_heads
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import follow

_LEAST_MEMBERS = 16
"""Rows of the smallest matrix product."""
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def attend_page(  # type: ignore[no-untyped-def]
    qkv,
    out,
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
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
    MEMBERS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (kv head, row); its members are the group's queries, the key and the value.

    `qkv` is [PARTS, rows, width], `out` [rows, HEADS, HEAD_DIM]; `scale` as in `attend_step`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    member = tl.arange(0, MEMBERS)[:, None]
    item = tl.arange(0, HEAD_DIM)[None, :]
    is_query = member < GROUP
    real = member < GROUP + 2
    head = tl.where(
        is_query, kv_head * GROUP + member, HEADS + (member - GROUP) * KV_HEADS + kv_head
    )
    position = tl.load(positions + row)
    table = tables + tl.load(table_index + row).to(tl.int64) * table_width
    page = keys + tl.load(table).to(tl.int64) * page_stride + kv_head * HEAD_DIM
    pair = position * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)[None, :]
    c = tl.load(cos + pair)
    s = tl.load(sin + pair)
    weight = c
    if QK_NORM:
        weight = tl.where(is_query, tl.load(q_norm + item), tl.load(k_norm + item))
    # The rows before this one were written by earlier passes.
    place = tl.arange(0, PAGE_ROWS)[:, None]
    past = page + place * (KV_HEADS * HEAD_DIM) + item
    k = tl.load(past, mask=place < position, other=0.0, cache_modifier=".cg")
    v = tl.load(past + kv_stride, mask=place < position, other=0.0, cache_modifier=".cg")
    if OVERLAP:
        follow()

    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + item
    value = tl.zeros((MEMBERS, HEAD_DIM), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(source + part * part_stride, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + head * HEAD_DIM + item, mask=real, other=0.0).to(tl.float32)
    turned = turn_heads(value, weight, c, s, eps, MEMBERS, HEAD_DIM, QK_NORM)
    own = tl.where(member == GROUP + 1, value, turned).to(keys.dtype.element_ty)
    to_page = page + position * (KV_HEADS * HEAD_DIM) + item
    to_page += tl.where(member == GROUP + 1, kv_stride, 0)
    tl.store(to_page, own, mask=real & (member >= GROUP))

    exact = own.to(tl.float32)
    own_k = tl.sum(tl.where(member == GROUP, exact, 0.0), axis=0)[None, :]
    own_v = tl.sum(tl.where(member == GROUP + 1, exact, 0.0), axis=0)[None, :]
    k = tl.where(place == position, own_k.to(k.dtype), k)
    v = tl.where(place == position, own_v.to(v.dtype), v)
    scores = tl.dot(own, tl.trans(k), input_precision=PRECISION) * scale
    seen = tl.arange(0, PAGE_ROWS)[None, :] <= position
    scores = tl.where(seen, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    total = tl.sum(weights, axis=1)[:, None]
    mixed = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION) / total
    to = out + (row * HEADS + head) * HEAD_DIM + item
    tl.store(to, mixed.to(out.dtype.element_ty), mask=is_query)


def launch_attend_page(
    qkv: Tensor, weights: HeadWeights, kv: PagedKv, layer: int, places: Places, heads: int
) -> Tensor:
    """Queue one layer's attention on the current stream.

    Args:
        qkv: [parts, m, (heads + 2 * kv_heads) * head_dim].
        weights: of the layer.
        kv: written at the rows' places; pages of at least 16 rows, a power of two.
        layer: the layer.
        places: of the rows: none pads, and each is in a page of its own, its table's first, where
            all rows before it are, written by earlier passes.
        heads: query heads.

    Returns:
        [m, heads * head_dim] in the KV's dtype.
    """
    parts, m, width = qkv.shape
    out = kv.items.new_empty(m, heads * kv.head_dim)
    attend_page[(kv.kv_heads, m)](
        qkv,
        out,
        kv.layer(layer),
        places.tables,
        places.table_index,
        places.positions,
        qkv if weights.bias is None else weights.bias,
        weights.cos if weights.q_norm is None else weights.q_norm,
        weights.cos if weights.k_norm is None else weights.k_norm,
        weights.cos,
        weights.sin,
        m * width,
        places.tables.stride(0),
        kv.page_stride,
        kv.kv_stride,
        weights.eps,
        math.log2(math.e) / kv.head_dim**0.5,
        HEADS=heads,
        KV_HEADS=kv.kv_heads,
        HEAD_DIM=kv.head_dim,
        PAGE_ROWS=kv.page_rows,
        PARTS=parts,
        BIAS=weights.bias is not None,
        QK_NORM=weights.q_norm is not None,
        MEMBERS=max(_LEAST_MEMBERS, triton.next_power_of_2(heads // kv.kv_heads + 2)),
        PRECISION="ieee" if kv.items.dtype == torch.float32 else "tf32",
        OVERLAP=qkv.is_cuda,
        num_warps=_WARPS,
        launch_pdl=qkv.is_cuda,
    )
    return out
