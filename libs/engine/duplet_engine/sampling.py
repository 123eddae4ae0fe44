"""Drawing rows: a pure function of (seed, position) and the logits.

Noise is a hash of (seed, position, column, entry), never the state of a generator, so a draw
does not depend on the batch, the step or the process that makes it. With the Gumbel-max
trick a draw is an argmax of scores plus noise.

Filters follow the original order: sort, drop rank >= k or cumulative probability > p (the
first always stays), then divide by the temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from duplet_core.errors import InvalidInput, Reason
from duplet_core.messages import Sampling

LONGEST_WINDOW = 128
"""Most rows that repetition-aware sampling looks back."""
REDRAW_TEMPERATURE = 1.0
REDRAW_TOP_P = 0.9
ENTRY_TILE = 64
"""Columns of logits are padded to a multiple of this, so that no array has an odd tail."""
NEAREST = 32
"""So many of the most probable entries are ranked first; they are nearly always enough."""
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def pad_entries(count: int) -> int:
    """Round a number of logits up to whole entry tiles."""
    return -(-count // ENTRY_TILE) * ENTRY_TILE


def check_sampling(sampling: Sampling) -> None:
    """Refuse what lb should have refused.

    Raises:
        InvalidInput: the detail names the field and its value.
    """
    s = sampling
    checks = (
        ("temperature", s.temperature, 0.0 <= s.temperature <= 100.0),
        ("top_p", s.top_p, 0.0 < s.top_p <= 1.0),
        ("top_k", s.top_k, s.top_k >= 0),
        ("repetition_window", s.repetition_window, 0 <= s.repetition_window <= LONGEST_WINDOW),
    )
    for field, value, good in checks:
        if not good:
            raise InvalidInput(Reason.INVALID_SAMPLING, f"sampling.{field} is {value!r}")


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row of a batch is drawn. All tensors are [m]."""

    seed: Tensor
    """int64, the seed's low 64 bits."""
    position: Tensor
    """int64, absolute index of the row that is drawn."""
    temperature: Tensor
    """float64; 0 takes the most probable entry."""
    top_p: Tensor
    """float64."""
    top_k: Tensor
    """int64; 0 keeps all."""
    window: Tensor
    """int64."""


def pack_sampling(samplings: list[Sampling], positions: list[int]) -> Draws:
    """One `Draws` for several rows."""
    return Draws(
        seed=torch.tensor([as_int64(s.seed) for s in samplings], dtype=torch.int64),
        position=torch.tensor(positions, dtype=torch.int64),
        temperature=torch.tensor([s.temperature for s in samplings], dtype=torch.float64),
        top_p=torch.tensor([s.top_p for s in samplings], dtype=torch.float64),
        top_k=torch.tensor([s.top_k for s in samplings], dtype=torch.int64),
        window=torch.tensor([s.repetition_window for s in samplings], dtype=torch.int64),
    )


def as_int64(seed: int) -> int:
    """The low 64 bits as a signed integer."""
    low = seed & 0xFFFF_FFFF_FFFF_FFFF
    return low - (1 << 64) if low >> 63 else low


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, wrapping."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def noise_keys(seed: Tensor, position: Tensor, columns: Tensor) -> Tensor:
    """int64 [m, c], the key of each row's draw for each column.

    Args:
        seed: int64 [m].
        position: int64 [m].
        columns: int64 [c], numbers that tell draws of one row apart.
    """
    row_key = _mix(_mix(seed) + (position + 1) * _GOLDEN)
    return _mix(row_key[:, None] + (columns + 1) * _GOLDEN)


def gumbel_noise(keys: Tensor, entries: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, of `keys` and of the `entries` that a draw chooses from,
    both int64 and broadcast."""
    bits = _mix(keys + (entries + 1) * _GOLDEN)
    # 52 bits and a half: strictly inside (0, 1), so both logarithms are finite.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


Noise = Callable[[Tensor], Tensor]
"""Of a draw's entries, int64 [m, e]: float64 [m, e]. Made only for those that are kept."""


def noise_by_column(draws: Draws, columns: int) -> list[Noise]:
    """The noise of each row's draws in columns 0 to `columns` - 1."""
    keys = noise_keys(draws.seed, draws.position, torch.arange(columns))
    return [partial(gumbel_noise, key[:, None]) for key in keys.unbind(1)]


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, noise: Noise) -> Tensor:
    """Draw one entry a row.

    Args:
        logits: float32 [m, entries], entries a multiple of ENTRY_TILE, -inf where padded.
        temperature, top_p: float64 [m].
        top_k: int64 [m].
        noise: of the m rows.

    Returns:
        int64 [m]
    """
    shares = torch.softmax(logits, -1)
    most = top_p * shares.double().sum(-1)
    most = most.masked_fill_(top_p >= 1.0, float("inf"))[:, None]
    if logits.shape[1] <= NEAREST:
        return _draw_ranked(logits, shares, None, temperature, most, top_k, noise)[0]
    # In order of entries, so that a stable sort leaves equal ones in that order.
    nearest = logits.topk(NEAREST, sorted=False).indices.sort().values
    drawn, settled = _draw_ranked(logits, shares, nearest, temperature, most, top_k, noise)
    if settled.all():
        return drawn
    every = _draw_ranked(logits, shares, None, temperature, most, top_k, noise)[0]
    return torch.where(settled, drawn, every)


def _draw_ranked(
    logits: Tensor,
    shares: Tensor,
    chosen: Tensor | None,
    temperature: Tensor,
    most: Tensor,
    top_k: Tensor,
    noise: Noise,
) -> tuple[Tensor, Tensor]:
    """As `draw`, among the entries `chosen` int64 [m, e], the most probable ones, or among all;
    and bool [m], whether it kept none that equals the least probable of them: then no entry
    that was not chosen would have been kept."""
    if chosen is None:
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    else:
        ranked, place = logits.gather(1, chosen).sort(dim=-1, descending=True, stable=True)
        order = chosen.gather(1, place)
    keep = shares.gather(1, order).double().cumsum(-1) <= most
    rank = torch.arange(order.shape[1])
    keep &= (rank < top_k[:, None]) | (top_k == 0)[:, None]
    keep[:, 0] = True
    settled = ~(keep & (ranked == ranked[:, -1:])).any(-1)
    greedy = temperature == 0
    scaled = ranked.double() / temperature.masked_fill(greedy, 1.0)[:, None]
    scores = (scaled + noise(order)).masked_fill_(~keep, float("-inf"))
    best = scores.argmax(-1).masked_fill_(greedy, 0)
    return order.gather(1, best[:, None])[:, 0], settled


def draw_entry(logits: Tensor, draws: Draws, noise: Noise) -> Tensor:
    """As `draw`, quicker where no row has a choice: a codebook's most probable entry often fills
    `top_p` alone."""
    best = logits.argmax(-1)
    if not _have_choice(logits, best, draws).any():
        return best
    return draw(logits, draws.temperature, draws.top_p, draws.top_k, noise)


def _have_choice(logits: Tensor, best: Tensor, draws: Draws) -> Tensor:
    """bool [m], False only where `draw` keeps nothing but the most probable entry. The margin is
    far beyond what sums in another order differ by."""
    share = torch.softmax(logits, -1).gather(1, best[:, None])[:, 0]
    return (draws.temperature > 0) & (share * (1.0 - 1e-3) < draws.top_p)


def draw_token(
    logits: Tensor, draws: Draws, recent: Tensor, stop_index: int, noise: Noise, redraw: Noise
) -> Tensor:
    """Draw column 0 as an index into the drawable ids, repetition-aware.

    An index that is among the stream's last `window` ones is drawn again, at REDRAW_*, with
    noise of its own. Stop is never drawn again, and neither is anything at temperature 0.

    Args:
        logits: float32 [m, entries].
        draws: the batch's sampling.
        recent: int64 [m, LONGEST_WINDOW], indices drawn before, newest last, -1 where none.
        stop_index: index of the stop id.
        noise, redraw: of the m rows, independent.

    Returns:
        int64 [m]
    """
    first = draw(logits, draws.temperature, draws.top_p, draws.top_k, noise)
    age = torch.arange(LONGEST_WINDOW, 0, -1)
    repeated = ((recent == first[:, None]) & (age <= draws.window[:, None])).any(-1)
    repeated &= (first != stop_index) & (draws.temperature > 0)
    if not repeated.any():
        return first
    hot = torch.full_like(draws.temperature, REDRAW_TEMPERATURE)
    wide = torch.full_like(draws.top_p, REDRAW_TOP_P)
    second = draw(logits, hot, wide, draws.top_k, redraw)
    return torch.where(repeated, second, first)
