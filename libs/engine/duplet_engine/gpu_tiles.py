"""How a product with few rows is cut for the GPU that it runs on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

_MOST_STAGES = 8
_MOST_PARTS = 8
_LEAST_BLOCKS = 4
"""Blocks of k in a part."""
_ROOMY_BYTES = 200 * 1024
"""Shared memory from which on a gated product of many rows is cut into large blocks."""
_SPARE_BYTES = 1024
"""Of a program's shared memory, left for barriers."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a product is cut for."""

    processors: int
    """Multiprocessors."""
    shared_bytes: int
    """Shared memory that one program may have."""
    capability: tuple[int, int]
    """Compute capability: (9, 0) is Hopper."""

    @staticmethod
    def of(x: Tensor) -> Gpu:
        """The one that a tensor is on."""
        return _gpu(x.device.index)


@functools.cache
def _gpu(ordinal: int) -> Gpu:
    """Asked once: the driver takes a millisecond to answer, and a pass has 150 products."""
    found = triton.runtime.driver.active.utils.get_device_properties(ordinal)
    capability = torch.cuda.get_device_capability(ordinal)
    return Gpu(int(found["multiprocessor_count"]), int(found["max_shared_mem"]), capability)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut."""

    rows: int
    """Of x, padded to a power of two, at least 16."""
    out: int
    """Rows of the weight that a program takes, and as many of the other half where it is gated."""
    inner: int
    """Columns of one block of k."""
    parts: int
    stages: int
    """Blocks of k that are under way at a time."""
    warps: int

    def share(self, k: int) -> int:
        """Columns of one part of `k`, whole blocks."""
        return int(triton.cdiv(triton.cdiv(k, self.inner), self.parts)) * self.inner

    def new_out(self, x: Tensor, n: int, gated: bool) -> Tensor:
        """What a product of x [m, k] is written to: float32 [parts, m, n]; [m, n] in x's dtype
        where `gated`."""
        if gated:
            return x.new_empty(x.shape[0], n)
        return x.new_empty(self.parts, x.shape[0], n, dtype=torch.float32)


def choose_tiles(
    m: int,
    n: int,
    k: int,
    gpu: Gpu,
    *,
    gated: bool = False,
) -> Tiles:
    """The cut that was fastest for S2-Pro's shapes on an H200, alone and within a block.

    A weight with few rows is cut into as many parts as there are processors for. One with more
    is read by two programs a processor, that one may read while the other begins or ends, where
    that was seen to help: with up to 16 rows of x, and with 33 to 64.

    Args:
        m: rows of x, at most 128. n: rows of the weight. k: columns.
        gpu: what it is cut for.
        gated: whether the weight's first half gates the second.
    """
    rows = max(16, triton.next_power_of_2(m))
    out, inner = 64, 128
    blocks = triton.cdiv(n // 2 if gated else n, out)
    beside = 2 if 2 * blocks > gpu.processors and rows in (16, 64) else 1
    if gated:
        parts = 1
        if rows == 128 and gpu.shared_bytes >= _ROOMY_BYTES:
            out = 128
    else:
        parts = min(beside * gpu.processors // blocks, k // inner // _LEAST_BLOCKS, _MOST_PARTS)
    if (gated and rows >= 64) or (parts > 1 and beside == 1 and rows == 64):
        inner = 64
    block_bytes = 2 * inner * (rows + (2 * out if gated else out))
    stages = (gpu.shared_bytes // beside - _SPARE_BYTES) // block_bytes
    warps = 8 if out == 128 else 4
    return Tiles(rows, out, inner, max(1, parts), max(2, min(_MOST_STAGES, stages)), warps)
