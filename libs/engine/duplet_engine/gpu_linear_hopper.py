"""Hopper's form of `gpu_linear.stream_weights`: the same products, bit for bit, begun earlier.

A program has its first weights, as many blocks as it keeps under way at all, copied into its
shared memory before it waits for the kernel before it. Triton's own form starts its copies after
the wait and can do no more in front of it than ask for weights into the L2 cache; about 3 us of
every border between two kernels went by while they came. Written in Gluon, Triton's lower layer,
because there one says oneself when a copy starts.

What may be read before the wait is told in `gpu_linear`: weights, since nobody writes those once
they are loaded. x is read, and `out` written, behind it.

The copies of x are the copy engine's (the asynchronous proxy's), and x was written by ordinary
stores. Within one kernel a proxy fence would have to stand between the two. Here the border
between two grids does: `griddepcontrol.wait` returns when the grids before have ended and what
they wrote has been performed and is visible to the whole of this grid. Every thread of a program
waits, so the one that starts the copies has waited too. It is what every kernel with such copies
relies on, at an ordinary launch as well; CUTLASS starts them right behind the same wait, as
`stream_weights` does.
"""

from __future__ import annotations

import functools

import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-untyped]
    TensorDescriptor,
)
from triton.language.extra.cuda import (  # type: ignore[import-untyped]
    gdc_launch_dependents,
    gdc_wait,
)

from duplet_engine.gpu_tiles import Tiles


@gluon.jit  # type: ignore[untyped-decorator]
def copy_weights(  # type: ignore[no-untyped-def]
    weight, first, n, at, full, w, slot, wanted, GATED: gl.constexpr
):
    """Start the copy of a block's weights into its slot, where it is `wanted`."""
    TILES: gl.constexpr = 2 if GATED else 1
    tma.async_copy_global_to_shared(
        weight, [first, at], full.index(slot), w.index(slot * TILES), pred=wanted
    )
    if GATED:
        tma.async_copy_global_to_shared(
            weight, [n + first, at], full.index(slot), w.index(slot * TILES + 1), pred=wanted
        )


@gluon.jit  # type: ignore[untyped-decorator]
def early_weights(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    m,
    n,
    k,
    share,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_OUT: gl.constexpr,
    BLOCK_IN: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program (block of n, part): the weights are the product's left side.

    A ring of STAGES slots holds blocks of k. A slot's barrier waits for the bytes of its weights
    and of its x together: they are counted in advance, so the barrier stands from the first copy
    of weights until x, whose copy starts behind the wait, has come as well. Copies beyond a
    tensor's edge bring zeros and count whole.

    Args:
        x: descriptor of bfloat16 [m, k] in blocks [BLOCK_ROWS, BLOCK_IN], zeros outside.
        weight: descriptor of bfloat16 [n, k], or of [2 * n, k] where GATED, in blocks
            [BLOCK_OUT, BLOCK_IN], zeros outside.
        out: float32 [parts, m, n], or bfloat16 [m, n] where GATED.
        share: columns of one part, whole blocks.
    """
    TILES: gl.constexpr = 2 if GATED else 1
    BLOCK_BYTES: gl.constexpr = 2 * BLOCK_IN * (TILES * BLOCK_OUT + BLOCK_ROWS)
    first = gl.program_id(0) * BLOCK_OUT
    part = gl.program_id(1)
    begin = part * share
    count = (gl.minimum(k, begin + share) - begin + BLOCK_IN - 1) // BLOCK_IN

    w = gl.allocate_shared_memory(
        weight.dtype, [STAGES * TILES, BLOCK_OUT, BLOCK_IN], weight.layout
    )
    a = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, BLOCK_IN], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    # The copy engine counts in the barriers, and they were written by ordinary stores.
    fence_async_shared()
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), BLOCK_BYTES, pred=i < count)
        copy_weights(weight, first, n, begin + i * BLOCK_IN, full, w, i, i < count, GATED)
    gdc_wait()
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [0, begin + i * BLOCK_IN], full.index(i), a.index(i), pred=i < count
        )

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_ROWS, 16]
    )
    total = gl.zeros((BLOCK_OUT, BLOCK_ROWS), gl.float32, layout)
    gate = gl.zeros((BLOCK_OUT, BLOCK_ROWS), gl.float32, layout)
    for i in range(count):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        b = a.index(slot).permute((1, 0))
        if GATED:
            gate = warpgroup_mma(w.index(slot * TILES), b, gate, is_async=True)
        total = warpgroup_mma(w.index(slot * TILES + TILES - 1), b, total, is_async=True)
        # Those of the block before have ended: its slot may be written over. Triton puts a
        # barrier of all threads between this and the copies, so they have in every warp.
        if GATED:
            gate, total = warpgroup_mma_wait(num_outstanding=2, deps=(gate, total))
        else:
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        follows = i - 1 + STAGES
        wanted = (i > 0) & (follows < count)
        free = (i + STAGES - 1) % STAGES
        at = begin + follows * BLOCK_IN
        mbarrier.expect(full.index(free), BLOCK_BYTES, pred=wanted)
        copy_weights(weight, first, n, at, full, w, free, wanted, GATED)
        tma.async_copy_global_to_shared(x, [0, at], full.index(free), a.index(free), pred=wanted)
    if GATED:
        gate, total = warpgroup_mma_wait(num_outstanding=0, deps=(gate, total))
        total = gate / (1.0 + gl.exp(-gate)) * total
    else:
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    found = total.to(out.dtype.element_ty)
    row = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, layout))
    column = first + gl.arange(0, BLOCK_OUT, gl.SliceLayout(1, layout))
    place = out + part.to(gl.int64) * m * n + row[None, :] * n + column[:, None]
    real = (row < m)[None, :] & (column < n)[:, None]
    gl.store(place, found, mask=real)


@functools.cache
def shared_layout(rows: int, columns: int) -> gl.NVMMASharedLayout:
    """How a block of bfloat16 [rows, columns] lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def launch_early_weights(x: Tensor, weight: Tensor, tiles: Tiles, gated: bool = False) -> Tensor:
    """Queue `early_weights` on the current stream of a GPU of compute capability 9.0.

    Args:
        x: bfloat16 [m, k], m at most `tiles.rows`; its rows may lie apart, whole 16 bytes.
        weight: bfloat16 [n, k], k a multiple of 8; written at least two kernels earlier.
        tiles: from `choose_tiles`.
        gated: whether the weight's first half gates the second.

    Returns:
        float32 [parts, m, n]; bfloat16 [m, n / 2] where `gated`.
    """
    m, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = tiles.new_out(x, n, gated)
    rows, block = [tiles.rows, tiles.inner], [tiles.out, tiles.inner]
    early_weights[(triton.cdiv(n, tiles.out), tiles.parts)](
        TensorDescriptor.from_tensor(x, rows, shared_layout(*rows)),
        TensorDescriptor.from_tensor(weight, block, shared_layout(*block)),
        out,
        m,
        n,
        k,
        tiles.share(k),
        BLOCK_ROWS=tiles.rows,
        BLOCK_OUT=tiles.out,
        BLOCK_IN=tiles.inner,
        GATED=gated,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        launch_pdl=True,
    )
    return out
