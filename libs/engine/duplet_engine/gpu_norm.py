"""Add a block's output to the stream and normalise the sum, in float32.

x += sum_s delta[s]          out = x / sqrt(mean(x^2) + eps) * weight
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_linear import follow


@triton.jit  # type: ignore[untyped-decorator]
def add_norm(  # type: ignore[no-untyped-def]
    x,
    delta,
    weight,
    out,
    part_stride,
    width,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row); `delta` is [PARTS, rows, width], nothing is added where PARTS is 0."""
    row = tl.program_id(0).to(tl.int64)
    item = tl.arange(0, BLOCK)
    mask = item < width
    scaled = tl.load(weight + item, mask=mask, other=0.0).to(tl.float32)
    if OVERLAP:
        follow()
    value = tl.load(x + row * width + item, mask=mask, other=0.0)
    for part in tl.static_range(PARTS):
        place = part * part_stride + row * width + item
        value += tl.load(delta + place, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        tl.store(x + row * width + item, value, mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normal = value * scale * scaled
    tl.store(out + row * width + item, normal.to(out.dtype.element_ty), mask=mask)


def launch_add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Queue it on the current stream.

    Args:
        x: float32 [m, width], the stream; written.
        delta: [parts, m, width], or None to normalise only.
        weight: [width]; the result has its dtype.

    Returns:
        [m, width]
    """
    m, width = x.shape
    out = weight.new_empty(m, width)
    block = triton.next_power_of_2(width)
    add_norm[(m,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        x.numel(),
        width,
        eps,
        PARTS=0 if delta is None else delta.shape[0],
        BLOCK=block,
        OVERLAP=x.is_cuda,
        num_warps=max(1, min(8, block // 512)),
        launch_pdl=x.is_cuda,
    )
    return out
