"""`silu(gate) * up` over a product whose first half is the gate: sums of parts in float32."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def swiglu(  # type: ignore[no-untyped-def]
    both, out, part_stride, mlp, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, block of columns); `both` is [PARTS, rows, 2 * mlp]."""
    row = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = item < mlp
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        place = part * part_stride + row * 2 * mlp + item
        gate += tl.load(both + place, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(both + place + mlp, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * mlp + item, value.to(out.dtype.element_ty), mask=mask)


def launch_swiglu(both: Tensor, dtype: torch.dtype) -> Tensor:
    """Queue it on the current stream: `both` [parts, m, 2 * mlp] gives [m, mlp] of `dtype`."""
    parts, m, twice = both.shape
    out = both.new_empty(m, twice // 2, dtype=dtype)
    grid = (m, triton.cdiv(twice // 2, _BLOCK))
    swiglu[grid](both, out, m * twice, twice // 2, PARTS=parts, BLOCK=_BLOCK, num_warps=4)
    return out
