"""How long decode's steps take, timed before Ready: what its admission knows at the first request.

Steps of doubling numbers of streams, at a short and at a long context, up to the first that takes
longer than decode will ever plan. Every stream reads pages of its own, as far as the pool has so
many, so that no cache of the GPU makes contexts cheap. All of them write into page 0 alone, and
nobody knows the pool yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from duplet_core.engine import Start, StepTime
from duplet_core.messages import Sampling
from duplet_engine.model_config import ModelConfig
from duplet_pages.engine_config import EngineConfig

TIMED_STEPS = 3
"""Of each size; what the middle one takes counts. One more, the first, is not timed."""
LONG_ROWS = 2048
"""Of the long context, where the model and the pool have them; the short one has two pages."""
_SAMPLING = Sampling(seed=1, temperature=0.8, top_p=0.9, top_k=30, repetition_window=16)
"""As listeners use it: a draw takes longer than the most probable row."""


class SteppedEngine(Protocol):
    """`duplet_engine.engine.Engine` or `duplet_engine.gpu_engine.GpuEngine`, not prefill's."""

    config: EngineConfig
    model_config: ModelConfig

    def new_batch(self) -> Any: ...
    def decode_step(self, batch: Any) -> tuple[Tensor, Tensor]: ...


def time_steps(engine: SteppedEngine, longest_ns: int) -> tuple[StepTime, ...]:
    """Time steps of a warm engine without streams; takes about a second with a large model.

    Args:
        engine: its pool is nobody else's yet; its former batch's streams are gone.
        longest_ns: of each context, the first size of which a step takes longer is the last one.
    """
    times: list[StepTime] = []
    for pages in contexts(engine.config, engine.model_config.longest_sequence):
        for streams in sizes_up_to(engine.config.slots):
            taken_ns = _time_one(engine, streams, pages)
            times.append(StepTime(streams, streams * pages, taken_ns))
            if taken_ns > longest_ns:
                break
    return tuple(times)


def sizes_up_to(slots: int) -> Iterator[int]:
    """1, 2, 4 and so on, and `slots`."""
    size = 1
    while size < slots:
        yield size
        size *= 2
    yield slots


def contexts(config: EngineConfig, longest_sequence: int) -> tuple[int, ...]:
    """Pages of a stream to be timed with, ascending; none where the timed steps have no room."""
    most = min(longest_sequence // config.page_rows, config.pool_pages)
    found = {min(2, most), min(max(2, LONG_ROWS // config.page_rows), most)}
    return tuple(sorted(pages for pages in found if pages * config.page_rows > 1))


def pages_of(stream: int, count: int, pool_pages: int) -> tuple[int, ...]:
    """`count` pages for one of the streams, each once, in row order; the last one is page 0."""
    others = pool_pages - 1
    return (*(1 + (stream * (count - 1) + k) % others for k in range(count - 1)), 0)


def _time_one(engine: SteppedEngine, streams: int, pages: int) -> int:
    """Nanoseconds of a step of so many streams with so many pages each."""
    config = engine.config
    # In the rows of the last page, which is the one that all of them write.
    steps = min(1 + TIMED_STEPS, config.page_rows, pages * config.page_rows - 1)
    start_row = pages * config.page_rows - steps
    row = np.zeros(engine.model_config.columns, dtype="<i4").tobytes()
    batch = engine.new_batch()
    for seq in range(streams):
        at = pages_of(seq, pages, config.pool_pages)
        batch.join(Start(seq, at, row, start_row, 1 + steps, _SAMPLING))
    taken_ns = []
    for _ in range(steps):
        started_ns = time.monotonic_ns()
        engine.decode_step(batch)
        taken_ns.append(time.monotonic_ns() - started_ns)
    return round(median(taken_ns[1:] or taken_ns))
