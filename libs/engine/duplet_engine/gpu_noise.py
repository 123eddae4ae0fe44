"""Noise of draws on the GPU: the hash of (seed, position, column, entry) that the CPU takes.

See `duplet_engine.sampling.gumbel_noise`; logarithms are float32 here.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def gumbel(seed, position, column, entry):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise, float32, of uint64 arguments that broadcast."""
    row_key = _mix(_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15)
    draw_key = _mix(row_key + (column + 1) * 0x9E3779B97F4A7C15)
    bits = _mix(draw_key + (entry + 1) * 0x9E3779B97F4A7C15) >> 12
    below = (bits.to(tl.float32) + 0.5) * 2.0**-52
    # The distance to 1, exactly: float32 could not tell uniforms near 1 apart.
    above = (((1 << 52) - 1 - bits.to(tl.int64)).to(tl.float32) + 0.5) * 2.0**-52
    near_one = above * (1.0 + above * (1 / 2 + above * (1 / 3 + above * 0.25)))
    below = tl.minimum(below, 1.0 - 2.0**-24)
    return -tl.log(tl.where(above < 2.0**-6, near_one, -tl.log(below)))
