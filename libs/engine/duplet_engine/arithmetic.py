"""Arithmetic whose result for one row does not depend on the rows beside it.

That is the ground of "the same request gives the same rows in any company", bit by bit. What
breaks it on a CPU, and the rule against it here:

- A matrix product's kernel, and with it the order of sums, follows from its number of rows:
  some libraries switch below 4 rows, some differ between 8 and 256, some for odd numbers. Rows
  come in tiles of two, and weights are packed once for kernels that add up in one order for any
  number of rows, see `Linear`. `check_row_independence` tries it at start. Batched small
  products have parts of equal shapes, whoever is in the batch.
- `silu` and `sigmoid` compute the last few elements of an array by another formula than the
  vectorised rest. `swiglu` is made of `exp`, which does not, and of exact operations; a product
  of complex numbers multiplies and adds without fusing.
- A sum over rows or over a dimension that grows with the batch or the context regroups.
  Sums here run over dimensions of fixed size, or one after the other in a loop.
- Fused multiply-add (`addcmul`, `baddbmm` and kin) is left out for the same reason.

All that holds in float32. In bfloat16 nothing is promised about bits: products are the library's,
with one rounding at their end; what lies between products is computed in float32 and rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from duplet_core.errors import InvariantError
from duplet_engine.model_config import RopeScaling, TransformerConfig

ROW_TILE = 2
"""Rows come in whole tiles, the last one padded with anything: a product of an odd number of rows
may add up in another order."""
_NAME = "cpu-blocks-3"
"""Of how the CPU engine computes; changes with anything that changes KV."""
_HALF_TOP = 15
"""Largest exponent of two that a float16 has."""
_SCALE_TOP = 126
"""Largest power of two that float32 divides by, too, without losing bits."""
_CHECKED_ROWS = 256


def cpu_arithmetic() -> str:
    """What decides the last bits here, for a fingerprint: this engine, torch's choice of CPU
    kernels, and whether weights are kept in half precision."""
    products = "half" if halves_hold() else "float"
    return f"{_NAME} {torch.backends.cpu.get_cpu_capability()} {products}"


def pad_rows(count: int) -> int:
    """Round `count` up to whole row tiles, at least one."""
    return max(ROW_TILE, -(-count // ROW_TILE) * ROW_TILE)


@dataclass(frozen=True, order=True, slots=True)
class ProductKind:
    """What the order of a product's sums may follow from."""

    n: int
    k: int
    halves: bool


class Linear:
    """`x [m, k] @ weight [n, k].T + bias [n]`.

    A decode step reads every weight for a handful of rows, so bytes decide. Weights that float16
    holds exactly, up to a power of two for the whole matrix, are kept as float16 and widened as
    they are read: the same sums of the same numbers for half the bytes. A bfloat16 checkpoint's
    are such weights. Others are packed in float32.

    Owns the weight in the order that its kernel reads fastest: a copy.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._bias = bias
        self._exponent = half_exponent(weight) if halves_hold() else None
        self._multiply = _packed(weight, self._exponent)
        self._scale = 1.0 if self._exponent is None else 2.0**-self._exponent

    @property
    def kind(self) -> ProductKind:
        """For `check_row_independence`."""
        return ProductKind(*self.shape, halves=self._exponent is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """`x [m, k]`, contiguous, m a multiple of ROW_TILE -> [m, n]."""
        if x.shape[0] % ROW_TILE:
            raise InvariantError(f"linear over {x.shape[0]} rows, not whole tiles of {ROW_TILE}")
        product = self._multiply(x)
        if self._exponent is not None:
            product.mul_(self._scale)
        return product if self._bias is None else product + self._bias


def half_exponent(weight: Tensor) -> int | None:
    """The power of two by which float16 holds `weight` float32 exactly, if there is one."""
    if weight.dtype != torch.float32:
        return None
    largest = float(weight.abs().max())
    if not 0.0 < largest < math.inf:
        return None
    exponent = _HALF_TOP + 1 - math.frexp(largest)[1]
    if exponent > _SCALE_TOP:
        return None
    scaled = weight * 2.0**exponent
    return exponent if torch.equal(scaled.half().float(), scaled) else None


@functools.cache
def halves_hold() -> bool:
    """Whether this machine multiplies with float16 weights so that no row feels its company.

    FBGEMM's kernels for AVX-512 do; those for AVX2 add up in another order where fewer than
    four rows are left over.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    multiply = _packed(_whole_numbers(128, 64) / 128, 0)
    rows = _whole_numbers(_CHECKED_ROWS, 64) / 89
    whole = multiply(rows)
    counts = range(ROW_TILE, _CHECKED_ROWS, ROW_TILE)
    return all(torch.equal(multiply(rows[:count]), whole[:count]) for count in counts)


def _packed(weight: Tensor, exponent: int | None) -> Callable[[Tensor], Tensor]:
    """A product with `weight * 2**exponent` in float16, or with `weight` as it is."""
    if exponent is not None:
        halves = torch.ops.quantized.linear_prepack_fp16(weight * 2.0**exponent, None)
        return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, halves)
    if weight.dtype == torch.float32:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return lambda x: functional.linear(x, weight)


def _whole_numbers(rows: int, columns: int) -> Tensor:
    """float32 [rows, columns] of -125 to 125, each exact in float16 over a power of two."""
    count = torch.arange(rows * columns, dtype=torch.int32)
    return (count % 251 - 125).float().view(rows, columns)


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
    size = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    scale = size.mul_(size).div_(x.shape[-1]).add_(eps).rsqrt_()
    return narrow(x32 * scale, x.dtype) * weight


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


def spread_rope(cos: Tensor, sin: Tensor) -> Tensor:
    """`rope_tables`' as `apply_rope` takes them, complex [positions, 1, head_dim / 2]."""
    return torch.complex(cos, sin)[:, None]


def apply_rope(x: Tensor, turns: Tensor) -> Tensor:
    """Turn adjacent pairs (2j, 2j + 1) of `x [m, heads, head_dim]`, as complex numbers, by
    `turns [m, 1, head_dim / 2]` of `spread_rope`."""
    pairs = torch.view_as_complex(widen(x).view(*x.shape[:2], -1, 2))
    return narrow(torch.view_as_real(pairs * turns).view(x.shape), x.dtype)


def describe_products(kinds: set[ProductKind]) -> str:
    """How a model's products hold its weights, for people."""
    ways = {
        "half-held weights": any(kind.halves for kind in kinds),
        "weights as they are": any(not kind.halves for kind in kinds),
    }
    return " and ".join(way for way, is_there in ways.items() if is_there)


def check_row_independence(kinds: set[ProductKind]) -> None:
    """Try the rule of `ROW_TILE` on this machine for products of these kinds.

    Raises:
        InvariantError: a row's product depends on the rows beside it; the same request would
            give different rows in different company.
    """
    for kind in sorted(kinds):
        n, k = kind.n, kind.k
        # Over a power of two a float16 holds them, over 97 it does not.
        linear = Linear(_whole_numbers(n, k) / (128 if kind.halves else 97))
        rows = (torch.arange(_CHECKED_ROWS * k) % 241 - 120).float().view(_CHECKED_ROWS, k) / 89
        whole = linear(rows)
        turned = linear(rows.roll(3, 0)).roll(-3, 0)
        cuts = (2, 4, 6, 8, 14, 24, 64)
        parts = [torch.cat([linear(part) for part in rows.split(c)]) for c in cuts]
        if not all(torch.equal(whole, other) for other in (turned, *parts)):
            raise InvariantError(
                f"a row's product with a [{n}, {k}] weight depends on the rows beside it, on "
                f"{torch.get_num_threads()} threads of this machine with torch {torch.__version__}"
            )
