"""Products and the feed-forward's gate against plain torch. Run by test_kernels_interpreted.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from duplet_engine.gpu_linear import columns_ahead, launch_stream_weights
from duplet_engine.gpu_swiglu import gated_linear, launch_swiglu
from duplet_engine.gpu_tiles import Gpu, Tiles, choose_tiles

SMALL = Tiles(rows=16, out=32, inner=64, parts=1, stages=2, warps=4)
H200 = Gpu(132, 227 * 1024, (9, 0))


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(m * n + k)
    x, weight = (torch.randn(size, generator=chance) for size in ((m, k), (n, k)))
    return x, weight / k**0.5


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [(1, 64, 256, 2), (3, 96, 640, 4), (16, 33, 72, 1), (5, 64, 192, 2)],
)
def test_parts_add_up_to_the_product(m: int, n: int, k: int, parts: int) -> None:
    """Whole blocks and torn ones, of n, of k and of a part."""
    x, weight = operands(m, n, k)
    out = launch_stream_weights(x, weight, replace(SMALL, parts=parts))
    assert out.shape == (parts, m, n)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(out.double().sum(0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("m", "mlp", "k"), [(1, 64, 128), (7, 80, 200)])
def test_gated_product_is_its_formula(m: int, mlp: int, k: int) -> None:
    x, weight = operands(m, 2 * mlp, k)
    out = launch_stream_weights(x, weight, SMALL, gated=True)
    torch.testing.assert_close(out.double(), gated(x, weight), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mlp", [192, 1030])
def test_gate_of_a_product_is_its_formula(mlp: int) -> None:
    x, weight = operands(3, 2 * mlp, 8)
    out = launch_swiglu((x.double() @ weight.double().T).float())
    torch.testing.assert_close(out.double(), gated(x, weight), rtol=0, atol=1e-5)
    assert torch.equal(gated_linear(x, weight), launch_swiglu(x @ weight.T)), "float32"


def test_a_row_is_the_same_in_any_company() -> None:
    x, weight = operands(9, 64, 192)
    tiles = replace(SMALL, parts=3)
    together = launch_stream_weights(x, weight, tiles)
    alone = launch_stream_weights(x[4:5].contiguous(), weight, tiles)
    assert torch.equal(together[:, 4:5], alone)
    apart = launch_stream_weights(x[1::2], weight, tiles)
    assert torch.equal(together[:, 1::2], apart)


def test_s2_pros_products_are_cut_as_measured() -> None:
    shapes = [(6144, 2560), (2560, 4096), (2560, 9728)]
    found = {}
    for m in (1, 32, 64, 128):
        cuts = [choose_tiles(m, n, k, H200) for n, k in shapes]
        found[m] = [(cut.inner, cut.parts, cut.stages) for cut in cuts]
    assert found == {
        1: [(128, 2, 5), (128, 3, 8), (128, 3, 8)],
        32: [(128, 1, 8), (128, 3, 8), (128, 3, 8)],
        64: [(128, 2, 3), (64, 3, 8), (64, 3, 8)],
        128: [(128, 1, 4), (128, 3, 4), (128, 3, 4)],
    }
    both = [choose_tiles(m, 19456, 2560, H200, gated=True) for m in (1, 32, 64, 128)]
    assert [(cut.out, cut.inner, cut.stages, cut.warps) for cut in both] == [
        (64, 128, 3, 4),
        (64, 128, 5, 4),
        (64, 64, 4, 4),
        (128, 64, 4, 8),
    ]
    logits = [choose_tiles(m, n, 2560, H200) for n in (4097, 1024) for m in (1, 64, 128)]
    assert [(cut.inner, cut.parts, cut.stages) for cut in logits] == [
        (128, 2, 8),
        (64, 2, 8),
        (128, 2, 4),
        (128, 5, 8),
        (64, 5, 8),
        (128, 5, 4),
    ]


@pytest.mark.parametrize("m", [1, 17, 33, 128])
@pytest.mark.parametrize("shared_bytes", [99 * 1024, 227 * 1024])
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_under_way_fits_a_multiprocessor(m: int, shared_bytes: int, gated: bool) -> None:
    for n, k in ((6144, 2560), (64, 64), (4097, 1024), (2560, 9728)):
        cut = choose_tiles(m, n, k, Gpu(170, shared_bytes, (12, 0)), gated=gated)
        block_bytes = 2 * cut.inner * (cut.rows + cut.out * (2 if gated else 1))
        assert cut.stages >= 2
        assert cut.stages * block_bytes < shared_bytes
        assert cut.parts == 1 or k // cut.inner // cut.parts >= 4


def test_what_is_asked_for_lies_in_the_parts_own_columns() -> None:
    """In two pieces of whole 16 bytes for each row, and never more than a part has."""
    for share, k, rows in ((1408, 4096, 64), (128, 2560, 128), (2560, 2560, 256), (24, 24, 64)):
        half = columns_ahead(share, k, rows)
        assert half % 8 == 0
        assert 0 < 2 * half <= min(share, k)
        assert 2 * half * 2 * rows <= 32 * 1024
