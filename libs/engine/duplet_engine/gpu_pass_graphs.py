"""Passes over few rows as CUDA graphs: behind a cached prefix the GPU computes some hundred
kernels faster than the host could queue them one by one.

A pass of n rows replays the graph of the smallest size that holds n. The rows that pad it are one
more span, of negative positions: they are stored nowhere and see nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplet_engine.gpu_attend_chunk import (
    ChunkTiles,
    choose_chunk_splits,
    cut_tiles,
    launch_attend_chunk,
)
from duplet_engine.gpu_graphs import BucketGraphs, Work
from duplet_engine.gpu_heads import Places
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_model import GpuModel

Span = tuple[int, int, int]
"""Some rows of one prompt: its table, the position of the first one, how many."""

_SIZES = (16, 32, 64, 128, *range(144, 257, 16), *range(288, 513, 32))
MOST_ROWS = _SIZES[-1]
"""On an H200 the host takes longer to queue the kernels of so many rows than the GPU to run
them."""


def sizes_up_to(most_rows: int) -> tuple[int, ...]:
    """Rows of each graph where passes have `most_rows` at most, ascending."""
    return (*(size for size in _SIZES if size < most_rows), min(most_rows, MOST_ROWS))


@dataclass(frozen=True, slots=True)
class PassArrays:
    """Everything that a pass is told, int32 in one piece of memory, so that one copy brings it
    all. Views; on the host or on the device."""

    rows: Tensor
    """[rows, columns]."""
    tables: Tensor
    """[prompts, pages]."""
    table_index: Tensor
    """[rows], of each row."""
    positions: Tensor
    """[rows]; negative where a row pads."""
    tiles: Tensor
    """[tiles, 4], see ChunkTiles; without rows where a tile pads."""

    @staticmethod
    def within(packed: Tensor, rows: int, columns: int, prompts: int, pages: int) -> PassArrays:
        """Views of `packed`; the tiles are what is left of it."""
        sizes = [rows * columns, prompts * pages, rows, rows]
        parts = packed.split([*sizes, packed.numel() - sum(sizes)])
        return PassArrays(
            parts[0].view(rows, columns),
            parts[1].view(prompts, pages),
            parts[2],
            parts[3],
            parts[4].view(-1, 4),
        )


class PassGraphs:
    """The graphs of a model's small passes over one pool. Owns them; borrows both."""

    def __init__(
        self,
        model: GpuModel,
        kv: PagedKv,
        prompts: int,
        pages: int,
        most_rows: int,
        processors: int,
    ) -> None:
        """Capture on the current device; nothing else may be queued on it meanwhile.

        Args:
            model: the model.
            kv: of the pool.
            prompts: most of one pass. pages: of a prompt's table.
            most_rows: of any pass.
            processors: multiprocessors of the GPU.
        """
        self._model = model
        self._kv = kv
        self._prompts = prompts
        self._pages = pages
        self._processors = processors
        backbone = model.config.backbone
        self._heads = backbone.heads, backbone.kv_heads
        self._tile_rows = ChunkTiles.rows_of_a_tile(*self._heads)
        self._graphs = BucketGraphs(sizes_up_to(most_rows), self._make)

    def holds(self, count: int) -> bool:
        """Whether a pass of `count` rows has a graph."""
        return count <= self._graphs.most_rows

    def replay(self, rows: Tensor, tables: Tensor, spans: Sequence[Span]) -> Tensor:
        """Queue a pass on the current stream; never waits.

        Args:
            rows: int32 [m, columns], on the host, those of the spans one after the other.
            tables: int32 [prompts, pages], on the host.
            spans: of the rows.

        Returns:
            Hidden states [m, width], overwritten by the next replay.
        """
        count = rows.shape[0]
        size = self._graphs.bucket(count)
        packed = self._pack(size, spans)
        arrays = self._arrays(packed, size)
        arrays.rows[:count] = rows
        arrays.tables.copy_(tables)
        return self._graphs.replay_in(size, packed.pin_memory())[:count]

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._graphs.close()

    def _pack(self, size: int, spans: Sequence[Span]) -> Tensor:
        """Where a pass's rows stand, on the host; rows and tables are zeros."""
        padding = size - sum(count for _, _, count in spans)
        spans = [*spans, (0, -padding, padding)]
        # Each span may end in a tile that is not full.
        tiles = size // self._tile_rows + self._prompts + 1
        items = size * (self._model.config.columns + 2) + self._prompts * self._pages + 4 * tiles
        packed = torch.zeros(items, dtype=torch.int32)
        arrays = self._arrays(packed, size)
        index, positions = place_spans(spans)
        arrays.table_index.copy_(index)
        arrays.positions.copy_(positions)
        cut = cut_tiles(spans, self._tile_rows)
        arrays.tiles[: cut.shape[0]] = cut
        return packed

    def _arrays(self, packed: Tensor, size: int) -> PassArrays:
        columns = self._model.config.columns
        return PassArrays.within(packed, size, columns, self._prompts, self._pages)

    def _make(self, size: int) -> tuple[Work, Tensor]:
        heads, kv_heads = self._heads
        splits = choose_chunk_splits(size, heads, kv_heads, self._processors)

        def work(packed: Tensor) -> Tensor:
            given = self._arrays(packed, size)
            tiles = ChunkTiles(given.tiles, self._tile_rows)
            places = Places(given.tables, given.table_index, given.positions)

            def attend(layer: int, query: Tensor) -> Tensor:
                return launch_attend_chunk(
                    query, self._kv, layer, given.tables, tiles, heads, splits
                )

            return self._model.forward(given.rows, self._kv, places, attend)

        return work, self._pack(size, ()).to(self._model.device)


def place_spans(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Each row's table and position, int32 on the host."""
    counts = [count for _, _, count in spans]
    index = np.repeat(np.array([table for table, _, _ in spans], np.int32), counts)
    positions = [np.arange(first, first + count, dtype=np.int32) for _, first, count in spans]
    return torch.from_numpy(index), torch.from_numpy(np.concatenate(positions))
