"""Drawing one entry a row among more than a program holds: a plain language model's next token.

The rules and the way of `duplet_engine.gpu_draw`, but the logits are read again, piece by piece,
for every question that is asked of them: how many are there from a value on, and what are their
probabilities together?
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_draw import in_order, repeats, room, weigh
from duplet_engine.gpu_linear import follow
from duplet_engine.gpu_noise import gumbel
from duplet_engine.gpu_state import Drawn, StreamState
from duplet_engine.sampling import LONGEST_WINDOW, REDRAW_TEMPERATURE, REDRAW_TOP_P

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
_BLOCK = 4096
_LEAST_BLOCK = 64
_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _survey(source, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest value, the lowest in order, and 1 where one is not finite."""
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    lowest = tl.full((BLOCK,), _HIGHEST, tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, ENTRIES, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        value = tl.load(source + entry, mask=entry < ENTRIES, other=0.0) + 0.0
        finite = tl.abs(value) < float("inf")
        wrong = tl.maximum(wrong, tl.where(finite, 0, 1))
        highest = tl.maximum(highest, tl.where(entry < ENTRIES, value, float("-inf")))
        lowest = tl.minimum(lowest, tl.where(entry < ENTRIES, in_order(value), _HIGHEST))
    return tl.max(highest, axis=0), tl.min(lowest, axis=0), tl.max(wrong, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    source, top, at, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """How many values are `at` in order or above it, and the sum of their weights."""
    count = tl.zeros((BLOCK,), tl.int32)
    weight = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, ENTRIES, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        value = tl.load(source + entry, mask=entry < ENTRIES, other=0.0) + 0.0
        taken = (entry < ENTRIES) & (in_order(value) >= at)
        count += taken.to(tl.int32)
        weight += tl.where(taken, weigh(value, top), 0)
    return tl.sum(count, axis=0), tl.sum(weight, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _next_below(  # type: ignore[no-untyped-def]
    source, edge, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest value below `edge`, in order and as it is."""
    under = tl.full((BLOCK,), _LOWEST, tl.int32)
    below = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, ENTRIES, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        value = tl.load(source + entry, mask=entry < ENTRIES, other=0.0) + 0.0
        taken = (entry < ENTRIES) & (in_order(value) < edge)
        under = tl.maximum(under, tl.where(taken, in_order(value), _LOWEST))
        below = tl.maximum(below, tl.where(taken, value, float("-inf")))
    return tl.max(under, axis=0), tl.max(below, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    source,
    top,
    lowest,
    seed,
    position,
    number,
    top_p,
    top_k,
    temperature,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One draw; `top` and `lowest` from `_survey`."""
    below, total = _measure(source, top, lowest, ENTRIES, BLOCK)
    limit = (total.to(tl.float64) * top_p).to(tl.int64)
    most = tl.where((top_k == 0) | (top_k > ENTRIES), ENTRIES, top_k).to(tl.int64)
    all_fit = (most >= ENTRIES) & (total <= limit)
    high = tl.where(all_fit, lowest.to(tl.int64), in_order(top).to(tl.int64) + 1)
    low = lowest.to(tl.int64)
    above = tl.where(all_fit, below, 0)
    weight = tl.where(all_fit, total, 0)
    while (high - low > 1) & (below - above > 1):
        middle = low + ((high - low) >> 1)
        count, found = _measure(source, top, middle.to(tl.int32), ENTRIES, BLOCK)
        fits = (count <= most) & (found <= limit)
        high = tl.where(fits, middle, high)
        above = tl.where(fits, count, above)
        weight = tl.where(fits, found, weight)
        low = tl.where(fits, low, middle)
        below = tl.where(fits, below, count)
    under, value_under = _next_below(source, high, ENTRIES, BLOCK)
    fitting = room(above.to(tl.int64), weight, most, limit, weigh(value_under, top))
    # The first always stays.
    fitting = tl.where(value_under == top, tl.maximum(fitting, 1), fitting)

    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    column = number.to(tl.uint64)
    best = top * 0.0 + float("-inf")
    chosen = position.to(tl.int32) * 0
    ties = chosen
    for first in range(0, ENTRIES, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        value = tl.load(source + entry, mask=entry < ENTRIES, other=0.0) + 0.0
        ordered = in_order(value)
        tie = (entry < ENTRIES) & (ordered == under) & (ordered < high)
        before = ties + tl.cumsum(tie.to(tl.int32), axis=0) - 1
        keep = (entry < ENTRIES) & ((ordered >= high) | (tie & (before < fitting)))
        scores = value / divisor + gumbel(seed, position, column, entry.to(tl.uint64))
        # Of equal ones the first is taken.
        scores = tl.where(greedy, tl.where(value == top, 0.0, float("-inf")), scores)
        scores = tl.where(keep, scores, float("-inf"))
        ties += tl.sum(tie.to(tl.int32), axis=0)
        highest = tl.max(scores, axis=0)
        at = first + tl.argmax(scores, axis=0)
        chosen = tl.where(highest > best, at, chosen)
        best = tl.maximum(best, highest)
    return chosen


@triton.jit  # type: ignore[untyped-decorator]
def draw_wide(  # type: ignore[no-untyped-def]
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
    broken,
    logits_stride,
    stop_index,
    column,
    redraw_temperature,
    redraw_top_p,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    REDRAW_COLUMN: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row).

    Args:
        logits: float32 [m, logits_stride].
        slots: int32 [m]; seeds to recent are StreamState's.
        drawn, broken: see `Drawn`.
    """
    if OVERLAP:
        follow()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = (tl.load(positions + slot) + 1).to(tl.uint64)
    seed = tl.load(seeds + slot).to(tl.uint64, bitcast=True)
    temperature = tl.load(temperatures + slot)
    top_p = tl.load(top_ps + slot)
    top_k = tl.load(top_ks + slot)
    source = logits + row.to(tl.int64) * logits_stride
    top, lowest, wrong = _survey(source, ENTRIES, BLOCK)
    tl.store(broken + row, wrong)
    chosen = _draw(
        source, top, lowest, seed, position, column, top_p, top_k, temperature, ENTRIES, BLOCK
    )
    window = tl.load(windows + slot)
    if repeats(chosen, recent, slot, window, position, stop_index, temperature, WINDOW):
        chosen = _draw(
            source,
            top,
            lowest,
            seed,
            position,
            column + REDRAW_COLUMN,
            redraw_top_p,
            top_k,
            redraw_temperature,
            ENTRIES,
            BLOCK,
        )
    tl.store(drawn + row, chosen)


def launch_draw_wide(
    logits: Tensor, entries: int, state: StreamState, slots: Tensor, drawn: Drawn
) -> None:
    """Queue one draw of the token a row on the current stream; it is drawn again when it repeats.

    Args:
        logits: float32 [1, m, at least `entries`].
        entries: entries to choose from.
    """
    draw_wide[(slots.shape[0],)](
        logits,
        slots,
        state.seeds,
        state.positions,
        state.temperature,
        state.top_p,
        state.top_k,
        state.window,
        state.recent,
        drawn.index,
        drawn.broken,
        logits.stride(1),
        drawn.stop_index,
        0,
        REDRAW_TEMPERATURE,
        REDRAW_TOP_P,
        ENTRIES=entries,
        BLOCK=min(_BLOCK, max(_LEAST_BLOCK, triton.next_power_of_2(entries) // 4)),
        REDRAW_COLUMN=drawn.codes.shape[1] + 1,
        WINDOW=LONGEST_WINDOW,
        OVERLAP=logits.is_cuda,
        num_warps=_WARPS,
        launch_pdl=logits.is_cuda,
    )
