"""Products with few rows: the weights stream past once, cut so that every multiprocessor reads.

    out[part] = x[:, part] @ weight[:, part].T,    the parts dividing k

The parts are summed by the kernel that reads the product next, in float32. Of a weight whose
first half gates the second, in one part:

    out = silu(x @ gate.T) * (x @ up.T)

Products with many rows, of other shapes or in float32 are cuBLAS's, in one part.

A step's kernels overlap at their borders: each may be launched before the one before it has
ended. It first waits until that one has, and only then lets the next be launched, so that no
kernel writes, or reads what others write, before all that were queued earlier are through with it.
Before it waits it may read what stands still: weights, which nobody writes, and what was written
at least two kernels earlier, as the rows' places are: while a kernel waits for the one before it,
all that were queued before that one have ended. A product asks for its first weights then, so
that they are near, in the GPU's L2 cache, when it begins; on Hopper it has them copied into its
shared memory (`gpu_linear_hopper`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

from duplet_engine.gpu_linear_hopper import launch_early_weights
from duplet_engine.gpu_tiles import Gpu, Tiles, choose_tiles

Launch = Callable[[Tensor, Tensor, Tiles, bool], Tensor]
"""Queues a product of x, its weight, tiles and whether it is gated, as `launch_stream_weights`."""

_MOST_ROWS = 128
"""With more rows cuBLAS was as fast for S2-Pro's shapes on an H200."""
_AHEAD_BYTES = 32 * 1024
"""Of its weights, what a program asks for before it waits. With three times as much a block of
S2-Pro's was slower on an H200: what follows queues behind it."""


@triton.jit
def follow():  # type: ignore[no-untyped-def]
    """Wait until the kernel before this one has ended; then let the next one be launched."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def bring_near(  # type: ignore[no-untyped-def]
    weights, row, rows, k, column, ahead, BLOCK_OUT: tl.constexpr
):
    """Ask for columns of BLOCK_OUT rows from `row` on: `2 * ahead` from `column` on, which are
    bfloat16 and in the matrix [rows, k]; `ahead` is a multiple of 8. Reads nothing."""
    near = tl.minimum(row + tl.arange(0, BLOCK_OUT), rows - 1).to(tl.int64)[:, None] * k
    half = tl.minimum(column, k - 2 * ahead) + tl.arange(0, 2)[None, :] * ahead
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [weights + near + half, 2 * ahead],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def stream_weights(  # type: ignore[no-untyped-def]
    x,
    weight,
    weights,
    out,
    m,
    n,
    k,
    share,
    ahead,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (block of n, part): the weights are the product's left side.

    Args:
        x: descriptor of [m, k] in blocks [BLOCK_ROWS, BLOCK_IN], zeros outside.
        weight: descriptor of [n, k], or of [2 * n, k] where GATED, in blocks
            [BLOCK_OUT, BLOCK_IN], zeros outside.
        weights: the same one's memory.
        out: float32 [parts, m, n], or [m, n] of x's dtype where GATED.
        share: columns of one part, whole blocks.
        ahead: half of the columns that are asked for before the program waits.
    """
    first = tl.program_id(0) * BLOCK_OUT
    part = tl.program_id(1)
    if OVERLAP:
        if ahead > 0:
            bring_near(weights, first, n, k, part * share, ahead, BLOCK_OUT)
            if GATED:
                bring_near(weights, n + first, 2 * n, k, part * share, ahead, BLOCK_OUT)
        follow()
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    gate = total
    for at in range(part * share, tl.minimum(k, (part + 1) * share), BLOCK_IN):
        a = tl.trans(x.load([0, at]))
        w = weight.load([first, at])
        if GATED:
            gate = tl.dot(w, a, gate)
            w = weight.load([n + first, at])
        total = tl.dot(w, a, total)
    if GATED:
        total = gate / (1.0 + tl.exp(-gate)) * total
    row = tl.arange(0, BLOCK_ROWS)
    column = first + tl.arange(0, BLOCK_OUT)
    place = out + part.to(tl.int64) * m * n + row[:, None] * n + column[None, :]
    real = (row < m)[:, None] & (column < n)[None, :]
    tl.store(place, tl.trans(total).to(out.dtype.element_ty), mask=real)


def columns_ahead(share: int, k: int, rows: int) -> int:
    """Half of the columns that a program asks for of each of its `rows` rows: `_AHEAD_BYTES` of
    bfloat16 in all, no more than its part's `share` of `k`, in pieces of 16 bytes."""
    return min(_AHEAD_BYTES // (2 * rows), share, k) // 16 * 8


def streams(x: Tensor, weight: Tensor) -> bool:
    """Whether a product's weights are streamed; the copies take whole 16 bytes."""
    return x.shape[0] <= _MOST_ROWS and x.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0


def launcher_of(gpu: Gpu) -> Launch:
    """What streams weights on a GPU. `early_weights` multiplies with wgmma, which compute
    capability 9.0 has and no other, before or since; it needs Triton 3.6 or newer."""
    return launch_early_weights if gpu.capability == (9, 0) else launch_stream_weights


def stream(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
    """Queue a product that `streams` on the current stream, in the form of the GPU at hand.

    Args, result: as of `launch_stream_weights`.
    """
    gpu = Gpu.of(x)
    n, k = weight.shape
    tiles = choose_tiles(x.shape[0], n, k, gpu, gated=gated)
    return launcher_of(gpu)(x, weight, tiles, gated)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Queue a product on the current stream.

    Args:
        x: [m, k].
        weight: [n, k] of the same dtype.

    Returns:
        [parts, m, n]: float32 where the weights were streamed, one part in x's dtype where not.
    """
    if not streams(x, weight):
        return torch.mm(x, weight.t())[None]
    return stream(x, weight)


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Float32 logits [parts, m, n] of `hidden` [m, k] and an output `weight` [n, k]."""
    if streams(hidden, weight) or hidden.dtype == torch.float32:
        return linear(hidden, weight)
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)[None]


def launch_stream_weights(x: Tensor, weight: Tensor, tiles: Tiles, gated: bool = False) -> Tensor:
    """Queue `stream_weights` on the current stream.

    Args:
        x: [m, k], m at most `tiles.rows`; its rows may lie apart, whole 16 bytes.
        weight: [n, k] of the same dtype, written at least two kernels earlier.
        tiles: from `choose_tiles`.
        gated: whether the weight's first half gates the second.

    Returns:
        float32 [parts, m, n]; [m, n / 2] in x's dtype where `gated`.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = tiles.new_out(x, n, gated)
    share = tiles.share(k)
    stream_weights[(triton.cdiv(n, tiles.out), tiles.parts)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.inner]),
        TensorDescriptor.from_tensor(weight, [tiles.out, tiles.inner]),
        weight,
        out,
        m,
        n,
        k,
        share,
        columns_ahead(share, k, tiles.out * (2 if gated else 1)),
        BLOCK_ROWS=tiles.rows,
        BLOCK_OUT=tiles.out,
        BLOCK_IN=tiles.inner,
        GATED=gated,
        OVERLAP=x.is_cuda,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=x.is_cuda,
    )
    return out
