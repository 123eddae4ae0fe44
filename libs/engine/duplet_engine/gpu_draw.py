"""Drawing one entry a row on the GPU, by the rules of `duplet_engine.sampling`.

Logits are sorted as 64-bit keys: the float's bits in an order that integers keep, and below them
the entry, so that equal logits keep their order and the sorted keys still say whose they are.
Noise is the same hash of (seed, position, column, entry) as on the CPU; its logarithms, scores
and probabilities are float32, so a draw differs only where two scores are within about 1e-5, or
a sum of probabilities and top_p within about 1e-6.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_core.errors import require
from duplet_engine.gpu_state import StreamState
from duplet_engine.sampling import LONGEST_WINDOW, REDRAW_TEMPERATURE, REDRAW_TOP_P

MOST_ENTRIES = 8192
"""A program sorts a row's logits in its registers."""


@triton.jit  # type: ignore[untyped-decorator]
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel(seed, position, COLUMN: tl.constexpr, entry):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise, float32, of uint64 arguments that broadcast."""
    row_key = _mix(_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15)
    column = tl.full((1,), COLUMN + 1, tl.uint64)
    draw_key = _mix(row_key + column * 0x9E3779B97F4A7C15)
    bits = _mix(draw_key + (entry + 1) * 0x9E3779B97F4A7C15) >> 12
    below = (bits.to(tl.float32) + 0.5) * 2.0**-52
    # The distance to 1, exactly: float32 could not tell uniforms near 1 apart.
    above = (((1 << 52) - 1 - bits.to(tl.int64)).to(tl.float32) + 0.5) * 2.0**-52
    near_one = above * (1.0 + above * (1 / 2 + above * (1 / 3 + above * 0.25)))
    below = tl.minimum(below, 1.0 - 2.0**-24)
    return -tl.log(tl.where(above < 2.0**-6, near_one, -tl.log(below)))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(cumulative, value, entry, rank, top_p, top_k, temperature, noise):  # type: ignore[no-untyped-def]
    """The entry with the largest score among those that the filters keep."""
    total = tl.max(cumulative, axis=0)
    keep = (cumulative <= top_p * total) & ((rank < top_k) | (top_k == 0))
    keep = keep | (rank == 0)
    greedy = temperature == 0.0
    scores = value / tl.where(greedy, 1.0, temperature) + noise
    scores = tl.where(keep, scores, float("-inf"))
    best = tl.where(greedy, 0, tl.argmax(scores, axis=0))
    return tl.sum(tl.where(rank == best, entry, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def draw_entry(  # type: ignore[no-untyped-def]
    logits,
    slots,
    seeds,
    positions,
    temperatures,
    top_ps,
    top_ks,
    windows,
    recent,
    drawn,
    codes,
    broken,
    logits_stride,
    codes_stride,
    stop_index,
    redraw_temperature,
    redraw_top_p,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMN: tl.constexpr,
    REDRAW_COLUMN: tl.constexpr,
    WINDOW: tl.constexpr,
    CODES: tl.constexpr,
):
    """Program (row). REDRAW_COLUMN says that the draw is column 0, repetition-aware.

    Args:
        logits: float32 [m, logits_stride].
        slots: int32 [m]; the other arguments are StreamState's.
        drawn: int32 [m], written for column 0.
        codes: int32 [m, codes_stride]; element COLUMN - 1 is written, for column 0 the first one
            with the entry, at most CODES - 1.
        broken: int32 [m], written for column 0: 1 where a logit is not finite.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = (tl.load(positions + slot) + 1).to(tl.uint64)
    seed = tl.load(seeds + slot).to(tl.uint64, bitcast=True)
    temperature = tl.load(temperatures + slot)
    top_p = tl.load(top_ps + slot)
    top_k = tl.load(top_ks + slot)

    rank = tl.arange(0, BLOCK)
    value = tl.load(
        logits + row.to(tl.int64) * logits_stride + rank, mask=rank < ENTRIES, other=float("-inf")
    )
    if REDRAW_COLUMN > 0:
        finite = (rank >= ENTRIES) | (tl.abs(value) < float("inf"))
        tl.store(broken + row, tl.where(tl.min(finite.to(tl.int32), axis=0) == 1, 0, 1))
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - rank).to(tl.int64)
    key = tl.sort(key, descending=True)
    entry = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    bits = (key >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)

    top = tl.max(value, axis=0)
    cumulative = tl.cumsum(tl.exp(value - top), axis=0)
    noise = _gumbel(seed, position, COLUMN, entry.to(tl.uint64))
    chosen = _choose(cumulative, value, entry, rank, top_p, top_k, temperature, noise)
    # Without a number among the logits the choice means nothing, but it is looked up.
    chosen = tl.minimum(chosen, ENTRIES - 1)
    if REDRAW_COLUMN > 0:
        window = tl.load(windows + slot)
        past = tl.arange(0, WINDOW)
        age = (position.to(tl.int32) - 1 - past) & (WINDOW - 1)
        same = (tl.load(recent + slot * WINDOW + past) == chosen) & (age < window)
        again = (tl.max(same.to(tl.int32), axis=0) == 1) & (chosen != stop_index)
        if again & (temperature > 0.0):
            noise = _gumbel(seed, position, REDRAW_COLUMN, entry.to(tl.uint64))
            chosen = _choose(
                cumulative, value, entry, rank, redraw_top_p, top_k, redraw_temperature, noise
            )
            chosen = tl.minimum(chosen, ENTRIES - 1)
        tl.store(drawn + row, chosen)
        tl.store(codes + row * codes_stride, tl.minimum(chosen, CODES - 1))
    else:
        tl.store(codes + row * codes_stride + COLUMN - 1, chosen)


def launch_draw(
    logits: Tensor,
    entries: int,
    state: StreamState,
    slots: Tensor,
    column: int,
    drawn: Tensor,
    codes: Tensor,
    broken: Tensor,
    stop_index: int,
    code_entries: int,
) -> None:
    """Queue one draw a row on the current stream; see `draw_entry`.

    Args:
        logits: float32 [m, at least `entries`].
        entries: entries to choose from, at most MOST_ENTRIES.
        column: 0 for the token, which is drawn again when it repeats; else the code's column.
    """
    require(entries <= MOST_ENTRIES, f"a draw among {entries} entries")
    block = triton.next_power_of_2(entries)
    draw_entry[(logits.shape[0],)](
        logits,
        slots,
        state.seeds,
        state.positions,
        state.temperature,
        state.top_p,
        state.top_k,
        state.window,
        state.recent,
        drawn,
        codes,
        broken,
        logits.stride(0),
        codes.stride(0),
        stop_index,
        REDRAW_TEMPERATURE,
        REDRAW_TOP_P,
        ENTRIES=entries,
        BLOCK=block,
        COLUMN=column,
        REDRAW_COLUMN=0 if column else codes.shape[1] + 1,
        WINDOW=LONGEST_WINDOW,
        CODES=code_entries,
        num_warps=max(1, min(16, block // 256)),
    )
