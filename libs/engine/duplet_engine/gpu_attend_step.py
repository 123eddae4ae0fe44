"""Attention of decode's rows over paged KV: one query row a program, split over its context.

For a row at position t of a sequence, for each of its query heads h with keys k and values v of
key head h // group:

    out[h] = sum_j softmax_j(q[h] . k[j] / sqrt(head_dim)) v[j],    j = 0 .. t

The context is cut into SPLITS parts of whole blocks. A part gives its own normalised sum and
the base-2 logarithm of its weights' sum, and `join_splits` weighs the parts together. A row with
a negative position pads the batch: it reads nothing and is answered with zeros.
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import follow

_LEAST_QUERIES = 16
"""Rows of the smallest matrix product; a group of query heads is padded to them."""
_MOST_SPLITS = 64
_WARPS = 4
_SHORT_ROWS = 16
"""With blocks of so many rows there is less for a program to do."""
_SHORT_WARPS = 2
_STAGES = 3
_JOINED_PARTS = 16
"""That one program reads at least, so that many rows need few programs."""


@triton.jit  # type: ignore[untyped-decorator]
def attend_step(  # type: ignore[no-untyped-def]
    query,
    keys,
    tables,
    table_index,
    positions,
    out,
    parts,
    logs,
    query_stride,
    table_width,
    page_stride,
    kv_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (kv head, row, split).

    Args:
        query: [rows, query_stride], a row's query heads first, [HEADS, HEAD_DIM].
        keys: items of the layer's keys, see PagedKv.
        tables: int32 [tables, table_width], page numbers.
        table_index: int32 [rows]. positions: int32 [rows].
        out: [rows, HEADS, HEAD_DIM], written where SPLITS is 1.
        parts: float32 [rows, HEADS, SPLITS, HEAD_DIM], logs: float32 [rows, HEADS, SPLITS],
            written otherwise.
        scale: log2(e) / sqrt(HEAD_DIM).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(positions + row) + 1
    table = tables + tl.load(table_index + row).to(tl.int64) * table_width
    blocks = tl.cdiv(length, BLOCK_ROWS)
    share = tl.cdiv(blocks, SPLITS) * BLOCK_ROWS
    first = split * share
    end = tl.minimum(length, first + share)
    if OVERLAP:
        follow()

    member = tl.arange(0, QUERIES)
    item = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None]
    q_place = row.to(tl.int64) * query_stride + head[:, None] * HEAD_DIM + item[None, :]
    q = tl.load(query + q_place, mask=real, other=0.0)

    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
    for start in range(first, end, BLOCK_ROWS):
        place = start + tl.arange(0, BLOCK_ROWS)
        seen = place < end
        page = tl.load(table + place // PAGE_ROWS, mask=seen, other=0).to(tl.int64)
        offset = page * page_stride + (place % PAGE_ROWS) * (KV_HEADS * HEAD_DIM)
        item_place = (offset + kv_head * HEAD_DIM)[:, None] + item[None, :]
        k = tl.load(keys + item_place, mask=seen[:, None], other=0.0)
        v = tl.load(keys + kv_stride + item_place, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        kept = tl.exp2(top - new_top)
        total = total * kept + tl.sum(weights, axis=1)
        mixed = mixed * kept[:, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
        top = new_top

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        place = (row.to(tl.int64) * HEADS + head[:, None]) * HEAD_DIM + item[None, :]
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=real)
    else:
        part = (row.to(tl.int64) * HEADS + head) * SPLITS + split
        tl.store(parts + part[:, None] * HEAD_DIM + item[None, :], mixed, mask=real)
        log = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(logs + part, log, mask=member < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def join_splits(  # type: ignore[no-untyped-def]
    parts,
    logs,
    out,
    count,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (BLOCK of the `count` heads of all rows): for each of them
    `out = sum_s 2^(log_s - top) part_s / sum_s 2^(log_s - top)`."""
    if OVERLAP:
        follow()
    head = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = head < count
    item = tl.arange(0, HEAD_DIM)
    part = head[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    log = tl.load(logs + part, mask=real[:, None], other=0.0)
    top = tl.max(log, axis=1)
    weight = tl.exp2(log - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weight, axis=1)
    place = part[:, :, None] * HEAD_DIM + item[None, None, :]
    found = tl.load(parts + place, mask=real[:, None, None], other=0.0)
    mixed = tl.sum(found * weight[:, :, None], axis=1)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    place = out + head[:, None] * HEAD_DIM + item[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=real[:, None])


def choose_splits(rows: int, kv_heads: int, processors: int) -> int:
    """Parts to cut every row's context into, so that the programs fill the GPU and all of them run
    at once: a power of two.

    `processors`: the GPU's multiprocessors; each takes several programs at a time.
    """
    most = -(-3 * processors // (rows * kv_heads))
    return min(_MOST_SPLITS, 1 << (most.bit_length() - 1))


def launch_attend_step(
    query: Tensor,
    kv: PagedKv,
    layer: int,
    tables: Tensor,
    table_index: Tensor,
    positions: Tensor,
    heads: int,
    splits: int,
    block_rows: int = 64,
) -> Tensor:
    """Queue one layer's attention on the current stream.

    Args:
        query: `[rows, width]`, a row's `heads * head_dim` query items first; rotated.
        kv: where keys and values of all rows up to `positions` lie, those included.
        layer: the layer.
        tables: int32 [tables, pages], every sequence's pages; entries past its last are unread.
        table_index: int32 [rows], each row's sequence.
        positions: int32 [rows]; a negative one pads.
        heads: query heads, a multiple of the key heads.
        splits: from `choose_splits`, or 1.
        block_rows: rows of one block, a power of two, at least 16.

    Returns:
        `[rows, heads * head_dim]` in the query's dtype.
    """
    rows = query.shape[0]
    out = query.new_empty(rows, heads * kv.head_dim)
    parts, logs = out, out
    if splits > 1:
        parts = query.new_empty(rows, heads, splits, kv.head_dim, dtype=torch.float32)
        logs = query.new_empty(rows, heads, splits, dtype=torch.float32)
    group = triton.next_power_of_2(heads // kv.kv_heads)
    attend_step[(kv.kv_heads, rows, splits)](
        query,
        kv.layer(layer),
        tables,
        table_index,
        positions,
        out,
        parts,
        logs,
        query.stride(0),
        tables.stride(0),
        kv.page_stride,
        kv.kv_stride,
        math.log2(math.e) / kv.head_dim**0.5,
        HEADS=heads,
        KV_HEADS=kv.kv_heads,
        HEAD_DIM=kv.head_dim,
        PAGE_ROWS=kv.page_rows,
        QUERIES=max(_LEAST_QUERIES, group),
        BLOCK_ROWS=block_rows,
        SPLITS=splits,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        OVERLAP=query.is_cuda,
        num_warps=_WARPS if block_rows > _SHORT_ROWS else _SHORT_WARPS,
        num_stages=_STAGES,
        launch_pdl=query.is_cuda,
    )
    if splits > 1:
        launch_join_splits(parts, logs, out)
    return out


def launch_join_splits(parts: Tensor, logs: Tensor, out: Tensor) -> None:
    """Queue the joining of float32 `parts` [rows, heads, splits, head_dim], whose `logs` are
    float32 [rows, heads, splits], into `out` [rows, heads * head_dim]."""
    rows, heads, splits, head_dim = parts.shape
    block = max(1, _JOINED_PARTS // splits)
    join_splits[(triton.cdiv(rows * heads, block),)](
        parts,
        logs,
        out,
        rows * heads,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        BLOCK=block,
        OVERLAP=out.is_cuda,
        num_warps=_WARPS,
        launch_pdl=out.is_cuda,
    )
