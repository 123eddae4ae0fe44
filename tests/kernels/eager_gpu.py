"""A GPU engine on the CPU: kernels in Triton's interpreter, streams and events that are always
done, graphs that run their work again. For the order and the addresses of things, not for time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from duplet_engine import gpu_engine, gpu_graphs, gpu_passes
from duplet_engine.checkpoint import load_checkpoint
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.shapes import SHAPES
from duplet_engine.tiny import TINY
from duplet_memory.layout import PoolDescription
from duplet_pages.engine_config import EngineConfig
from tests.engine import company

_PROCESSORS = 2
SMALL = replace(
    TINY,
    name="random:interpreted",
    backbone=replace(TINY.backbone, layers=2),
    codebooks=2,
    codebook_sizes=(256, 64),
)
"""A model for the interpreter, which takes its time."""
OTHER = replace(
    SMALL,
    name="random:interpreted-other",
    tied_head=False,
    hidden_after_norm=False,
    scaled_embeddings=False,
)
"""With what tells S1-mini from S2-Pro."""
_MEMORY_BYTES = 8 << 30


class _Mark:
    def __init__(self, **_options: Any) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 1.0


class _Stream:
    def __init__(self, **_options: Any) -> None: ...
    def wait_event(self, _event: Any) -> None: ...


class _EagerGraph:
    def __init__(
        self, work: Callable[[Tensor], Tensor], given: Tensor, _pool: Any, _stream: Any
    ) -> None:
        self._work, self._given = work, given

    def replay(self, given: Tensor) -> Tensor:
        self._given[: given.shape[0]].copy_(given)
        return self._work(self._given)


class _MemoryPool(np.ndarray):
    """What torch takes for a pool."""

    description: PoolDescription
    fd = -1

    def close(self) -> None: ...


def _make_pool(description: PoolDescription, _handle: str, _device: Any) -> _MemoryPool:
    pool = np.zeros(description.total_bytes, np.uint8).view(_MemoryPool)
    pool.description = description
    return pool


def _unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def without_pinning(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*sizes, **options)

    return without_pinning


@contextmanager
def eager_gpu() -> Iterator[None]:
    """What the engine asks of CUDA is answered by the CPU while the context lasts."""
    cuda: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=_PROCESSORS),
        "get_device_capability": lambda _: (0, 0),
        "Event": _Mark,
        "Stream": _Stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: 0,
        "mem_get_info": lambda: (_MEMORY_BYTES, _MEMORY_BYTES),
        "graph_pool_handle": lambda: None,
    }
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        patch.object(torch, "empty", _unpinned(torch.empty)),
        patch.object(gpu_graphs, "_Captured", _EagerGraph),
        patch.object(gpu_passes, "_WARM_ROWS", ()),
        patch.dict(SHAPES, {"interpreted": SMALL, "interpreted-other": OTHER}),
        patch.object(company, "TINY", SMALL),
        patch.object(gpu_engine, "create_cuda_pool", _make_pool),
        patch.object(gpu_engine, "open_devices", lambda: (None,)),
    ):
        yield


def eager_engine(config: EngineConfig) -> GpuEngine:
    """An engine of the config's model in float32."""
    model, weights = load_checkpoint(config.model, "cpu", torch.float32, lambda *_: None)
    return GpuEngine(config, model, weights)
