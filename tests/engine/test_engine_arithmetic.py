"""The rules that keep a row's result independent of its neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from duplet_core.errors import InvariantError
from duplet_engine import arithmetic
from duplet_engine.arithmetic import (
    ROW_TILE,
    Linear,
    apply_rope,
    check_row_independence,
    pad_rows,
    rms_norm,
    rope_tables,
    spread_rope,
    swiglu,
)
from duplet_engine.tiny import TINY

SHAPES = [(128, 64), (64, 64), (320, 64), (64, 192), (1536, 576), (576, 1536)]


def random_rows(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * 7919 + width))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_does_not_depend_on_the_rows_beside(n: int, k: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x, linear = random_rows(512, k), Linear(random_rows(n, k))
    whole = linear(x)
    for rows in [*range(ROW_TILE, 160, ROW_TILE), 256, 264, 384, 504]:
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[-rows:]), whole[-rows:])
    for place in range(ROW_TILE):
        tile = torch.zeros(ROW_TILE, k)
        tile[place] = x[5]
        assert torch.equal(linear(tile)[place], whole[5])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_a_product_is_the_librarys(dtype: torch.dtype, atol: float) -> None:
    x, weight, bias = (random_rows(*shape).to(dtype) for shape in ((16, 64), (96, 64), (1, 96)))
    expected = torch.nn.functional.linear(x, weight, bias[0])
    torch.testing.assert_close(Linear(weight, bias[0])(x), expected, rtol=0, atol=atol)


def test_fewer_rows_than_a_tile_are_refused() -> None:
    assert [pad_rows(n) for n in (0, 1, 8, 9, 17)] == [8, 8, 8, 16, 24]
    with pytest.raises(InvariantError, match="4 rows"):
        Linear(torch.zeros(8, 64))(torch.zeros(4, 64))


def test_the_check_at_start_notices_dependence(monkeypatch: pytest.MonkeyPatch) -> None:
    check_row_independence({(128, 64)})

    class SumsDifferByHeight(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            y = super().__call__(x)
            return y * (1 + 1e-7) if len(x) < 32 else y

    monkeypatch.setattr(arithmetic, "Linear", SumsDifferByHeight)
    with pytest.raises(InvariantError, match="depends on the rows beside it"):
        check_row_independence({(128, 64)})


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": lambda x: swiglu(x, x),
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 0.1),
    "rms_norm": lambda x: rms_norm(x, torch.ones(x.shape[-1]), 1e-6),
    "row_sum": lambda x: x.sum(-1),
    "softmax_part": lambda x: torch.exp(x - x.amax(-1, keepdim=True)).sum(-1),
    "cumsum": lambda x: x.double().cumsum(-1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("width", [16, 64, 128, 192, 320])
def test_what_is_done_to_rows_does_not_depend_on_their_number(name: str, width: int) -> None:
    x, f = random_rows(130, width), ELEMENTWISE[name]
    whole = f(x)
    for first in range(0, 60, 7):
        for rows in range(1, 70, 3):
            assert torch.equal(f(x[first : first + rows].clone()), whole[first : first + rows])


def test_swiglu_is_finite_for_large_inputs() -> None:
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    expected = torch.nn.functional.silu(x) * 2
    torch.testing.assert_close(swiglu(x, torch.full_like(x, 2.0)), expected)


def test_rope_turns_adjacent_pairs_by_rounded_tables() -> None:
    cos, sin = rope_tables(TINY.backbone, 100, torch.float32)
    assert torch.equal(cos.bfloat16().float(), cos)
    assert cos[0].eq(1).all() and sin[0].eq(0).all()
    x = random_rows(100 * 2, 16).view(100, 2, 16)
    turned = apply_rope(x, *spread_rope(cos, sin))
    for position in (0, 1, 57, 99):
        for pair in range(8):
            c, s = cos[position, pair], sin[position, pair]
            a, b = x[position, 1, 2 * pair], x[position, 1, 2 * pair + 1]
            assert turned[position, 1, 2 * pair] == a * c - b * s
            assert turned[position, 1, 2 * pair + 1] == b * c + a * s
