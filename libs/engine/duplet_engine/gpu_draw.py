"""Drawing one entry a row on the GPU, by the rules of `duplet_engine.sampling`.

Logits are sorted as 64-bit keys: the float's bits in an order that integers keep, and below them
the entry, so that equal logits keep their order and the sorted keys still say whose they are.
The last entry is not sorted but stands apart, since semantic ids and stop are one more than a
power of two.

Noise is the same hash of (seed, position, column, entry) as on the CPU; its logarithms, scores
and probabilities are float32, so a draw differs only where two scores are within about 1e-5, or
a sum of probabilities and top_p within about 1e-6.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_core.errors import require
from duplet_engine.gpu_state import StreamState
from duplet_engine.sampling import LONGEST_WINDOW, REDRAW_TEMPERATURE, REDRAW_TOP_P

MOST_ENTRIES = 4097
"""A program sorts a row's logits in its registers."""


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(seed, position, column, entry):  # type: ignore[no-untyped-def]
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


@triton.jit
def _filter(cumulative, total, value, rank, top_p, top_k, temperature):  # type: ignore[no-untyped-def]
    """Scores without noise of what the filters keep, -inf elsewhere; only the first if greedy."""
    greedy = temperature == 0.0
    keep = (cumulative <= top_p * total) & ((rank < top_k) | (top_k == 0))
    keep = (keep & (not greedy)) | (rank == 0)
    return tl.where(keep, value / tl.where(greedy, 1.0, temperature), float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(scores, entry, last_score, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The entry with the largest score; the last entry's stands apart."""
    best = tl.argmax(scores, axis=0)
    place = tl.arange(0, scores.shape[0])
    chosen = tl.sum(tl.where(place == best, entry, 0), axis=0)
    chosen = tl.where(tl.max(last_score, axis=0) > tl.max(scores, axis=0), ENTRIES - 1, chosen)
    # Without a number among the logits the choice means nothing, but it is looked up.
    return tl.minimum(chosen, ENTRIES - 1)


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
    column,
    redraw_temperature,
    redraw_top_p,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    REDRAW_COLUMN: tl.constexpr,
    WINDOW: tl.constexpr,
    CODES: tl.constexpr,
):
    """Program (row). REDRAW_COLUMN says that the draw is column 0, repetition-aware.

    Args:
        logits: float32 [m, logits_stride].
        slots: int32 [m]; the other arguments are StreamState's.
        drawn: int32 [m], written for column 0.
        codes: int32 [m, codes_stride]; element column - 1 is written, for column 0 the first one
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
    source = logits + row.to(tl.int64) * logits_stride
    value = tl.load(source + rank, mask=rank < ENTRIES - 1, other=float("-inf"))
    last = tl.load(source + ENTRIES - 1 + tl.zeros((1,), tl.int32)) + 0.0
    if REDRAW_COLUMN > 0:
        finite = (rank >= ENTRIES - 1) | (tl.abs(value) < float("inf"))
        finite = finite & (tl.abs(last) < float("inf"))
        tl.store(broken + row, 1 - tl.min(finite.to(tl.int32), axis=0))
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - rank).to(tl.int64)
    key = tl.sort(key, descending=True)
    entry = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    bits = (key >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)

    top = tl.maximum(tl.max(value, axis=0), last)
    weight = tl.exp(value - top)
    last_weight = tl.exp(last - top)
    ahead = value >= last
    cumulative = tl.cumsum(weight, axis=0) + tl.where(ahead, 0.0, last_weight)
    last_cumulative = tl.sum(tl.where(ahead, weight, 0.0), axis=0) + last_weight
    total = tl.maximum(tl.max(cumulative, axis=0), last_cumulative)
    last_rank = tl.sum(ahead.to(tl.int32), axis=0) + tl.zeros((1,), tl.int32)
    rank = rank + tl.where(ahead, 0, 1)

    scores = _filter(cumulative, total, value, rank, top_p, top_k, temperature)
    last_score = _filter(last_cumulative, total, last, last_rank, top_p, top_k, temperature)
    if REDRAW_COLUMN > 0:
        hot = (redraw_top_p, top_k, redraw_temperature)
        others = _filter(cumulative, total, value, rank, hot[0], hot[1], hot[2])
        last_other = _filter(last_cumulative, total, last, last_rank, hot[0], hot[1], hot[2])
    number = tl.full((1,), 0, tl.uint64) + column.to(tl.uint64)
    again_number = tl.full((1,), REDRAW_COLUMN, tl.uint64)
    last_entry = tl.full((1,), ENTRIES - 1, tl.uint64)
    scores += _gumbel(seed, position, number, entry.to(tl.uint64))
    last_score += _gumbel(seed, position, number, last_entry)
    chosen = _choose(scores, entry, last_score, ENTRIES)
    if REDRAW_COLUMN > 0:
        window = tl.load(windows + slot)
        past = tl.arange(0, WINDOW)
        age = (position.to(tl.int32) - 1 - past) & (WINDOW - 1)
        same = (tl.load(recent + slot * WINDOW + past) == chosen) & (age < window)
        again = (tl.max(same.to(tl.int32), axis=0) == 1) & (chosen != stop_index)
        if again & (temperature > 0.0):
            others += _gumbel(seed, position, again_number, entry.to(tl.uint64))
            last_other += _gumbel(seed, position, again_number, last_entry)
            chosen = _choose(others, entry, last_other, ENTRIES)
        tl.store(drawn + row, chosen)
        tl.store(codes + row * codes_stride, tl.minimum(chosen, CODES - 1))
    else:
        tl.store(codes + row * codes_stride + column - 1, chosen)


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
    block = triton.next_power_of_2(entries - 1)
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
        column,
        REDRAW_TEMPERATURE,
        REDRAW_TOP_P,
        ENTRIES=entries,
        BLOCK=block,
        REDRAW_COLUMN=0 if column else codes.shape[1] + 1,
        WINDOW=LONGEST_WINDOW,
        CODES=code_entries,
        num_warps=max(1, min(16, block // 256)),
    )
