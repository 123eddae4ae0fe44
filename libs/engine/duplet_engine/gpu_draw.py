"""Drawing one entry a row on the GPU, by the rules of `duplet_engine.sampling`.

A draw is an argmax of scores plus noise over the entries that the filters keep, so nothing has to
be sorted: kept are all entries from some value on, and of those with the value below it as many
as fit, in their order. That value is found by halving the range in which it lies, over the
floats' bits in an order that integers keep. Probabilities are summed as integers, in units of
2^-36 of the largest, so a sum is the same in any order.

The last entry stands apart, since semantic ids and stop are one more than a power of two.

Noise is the same hash of (seed, position, column, entry) as on the CPU; its logarithms, scores
and probabilities are float32, so a draw differs only where two scores are within about 1e-5, or
a sum of probabilities and top_p within about 1e-6.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_linear import follow
from duplet_engine.gpu_noise import gumbel
from duplet_engine.gpu_state import Drawn, StreamState
from duplet_engine.sampling import LONGEST_WINDOW, REDRAW_TEMPERATURE, REDRAW_TOP_P

MOST_ENTRIES = 4097
"""A program holds a row's logits in its registers; what is wider goes to `gpu_draw_wide`."""

_COUNT_BIT = tl.constexpr(50)
"""Entries are counted above it and their weights summed below."""
_ONE = tl.constexpr(1 << 50)
_WEIGHTS = tl.constexpr((1 << 50) - 1)
_WEIGHT_UNIT = tl.constexpr(2.0**36)
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def in_order(value):  # type: ignore[no-untyped-def]
    """int32 that compare as float32 do; 0.0 and -0.0 are told apart."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def weigh(value, top):  # type: ignore[no-untyped-def]
    """int64 probabilities beside that of `top`, the largest value; 0 where there is no number."""
    weight = tl.exp(value - top)
    return (tl.where(weight > 0.0, weight, 0.0) * _WEIGHT_UNIT).to(tl.int64)


@triton.jit
def room(edge_count, edge_weight, most, limit, weight):  # type: ignore[no-untyped-def]
    """How many entries of one `weight` fit behind those that are kept."""
    by_weight = tl.where(weight > 0, (limit - edge_weight) // tl.maximum(weight, 1), most)
    return tl.minimum(most - edge_count, by_weight)


@triton.jit  # type: ignore[untyped-decorator]
def _find_edge(  # type: ignore[no-untyped-def]
    ordered, packed, last_ordered, last_packed, real, most, limit, ENTRIES: tl.constexpr
):
    """The lowest value from which on all entries are kept, in order, and their packed sum; above
    all values where not even the ties of the first are."""
    high = tl.maximum(tl.max(ordered, axis=0), last_ordered).to(tl.int64) + 1
    low = tl.min(tl.where(real, ordered, 0x7FFFFFFF), axis=0)
    low = tl.minimum(low, last_ordered).to(tl.int64)
    below = tl.sum(packed, axis=0) + last_packed
    all_fit = (most >= ENTRIES) & ((below & _WEIGHTS) <= limit)
    high = tl.where(all_fit, low, high)
    above = tl.where(all_fit, below, 0)
    while (high - low > 1) & ((below >> _COUNT_BIT) - (above >> _COUNT_BIT) > 1):
        middle = low + ((high - low) >> 1)
        at = middle.to(tl.int32)
        found = tl.sum(tl.where(ordered >= at, packed, 0), axis=0)
        found += tl.where(last_ordered >= at, last_packed, 0)
        fits = ((found >> _COUNT_BIT) <= most) & ((found & _WEIGHTS) <= limit)
        high = tl.where(fits, middle, high)
        above = tl.where(fits, found, above)
        low = tl.where(fits, low, middle)
        below = tl.where(fits, below, found)
    return high, above


@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    value, last, top_p, top_k, temperature, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Scores without noise of what the filters keep, -inf elsewhere; only the first if greedy."""
    rank = tl.arange(0, BLOCK)
    real = rank < ENTRIES - 1
    highest = tl.max(value, axis=0)
    top = tl.maximum(highest, last)
    ordered = tl.where(real, in_order(value), _LOWEST)
    last_ordered = in_order(last)
    packed = tl.where(real, weigh(value, top) + _ONE, 0)
    last_packed = weigh(last, top) + _ONE
    total = (tl.sum(packed, axis=0) + last_packed) & _WEIGHTS
    limit = (total.to(tl.float64) * top_p).to(tl.int64)
    most = tl.where((top_k == 0) | (top_k > ENTRIES), ENTRIES, top_k).to(tl.int64)

    edge, above = _find_edge(ordered, packed, last_ordered, last_packed, real, most, limit, ENTRIES)
    under = tl.max(tl.where(real & (ordered < edge), ordered, _LOWEST), axis=0)
    under = tl.maximum(under, tl.where(last_ordered < edge, last_ordered, _LOWEST))
    tie = real & (ordered == under) & (ordered < edge)
    last_tie = (last_ordered == under) & (last_ordered < edge)
    weight = tl.max(tl.where(tie, packed & _WEIGHTS, 0), axis=0)
    weight = tl.maximum(weight, tl.where(last_tie, last_packed & _WEIGHTS, 0))
    fitting = room(above >> _COUNT_BIT, above & _WEIGHTS, most, limit, weight)
    ties = tl.sum(tie.to(tl.int32), axis=0)
    before = tl.zeros((BLOCK,), tl.int32)
    if ties > 1:
        before = tl.cumsum(tie.to(tl.int32), axis=0) - 1

    is_first = (rank == tl.argmax(value, axis=0)) & (value >= last)
    greedy = temperature == 0.0
    keep = ((ordered >= edge) & real) | (tie & (before < fitting))
    keep = (keep & (not greedy)) | is_first
    last_keep = (last_ordered >= edge) | (last_tie & (ties < fitting))
    last_keep = (last_keep & (not greedy)) | (last > highest)
    divisor = tl.where(greedy, 1.0, temperature)
    scores = tl.where(keep, value / divisor, float("-inf"))
    return scores, tl.where(last_keep, last / divisor, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    scores, last_score, seed, position, number, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    """The entry with the largest score and noise."""
    entry = tl.arange(0, BLOCK).to(tl.uint64)
    column = number.to(tl.uint64)
    scores += gumbel(seed, position, column, entry)
    last_entry = position * 0 + (ENTRIES - 1)
    last_score += gumbel(seed, position, column, last_entry)
    chosen = tl.argmax(scores, axis=0)
    chosen = tl.where(last_score > tl.max(scores, axis=0), ENTRIES - 1, chosen)
    # Without a number among the logits the choice means nothing, but it is looked up.
    return tl.minimum(chosen, ENTRIES - 1)


@triton.jit  # type: ignore[untyped-decorator]
def repeats(  # type: ignore[no-untyped-def]
    chosen, recent, slot, window, position, stop_index, temperature, WINDOW: tl.constexpr
):
    """Whether an entry is among the stream's newest `window` ones, so that it is drawn again."""
    past = tl.arange(0, WINDOW)
    age = (position.to(tl.int32) - 1 - past) & (WINDOW - 1)
    same = (tl.load(recent + slot * WINDOW + past) == chosen) & (age < window)
    again = (tl.max(same.to(tl.int32), axis=0) == 1) & (chosen != stop_index)
    return again & (temperature > 0.0)


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
    embeddings,
    x,
    part_stride,
    logits_stride,
    codes_stride,
    x_stride,
    width,
    stop_index,
    column,
    redraw_temperature,
    redraw_top_p,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    REDRAW_COLUMN: tl.constexpr,
    WINDOW: tl.constexpr,
    CODES: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row). REDRAW_COLUMN says that the draw is column 0, repetition-aware.

    Args:
        logits: float32 [PARTS, m, logits_stride], to be summed.
        slots: int32 [m]; seeds to recent are StreamState's.
        drawn, codes, broken: see `Drawn`; element column - 1 of codes is written.
        embeddings: [CODES, width]; x: float32 [m, x_stride], its first `width` written with those
            of the codes where WIDTH, `width` padded, is not 0.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = (tl.load(positions + slot) + 1).to(tl.uint64)
    seed = tl.load(seeds + slot).to(tl.uint64, bitcast=True)
    temperature = tl.load(temperatures + slot)
    top_p = tl.load(top_ps + slot)
    top_k = tl.load(top_ks + slot)
    if OVERLAP:
        follow()

    rank = tl.arange(0, BLOCK)
    real = rank < ENTRIES - 1
    source = logits + row.to(tl.int64) * logits_stride
    # A sum with 0.0 is never -0.0.
    value = tl.where(real, 0.0, float("-inf"))
    last = 0.0
    for part in tl.static_range(PARTS):
        value += tl.load(source + part * part_stride + rank, mask=real, other=0.0)
        last += tl.load(source + part * part_stride + ENTRIES - 1)
    scores, last_score = _score(value, last, top_p, top_k, temperature, ENTRIES, BLOCK)
    chosen = _choose(scores, last_score, seed, position, column, ENTRIES, BLOCK)
    if REDRAW_COLUMN > 0:
        finite = (rank >= ENTRIES - 1) | (tl.abs(value) < float("inf"))
        last_finite = (tl.abs(last) < float("inf")).to(tl.int32)
        tl.store(broken + row, 1 - tl.min(finite.to(tl.int32), axis=0) * last_finite)
        window = tl.load(windows + slot)
        if repeats(chosen, recent, slot, window, position, stop_index, temperature, WINDOW):
            scores, last_score = _score(
                value, last, redraw_top_p, top_k, redraw_temperature, ENTRIES, BLOCK
            )
            number = column + REDRAW_COLUMN
            chosen = _choose(scores, last_score, seed, position, number, ENTRIES, BLOCK)
        tl.store(drawn + row, chosen)
        chosen = tl.minimum(chosen, CODES - 1)
        tl.store(codes + row * codes_stride, chosen)
    else:
        tl.store(codes + row * codes_stride + column - 1, chosen)
    if WIDTH > 0:
        item = tl.arange(0, WIDTH)
        there = item < width
        found = tl.load(embeddings + chosen.to(tl.int64) * width + item, mask=there, other=0.0)
        tl.store(x + row.to(tl.int64) * x_stride + item, found.to(tl.float32), mask=there)


def launch_draw(
    logits: Tensor,
    entries: int,
    state: StreamState,
    slots: Tensor,
    column: int,
    drawn: Drawn,
    x: Tensor | None,
) -> None:
    """Queue one draw a row on the current stream; see `draw_entry`.

    Args:
        logits: float32 [parts, m, at least `entries`], to be summed.
        entries: entries to choose from, 2 to MOST_ENTRIES.
        column: 0 for the token, which is drawn again when it repeats; else the code's column.
        x: float32 [m, width], rows may lie apart, written with the codes' embeddings; None where
            nobody reads them.
    """
    codes = drawn.codes
    block = triton.next_power_of_2(entries - 1)
    embeddings = None if x is None else drawn.code_embeddings
    width = 0 if x is None else x.shape[1]
    draw_entry[(slots.shape[0],)](
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
        codes,
        drawn.broken,
        logits if embeddings is None else embeddings,
        logits if x is None else x,
        logits.stride(0),
        logits.stride(1),
        codes.stride(0),
        0 if x is None else x.stride(0),
        width,
        drawn.stop_index,
        column,
        REDRAW_TEMPERATURE,
        REDRAW_TOP_P,
        ENTRIES=entries,
        BLOCK=block,
        PARTS=logits.shape[0],
        REDRAW_COLUMN=0 if column else codes.shape[1] + 1,
        WINDOW=LONGEST_WINDOW,
        CODES=drawn.code_entries,
        WIDTH=triton.next_power_of_2(width) if width else 0,
        OVERLAP=logits.is_cuda,
        num_warps=max(1, min(8, block // 256)),
        launch_pdl=logits.is_cuda,
    )
