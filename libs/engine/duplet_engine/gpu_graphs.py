"""Decode steps and first draws as CUDA graphs: one launch each, nothing of them on the host.

A graph is captured for each size of batch in `buckets_up_to`; n rows replay the smallest that
holds n. What pads them is the spare slot in a step and whatever stands there in a draw.
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

Work = Callable[[Tensor], Tensor]


def buckets_up_to(slots: int) -> tuple[int, ...]:
    """Sizes of batch for a graph each, ascending; the last one is `slots`."""
    return (*(bucket for bucket in _BUCKETS if bucket < slots), slots)


class _Captured:
    """One graph with the memory that it reads and writes. Owns both."""

    def __init__(self, work: Work, given: Tensor, pool: Any, stream: Any) -> None:
        """Run `work(given)` once on `stream`, for what is built at first use, and then capture it
        there."""
        self.given = given
        # What the graph reads lives as long as the graph.
        self._work = work
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(given)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._result = work(given)

    def replay(self, given: Tensor) -> Tensor:
        """Queue a copy of `given` (pinned, or on the device) and the graph; the result is the
        graph's own and is overwritten by the next replay."""
        self.given[: given.shape[0]].copy_(given, non_blocking=True)
        self._graph.replay()
        return self._result


class BucketGraphs:
    """One work's graphs. Owns them and their memory; borrows what the work reads and writes."""

    def __init__(
        self, buckets: tuple[int, ...], make: Callable[[int], tuple[Work, Tensor]]
    ) -> None:
        """Capture on the current device. Nothing else may be queued on it meanwhile.

        Args:
            buckets: sizes, ascending.
            make: the work of a bucket, and what it is given: a row for each of the bucket's, or
                whatever `replay_in` will be given.
        """
        pool = torch.cuda.graph_pool_handle()
        # Of these graphs alone: cuBLAS has one workspace a stream, captured by its address, and
        # torch may free it when any graph that was captured on that stream is given back.
        stream = torch.cuda.Stream()
        self._buckets = buckets
        # The largest first: the smaller ones then find their memory in the graphs' pool.
        self._captured = {
            bucket: _Captured(*make(bucket), pool, stream) for bucket in reversed(self._buckets)
        }

    @property
    def most_rows(self) -> int:
        """Of the largest bucket."""
        return self._buckets[-1]

    def bucket(self, count: int) -> int:
        """Rows of the graph that takes `count` rows."""
        return next(bucket for bucket in self._buckets if bucket >= count)

    def replay(self, given: Tensor) -> Tensor:
        """Queue the work on `given`; a result row for each of its rows, overwritten by the next
        replay of that bucket."""
        count = given.shape[0]
        return self.replay_in(self.bucket(count), given)[:count]

    def replay_in(self, bucket: int, given: Tensor) -> Tensor:
        """Queue one bucket's work; its whole result, overwritten by the next replay of it."""
        return self._captured[bucket].replay(given)

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._captured.clear()
        gc.collect()
        torch.cuda.empty_cache()


def capture_steps(
    model: GpuModel, state: StreamState, kv: PagedKv, processors: int
) -> BucketGraphs:
    """Graphs of decode steps; they take slots int32 [m], whole buckets, see `GpuModel.step`.

    Args:
        model: the model.
        state: of decode's streams.
        kv: of the pool.
        processors: multiprocessors of the GPU.
    """
    slots = state.positions.shape[0] - 1
    kv_heads = model.config.backbone.kv_heads

    def make(bucket: int) -> tuple[Work, Tensor]:
        splits = choose_splits(bucket, kv_heads, processors)
        spare = torch.full((bucket,), slots, dtype=torch.int32, device=model.device)
        return lambda at: model.step(state, at, kv, splits), spare

    return BucketGraphs(buckets_up_to(slots), make)


def capture_draws(model: GpuModel, first: StreamState) -> BucketGraphs:
    """Graphs of first draws; they take hidden states [m, width] of the slots 0 to m of `first`,
    see `GpuModel.draw_rows`."""
    most = first.positions.shape[0] - 1

    def make(bucket: int) -> tuple[Work, Tensor]:
        slots = torch.arange(bucket, dtype=torch.int32, device=model.device)
        size = (bucket, model.config.backbone.width)
        hidden = torch.zeros(size, dtype=model.dtype, device=model.device)
        return lambda given: model.draw_rows(given, first, slots), hidden

    return BucketGraphs(buckets_up_to(most), make)
