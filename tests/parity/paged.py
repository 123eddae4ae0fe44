"""Stream and logits of an engine's model over paged KV, however the rows are cut and batched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duplet_engine.arithmetic import ROW_TILE
from duplet_engine.attention import QUERY_TILE, ChunkAttention, StepAttention
from duplet_engine.kv_store import KvStore
from duplet_engine.model import DualAr
from duplet_memory.layout import describe_pool
from duplet_memory.pool import create_pool
from duplet_pages.engine_config import Arrangement

PAGE_ROWS = 16


class PagedModel:
    """A model over a pool of its own. Owns the pool until `close`."""

    def __init__(self, model: DualAr, dtype: str, arrangement: Arrangement = "page-major") -> None:
        backbone = model.config.backbone
        self.model = model
        self._pool = create_pool(
            describe_pool(
                layers=backbone.layers,
                page_rows=PAGE_ROWS,
                kv_heads=backbone.kv_heads,
                head_dim=backbone.head_dim,
                dtype=dtype,
                pages=128,
                arrangement=arrangement,
            )
        )
        self._store: KvStore | None = KvStore(self._pool)

    @property
    def store(self) -> KvStore:
        assert self._store is not None
        return self._store

    def chunk(self, rows: Tensor, pages: Sequence[int], start: int, end: int) -> Tensor:
        """The stream at rows [start, end) of a sequence whose earlier rows are in the pool."""
        count = end - start
        padded = -(-count // QUERY_TILE) * QUERY_TILE
        index = torch.arange(start, start + padded).clamp_max(end - 1)
        attend = ChunkAttention(self.store, torch.tensor(list(pages)), start, count)
        return self.model.forward(rows[index], index, attend)[:count]

    def chunks(self, rows: Tensor, pages: Sequence[int], cuts: Sequence[int]) -> Tensor:
        """The stream of the whole sequence, computed up to each of `cuts` in turn."""
        starts = [0, *cuts]
        ends = [*cuts, len(rows)]
        parts = [self.chunk(rows, pages, s, e) for s, e in zip(starts, ends, strict=True)]
        return torch.cat(parts)

    def step(self, rows: Sequence[Tensor], pages: Sequence[Sequence[int]]) -> Tensor:
        """The stream at the newest row of each of several sequences: one decode step."""
        count = len(rows)
        padded = -(-count // ROW_TILE) * ROW_TILE
        longest = 128 // PAGE_ROWS * 4
        tables = torch.zeros(padded, longest, dtype=torch.int64)
        newest = torch.zeros(padded, rows[0].shape[1], dtype=torch.int64)
        positions = torch.zeros(padded, dtype=torch.int64)
        for index, (sequence, owned) in enumerate(zip(rows, pages, strict=True)):
            tables[index, : len(owned)] = torch.tensor(list(owned))
            newest[index] = sequence[-1]
            positions[index] = len(sequence) - 1
        attend = StepAttention(self.store, tables, positions, count)
        return self.model.forward(newest, positions, attend)[:count]

    def logits(self, stream: Tensor) -> Tensor:
        """float32 [n, drawable ids] of a stream [n, width]."""
        count = len(stream)
        padded = torch.cat((stream, stream.new_zeros(-count % ROW_TILE, stream.shape[1])))
        return self.model.token_logits(padded)[:count, : len(self.model.config.drawable_ids)]

    def close(self) -> None:
        self._store = None
        self._pool.close()
