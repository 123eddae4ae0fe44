"""Hopper's form of the streamed product against Triton's, bit for bit, and against float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from duplet_engine.gpu_linear import launch_stream_weights
from duplet_engine.gpu_linear_hopper import launch_early_weights
from duplet_engine.gpu_norm import launch_add_norm
from duplet_engine.gpu_swiglu import gated_linear
from duplet_engine.gpu_tiles import Gpu, choose_tiles

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU",
)

PLAIN = [
    *[(6144, 2560), (2560, 4096), (2560, 9728), (4097, 2560), (1024, 2560)],
    *[(640, 384), (384, 1024), (1025, 384), (64, 192), (258, 64)],
    *[(33, 72), (1, 8), (96, 648), (200, 4232)],
]
"""Weights of S2-Pro, of wren and tiny, and such as fill no block of either side."""
GATED = [(19456, 2560), (2048, 384), (384, 64), (160, 200), (66, 72), (2, 8)]
MOST_ERROR = 6e-3
"""Of a bfloat16 product, as a share of its norm."""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Every second row of a matrix, that rows lie apart, and a weight that was there before."""
    chance = torch.Generator("cuda").manual_seed(m * n + k)
    x = torch.randn(2 * m, k, device="cuda", generator=chance).bfloat16()[::2]
    weight = (torch.randn(n, k, device="cuda", generator=chance) / k**0.5).bfloat16()
    torch.cuda.synchronize()
    return x, weight


def expected(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    right = x.float() @ weight.float().t()
    if not gated:
        return right
    gate, up = right.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("m", [1, 17, 64, 65, 128])
@pytest.mark.parametrize(
    ("shape", "gated"), [(s, False) for s in PLAIN] + [(s, True) for s in GATED]
)
def test_hoppers_form_gives_the_same_bits(m: int, shape: tuple[int, int], gated: bool) -> None:
    x, weight = operands(m, *shape)
    tiles = choose_tiles(m, *shape, Gpu.of(x), gated=gated)
    found = launch_early_weights(x, weight, tiles, gated)
    assert torch.equal(found, launch_early_weights(x, weight, tiles, gated))
    assert torch.equal(found, launch_stream_weights(x, weight, tiles, gated))
    whole = found.float() if gated else found.sum(0)
    right = expected(x, weight, gated)
    assert float((whole - right).norm() / right.norm()) < MOST_ERROR


@pytest.mark.parametrize("m", [1, 64, 128])
def test_a_product_sees_what_the_kernel_before_it_wrote(m: int) -> None:
    """Its copies are under way while that one runs; the rows lie where the last ones lay."""
    _, weight = operands(m, 19456, 2560)
    norm = torch.ones(2560, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(64, m, 2560, device="cuda")

    def products(between: bool) -> list[Tensor]:
        found = []
        for x in rows:
            hidden = launch_add_norm(x, None, norm, 1e-6)
            if between:
                torch.cuda.synchronize()
            found.append(gated_linear(hidden, weight))
        return found

    alone = products(between=True)
    for found, right in zip(products(between=False), alone, strict=True):
        assert torch.equal(found, right)
