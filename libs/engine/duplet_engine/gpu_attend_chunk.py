"""Attention of a prompt's new rows over paged KV: causal, a tile of rows a program.

The formula is that of `gpu_attend_step`. A tile holds up to TILE_ROWS consecutive rows of one
sequence with all query heads of one key head, so a block of keys is read once for all of them.
Tiles of one launch may belong to different sequences. Where there are few tiles, each one's
context is cut into parts as a step's is, so that the GPU has programs enough.

A tile of rows that pad stands at a negative position, sees nothing and is answered with zeros. On
a GPU `//` rounds towards zero and in the interpreter down: no negative number may come before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_attend_step import launch_join_splits
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import follow

_TILE_QUERIES = 128
"""Query rows of one program's matrix product: rows times heads of the group. A program takes more
than half of a multiprocessor's registers and has it for itself. Programs of 64, two of which share
one, were no faster on an H200."""
_BLOCK_ROWS = 64
_STAGES = 3
_MOST_SPLITS = 16


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """Where the rows of one launch stand. Tensors are on the device; lives for one chunk."""

    index: Tensor
    """int32 [tiles, 4]: table, first query row, its position, rows of the tile."""
    tile_rows: int

    @staticmethod
    def of(
        spans: Sequence[tuple[int, int, int]], heads: int, kv_heads: int, device: torch.device
    ) -> ChunkTiles:
        """Of spans as in `cut_tiles`; the query's rows are theirs one after the other."""
        tile_rows = ChunkTiles.rows_of_a_tile(heads, kv_heads)
        index = cut_tiles(spans, tile_rows)
        if device.type == "cuda":
            index = index.pin_memory().to(device, non_blocking=True)
        return ChunkTiles(index, tile_rows)

    @staticmethod
    def rows_of_a_tile(heads: int, kv_heads: int) -> int:
        """Rows that one tile holds."""
        return max(1, _TILE_QUERIES // triton.next_power_of_2(heads // kv_heads))


def cut_tiles(spans: Sequence[tuple[int, int, int]], tile_rows: int) -> Tensor:
    """Cut spans (table, position of the first row, rows) into tiles of `tile_rows` rows at most:
    int32 [tiles, 4] on the host, as ChunkTiles has them."""
    tiles = []
    query_row = 0
    for table, position, rows in spans:
        for first in range(0, rows, tile_rows):
            size = min(tile_rows, rows - first)
            tiles.append((table, query_row + first, position + first, size))
        query_row += rows
    # Long contexts first: the last programs to start are then short ones.
    tiles.sort(key=lambda tile: -tile[2])
    return torch.tensor(tiles, dtype=torch.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    q,
    keys,
    table,
    start,
    end,
    position,
    top,
    total,
    mixed,
    page_stride,
    kv_stride,
    scale,
    head_place,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the block of keys from `start` on into the running sums."""
    item = tl.arange(0, HEAD_DIM)
    place = start + tl.arange(0, BLOCK_ROWS)
    if MASKED:
        page = tl.load(table + place // PAGE_ROWS, mask=place < end, other=0).to(tl.int64)
    else:
        page = tl.load(table + place // PAGE_ROWS).to(tl.int64)
    offset = page * page_stride + (place % PAGE_ROWS) * (KV_HEADS * HEAD_DIM) + head_place
    item_place = offset[:, None] + item[None, :]
    if MASKED:
        k = tl.load(keys + item_place, mask=(place < end)[:, None], other=0.0)
        v = tl.load(keys + kv_stride + item_place, mask=(place < end)[:, None], other=0.0)
    else:
        k = tl.load(keys + item_place)
        v = tl.load(keys + kv_stride + item_place)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(place[None, :] <= position[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = new_top
    if MASKED:
        # Of a part of the context some rows may see nothing.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(weights, axis=1)
    mixed = mixed * kept[:, None]
    mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
    return new_top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def attend_chunk(  # type: ignore[no-untyped-def]
    query,
    keys,
    tables,
    tiles,
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
    GROUP_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (kv head, split, tile): tiles begin in their order, those without rows last.

    Args:
        query: [rows, query_stride], a row's query heads first, [HEADS, HEAD_DIM].
        keys: items of the layer's keys, see PagedKv.
        tables: int32 [tables, table_width], page numbers.
        tiles: int32 [tiles, 4], see ChunkTiles.
        out: [rows, HEADS, HEAD_DIM], written where SPLITS is 1.
        parts: float32 [rows, HEADS, SPLITS, HEAD_DIM], logs: float32 [rows, HEADS, SPLITS],
            written otherwise.
        scale: log2(e) / sqrt(HEAD_DIM).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = tiles + tl.program_id(2) * 4
    kv_head = tl.program_id(0)
    table = tables + tl.load(tile).to(tl.int64) * table_width
    first_row = tl.load(tile + 1)
    first_position = tl.load(tile + 2)
    rows = tl.load(tile + 3)
    if OVERLAP:
        follow()
    # A graph has tiles for as many prompts as a pass may have.
    if rows == 0:
        return

    number = tl.arange(0, QUERIES)
    member = number % GROUP_PADDED
    row = number // GROUP_PADDED
    real = (member < GROUP) & (row < rows)
    # Rows past the tile's last see what the first sees; they are not stored.
    position = first_position + tl.where(row < rows, row, 0)
    item = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + member
    query_row = (first_row + row).to(tl.int64)
    q_place = (query_row * query_stride + head * HEAD_DIM)[:, None] + item[None, :]
    q = tl.load(query + q_place, mask=real[:, None], other=0.0)

    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
    head_place = kv_head * HEAD_DIM
    seen = tl.maximum(first_position + rows, 0)
    share = tl.cdiv(tl.cdiv(seen, BLOCK_ROWS), SPLITS) * BLOCK_ROWS
    split = tl.program_id(1)
    first = split * share
    end = tl.minimum(seen, first + share)
    # Blocks that every row of the tile sees whole need no mask.
    clear = tl.maximum(first_position + 1, 0) // BLOCK_ROWS * BLOCK_ROWS
    for start in range(first, tl.minimum(clear, end), BLOCK_ROWS):
        top, total, mixed = _weigh(
            q,
            keys,
            table,
            start,
            end,
            position,
            top,
            total,
            mixed,
            page_stride,
            kv_stride,
            scale,
            head_place,
            KV_HEADS,
            HEAD_DIM,
            PAGE_ROWS,
            BLOCK_ROWS,
            PRECISION,
            False,
        )
    for start in range(tl.maximum(clear, first), end, BLOCK_ROWS):
        top, total, mixed = _weigh(
            q,
            keys,
            table,
            start,
            end,
            position,
            top,
            total,
            mixed,
            page_stride,
            kv_stride,
            scale,
            head_place,
            KV_HEADS,
            HEAD_DIM,
            PAGE_ROWS,
            BLOCK_ROWS,
            PRECISION,
            True,
        )
    whole = tl.where(total > 0, total, 1.0)
    mixed = mixed / whole[:, None]
    place = query_row * HEADS + head
    if SPLITS == 1:
        at = out + place[:, None] * HEAD_DIM + item[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=real[:, None])
    else:
        part = place * SPLITS + split
        tl.store(parts + part[:, None] * HEAD_DIM + item[None, :], mixed, mask=real[:, None])
        log = tl.where(total > 0, top + tl.log2(whole), float("-inf"))
        tl.store(logs + part, log, mask=real)


def choose_chunk_splits(rows: int, heads: int, kv_heads: int, processors: int) -> int:
    """Parts to cut the context of a small pass into, so that the programs of its tiles fill the
    GPU and all of them run at once: a power of two.

    `processors`: the GPU's multiprocessors.
    """
    tiles = -(-rows // ChunkTiles.rows_of_a_tile(heads, kv_heads))
    most = max(1, processors // (tiles * kv_heads))
    return min(_MOST_SPLITS, 1 << (most.bit_length() - 1))


def launch_attend_chunk(
    query: Tensor,
    kv: PagedKv,
    layer: int,
    tables: Tensor,
    tiles: ChunkTiles,
    heads: int,
    splits: int = 1,
) -> Tensor:
    """Queue one layer's attention on the current stream.

    Args:
        query: `[rows, width]`, a row's `heads * head_dim` query items first; rotated.
        kv: where keys and values lie, those of the query's own rows included.
        layer: the layer.
        tables: int32 [tables, pages], every sequence's pages.
        tiles: made for the same heads.
        heads: query heads, a multiple of the key heads.
        splits: from `choose_chunk_splits`, or 1.

    Returns:
        `[rows, heads * head_dim]` in the query's dtype.
    """
    group = triton.next_power_of_2(heads // kv.kv_heads)
    queries = tiles.tile_rows * group
    rows = query.shape[0]
    out = query.new_empty(rows, heads * kv.head_dim)
    parts, logs = out, out
    if splits > 1:
        parts = query.new_empty(rows, heads, splits, kv.head_dim, dtype=torch.float32)
        logs = query.new_empty(rows, heads, splits, dtype=torch.float32)
    attend_chunk[(kv.kv_heads, splits, tiles.index.shape[0])](
        query,
        kv.layer(layer),
        tables,
        tiles.index,
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
        GROUP_PADDED=group,
        QUERIES=queries,
        BLOCK_ROWS=_BLOCK_ROWS,
        SPLITS=splits,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        OVERLAP=query.is_cuda,
        num_warps=8,
        num_stages=_STAGES,
        launch_pdl=query.is_cuda,
    )
    if splits > 1:
        launch_join_splits(parts, logs, out)
    return out
