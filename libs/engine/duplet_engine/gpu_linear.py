"""Products with few rows: the weights stream past once, cut so that every multiprocessor reads.

    out[part] = x[:, part] @ weight[:, part].T,    the parts dividing k

The parts are summed by the kernel that reads the product next, in float32. Products with many
rows, of other shapes or in float32 are cuBLAS's, in one part.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

MOST_ROWS = 16
"""With more rows cuBLAS was faster for S2-Pro's shapes on an H200: at 64 rows 77 us a block
against 83, at 128 rows 80 against 106; with one row 74 against 62."""
BLOCK_OUT = 64
BLOCK_IN = 128
_WARPS = 4
_LEAST_BLOCKS = 4
"""Blocks of k in a part."""


@triton.jit  # type: ignore[untyped-decorator]
def stream_weights(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    m,
    n,
    k,
    share,
    part_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Program (block of n, part): the weights are the product's left side.

    Args:
        x: [m, k]. weight: [n, k], n whole blocks, k whole blocks. out: float32 [parts, m, n].
        share: columns of one part, whole blocks.
    """
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    part = tl.program_id(1)
    inner = tl.arange(0, BLOCK_IN)
    x_place = x + row[:, None] * k + inner[None, :]
    w_place = weight + column.to(tl.int64)[:, None] * k + inner[None, :]
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for start in range(part * share, tl.minimum(k, (part + 1) * share), BLOCK_IN):
        w = tl.load(w_place + start, eviction_policy="evict_first")
        a = tl.load(x_place + start, mask=(row < m)[:, None], other=0.0)
        total = tl.dot(w, tl.trans(a), total)
    place = out + part * part_stride + row[:, None] * n + column[None, :]
    tl.store(place, tl.trans(total), mask=(row < m)[:, None])


def choose_parts(n: int, k: int, processors: int) -> int:
    """Parts of k, a power of two, so that every processor has a program and each program a few
    blocks to read ahead."""
    parts = 1
    while n // BLOCK_OUT * parts < processors and k // BLOCK_IN // (2 * parts) >= _LEAST_BLOCKS:
        parts *= 2
    return parts


def linear(x: Tensor, weight: Tensor, processors: int) -> Tensor:
    """Queue a product on the current stream.

    Args:
        x: [m, k].
        weight: [n, k] of the same dtype.
        processors: multiprocessors of the GPU.

    Returns:
        [parts, m, n]: float32 where the weights were streamed, one part in x's dtype where not.
    """
    m, k = x.shape
    n = weight.shape[0]
    if m > MOST_ROWS or n % BLOCK_OUT or k % BLOCK_IN or x.dtype != torch.bfloat16:
        return torch.mm(x, weight.t())[None]
    return launch_stream_weights(x, weight, choose_parts(n, k, processors))


def launch_stream_weights(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Queue `stream_weights` on the current stream.

    Args:
        x: [m, k], m at most MOST_ROWS.
        weight: [n, k] of the same dtype, n and k whole blocks.
        parts: of k, from `choose_parts`.

    Returns:
        float32 [parts, m, n]
    """
    m, k = x.shape
    n = weight.shape[0]
    share = triton.cdiv(k // BLOCK_IN, parts) * BLOCK_IN
    out = x.new_empty(parts, m, n, dtype=torch.float32)
    stream_weights[(n // BLOCK_OUT, parts)](
        x,
        weight,
        out,
        m,
        n,
        k,
        share,
        m * n,
        BLOCK_ROWS=MOST_ROWS,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=BLOCK_IN,
        num_warps=_WARPS,
        # Several programs share a processor where k is not cut, and its memory.
        num_stages=3 if parts == 1 else 4,
    )
    return out


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Float32 logits [m, n] of `hidden` [m, k] and an output `weight` [n, k]."""
    if hidden.dtype == torch.float32:
        return torch.mm(hidden, weight.t())
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
