"""The feed-forward's first product with its gate: `silu(x @ gate.T) * (x @ up.T)`, in float32.

With few rows one kernel does both, with many cuBLAS's product goes through memory in x's dtype.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_linear import follow, stream, streams

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def swiglu(  # type: ignore[no-untyped-def]
    both, out, mlp, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Program (row, block of columns); `both` is [rows, 2 * mlp], the gate first."""
    if OVERLAP:
        follow()
    row = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = item < mlp
    place = both + row * 2 * mlp + item
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + mlp, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * mlp + item, value.to(out.dtype.element_ty), mask=mask)


def launch_swiglu(both: Tensor) -> Tensor:
    """Queue it on the current stream: `both` [m, 2 * mlp] gives [m, mlp] of its dtype."""
    m, twice = both.shape
    out = both.new_empty(m, twice // 2)
    grid = (m, triton.cdiv(twice // 2, _BLOCK))
    swiglu[grid](
        both,
        out,
        twice // 2,
        BLOCK=_BLOCK,
        OVERLAP=both.is_cuda,
        num_warps=4,
        launch_pdl=both.is_cuda,
    )
    return out


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Queue the product and its gate on the current stream.

    Args:
        x: [m, k].
        weight: [2 * mlp, k] of the same dtype, the gate's rows first.

    Returns:
        [m, mlp] in x's dtype.
    """
    if not streams(x, weight):
        return launch_swiglu(torch.mm(x, weight.t()))
    return stream(x, weight, gated=True)
