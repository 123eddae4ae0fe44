"""Decode steps and first draws as CUDA graphs: one launch each, nothing of them on the host.

A graph is captured for each size of batch in `buckets_up_to`; a step of n streams replays the
smallest that holds n, padded with the spare slot.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duplet_engine.gpu_attend_step import choose_splits
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_model import GpuModel
from duplet_engine.gpu_state import StreamState

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def buckets_up_to(slots: int) -> tuple[int, ...]:
    """Sizes of batch for a graph each, ascending; the last one is `slots`."""
    return (*(bucket for bucket in _BUCKETS if bucket < slots), slots)


class _Captured:
    """One graph with the memory that it reads and writes. Owns both."""

    def __init__(self, work: Callable[[Tensor], Tensor], given: Tensor, pool: Any) -> None:
        """Run `work(given)` once, for what is built at first use, and then capture it."""
        self.given = given
        # What the graph reads lives as long as the graph.
        self._work = work
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work(given)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._result = work(given)

    def replay(self, given: Tensor) -> Tensor:
        """Queue a copy of `given` (pinned, or on the device) and the graph; the result is the
        graph's own and is overwritten by the next replay."""
        self.given.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._result


class EngineGraphs:
    """All graphs of one engine. Owns them and their memory; borrows model, states and KV."""

    def __init__(
        self,
        model: GpuModel,
        state: StreamState,
        first: StreamState,
        kv: PagedKv,
        processors: int,
    ) -> None:
        """Capture on the current device. Nothing else may be queued on it meanwhile.

        Args:
            model: the model.
            state: of decode's streams.
            first: of one stream, whose row after the prompt is drawn.
            kv: of the pool.
            processors: multiprocessors of the GPU.
        """
        slots = state.positions.shape[0] - 1
        device = state.positions.device
        spare = torch.full((slots,), slots, dtype=torch.int32, device=device)
        pool = torch.cuda.graph_pool_handle()
        kv_heads = model.config.backbone.kv_heads
        self._steps: dict[int, _Captured] = {}
        # The largest first: the smaller ones then find their memory in the graphs' pool.
        for bucket in reversed(buckets_up_to(slots)):
            splits = choose_splits(bucket, kv_heads, processors)

            def step(at: Tensor, splits: int = splits) -> Tensor:
                return model.step(state, at, kv, splits)

            self._steps[bucket] = _Captured(step, spare[:bucket].clone(), pool)
        self._buckets = buckets_up_to(slots)
        only = torch.zeros(1, dtype=torch.int32, device=device)
        hidden = torch.zeros((1, model.config.backbone.width), dtype=model.dtype, device=device)
        self._first = _Captured(lambda at: model.draw_rows(at, first, only), hidden, pool)

    def bucket(self, count: int) -> int:
        """Rows of the graph that takes a step of `count` streams."""
        return next(bucket for bucket in self._buckets if bucket >= count)

    def step(self, slots: Tensor) -> Tensor:
        """Queue a step of a bucket's `slots`, int32 pinned; see `GpuModel.step`. The result is
        overwritten by the next step of that bucket."""
        return self._steps[slots.shape[0]].replay(slots)

    def draw_first(self, hidden: Tensor) -> Tensor:
        """Queue the draw of the first output row from `hidden` [1, width]; see `draw_rows`."""
        return self._first.replay(hidden)

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._steps.clear()
        del self._first
        gc.collect()
        torch.cuda.empty_cache()
