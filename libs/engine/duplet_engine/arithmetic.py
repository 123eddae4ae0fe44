"""Arithmetic whose result for one row does not depend on the rows beside it.

That is the ground of "the same request gives the same rows in any company", bit by bit. What
breaks it on a CPU, and the rule against it here:

- A matrix product's kernel, and with it the order of sums, follows from its number of rows:
  some libraries switch below 4 rows, some differ between 8 and 256. oneDNN's, with weights that
  are packed for it once, adds up in one order for any number of rows, and is twice as fast as a
  product with weights as they are stored. `check_row_independence` tries it at start. Batched
  small products have parts of equal shapes, whoever is in the batch.
- `silu` and `sigmoid` compute the last few elements of an array by another formula than the
  vectorised rest. `swiglu` is made of `exp`, which does not, and of exact operations.
- A sum over rows or over a dimension that grows with the batch or the context regroups.
  Sums here run over dimensions of fixed size, or one after the other in a loop.
- Fused multiply-add (`addcmul`, `baddbmm` and kin) is left out for the same reason.

All that holds in float32. In bfloat16 nothing is promised about bits: products are the library's,
with one rounding at their end; what lies between products is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from duplet_core.errors import InvariantError
from duplet_engine.model_config import RopeScaling, TransformerConfig

ROW_TILE = 8
"""Rows come in whole tiles, the last one padded with anything: then no array has an odd tail."""
_NAME = "cpu-blocks-2"
"""Of how the CPU engine computes; changes with anything that changes KV."""


def cpu_arithmetic() -> str:
    """What decides the last bits here, for a fingerprint: this engine, and torch's choice of
    CPU kernels."""
    return f"{_NAME} {torch.backends.cpu.get_cpu_capability()}"


def pad_rows(count: int) -> int:
    """Round `count` up to whole row tiles, at least one."""
    return max(ROW_TILE, -(-count // ROW_TILE) * ROW_TILE)


class Linear:
    """`x [m, k] @ weight [n, k].T + bias [n]`.

    Owns the weight in the order that the library multiplies fastest: a copy, in float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._packed = weight.dtype == torch.float32
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROW_TILE)
            if self._packed
            else weight
        )
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`x [m, k]`, contiguous, m a multiple of ROW_TILE -> [m, n]."""
        if x.shape[0] % ROW_TILE:
            raise InvariantError(f"linear over {x.shape[0]} rows, not whole tiles of {ROW_TILE}")
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, None, "none", [], ""
            )
        else:
            product = functional.linear(x, self._weight)
        return product if self._bias is None else product + self._bias


def widen(x: Tensor) -> Tensor:
    """`x` in float32; itself where it is, which torch takes a while to find out."""
    return x if x.dtype == torch.float32 else x.float()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; itself where it is."""
    return x if x.dtype == dtype else x.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in float32. `weight` has that dimension, or
    one for each head before it."""
    x32 = widen(x)
    mean_square = (x32 * x32).sum(-1, keepdim=True) / x.shape[-1]
    return narrow(x32 * torch.rsqrt(mean_square + eps), x.dtype) * weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    gate32 = widen(gate)
    return narrow((gate32 / torch.neg(gate32).exp_().add_(1.0)).mul_(up), gate.dtype)


def rope_tables(
    config: TransformerConfig, positions: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin `[positions, head_dim / 2]`, float32; values of bfloat16 where the config says
    so, or where the model computes in it, as the models were trained."""
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = config.rope_base ** (-pair / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if config.rope_rounded or dtype == torch.bfloat16:
        return cos.bfloat16().float(), sin.bfloat16().float()
    return cos, sin


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_positions * frequencies / (2 * torch.pi)
    share = (turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    kept = share.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)


def spread_rope(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rope_tables`' as `apply_rope` takes them, [positions, 1, head_dim]: a value for each of a
    pair, the sine that the even one takes from the odd one with its sign."""
    both = torch.stack((-sin, sin), dim=-1).flatten(-2)
    return cos.repeat_interleave(2, dim=-1)[:, None], both[:, None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent pairs (2j, 2j + 1) of `x [m, heads, head_dim]` by `cos, sin [m, 1, head_dim]`
    of `spread_rope`."""
    x32 = widen(x)
    swapped = x32.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return narrow((x32 * cos).add_(swapped.mul_(sin)), x.dtype)


def check_row_independence(shapes: set[tuple[int, int]]) -> None:
    """Try the rule of `ROW_TILE` on this machine for weights of these `[n, k]` shapes.

    Raises:
        InvariantError: a row's product depends on the rows beside it; the same request would
            give different rows in different company.
    """
    for n, k in sorted(shapes):
        weight = (torch.arange(n * k, dtype=torch.int32) % 251 - 125).float().view(n, k) / 97
        rows = (torch.arange(256 * k) % 241 - 120).float().view(256, k) / 89
        linear = Linear(weight)
        whole = linear(rows)
        turned = linear(rows.roll(3, 0)).roll(-3, 0)
        parts = [torch.cat([linear(part) for part in rows.split(c)]) for c in (8, 24, 64)]
        if not all(torch.equal(whole, other) for other in (turned, *parts)):
            raise InvariantError(
                f"a row's product with a [{n}, {k}] weight depends on the rows beside it, on "
                f"{torch.get_num_threads()} threads of this machine with torch {torch.__version__}"
            )
