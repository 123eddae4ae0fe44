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
    ProductKind,
    apply_rope,
    check_row_independence,
    cpu_arithmetic,
    describe_products,
    half_exponent,
    halves_hold,
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


@pytest.mark.parametrize("checkpoint", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_does_not_depend_on_the_rows_beside(
    n: int, k: int, threads: int, checkpoint: torch.dtype
) -> None:
    torch.set_num_threads(threads)
    x, linear = random_rows(512, k), Linear(random_rows(n, k).to(checkpoint).float())
    assert linear.kind.halves == (checkpoint == torch.bfloat16 and halves_hold())
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


@pytest.mark.parametrize("size", [1e-30, 1e-12, 0.02, 1.0, 3e6])
def test_a_bfloat16_checkpoints_product_loses_nothing_in_halves(size: float) -> None:
    weight = (random_rows(96, 64) * size).bfloat16().float()
    x, bias = random_rows(16, 64), random_rows(1, 96)[0] * size
    exact = x.double() @ weight.double().T + bias
    linear = Linear(weight, bias)
    assert linear.kind.halves == halves_hold()
    torch.testing.assert_close(linear(x).double(), exact, rtol=0, atol=2e-5 * size)


def test_halves_are_only_for_weights_that_they_hold() -> None:
    assert half_exponent(torch.tensor([[0.5, -0.25]])) == 16
    assert half_exponent(torch.tensor([[1.0, 1.0 + 2**-10]])) == 15
    assert half_exponent(torch.tensor([[1.0, 1.0 + 2**-11]])) is None, "a bit more than float16 has"
    assert half_exponent(torch.tensor([[1.0, 2.0**-39]])) == 15
    assert half_exponent(torch.tensor([[1.0, 2.0**-40]])) is None, "too far below the largest"
    assert half_exponent(torch.full((2, 2), 2.0**-111)) == 126
    assert half_exponent(torch.full((2, 2), 2.0**-112)) is None, "float32 has no such power of two"
    assert half_exponent(torch.full((2, 2), 2.0**-149)) is None
    for value in (0.0, float("inf"), float("nan")):
        assert half_exponent(torch.tensor([[value, 0.0]])) is None
    assert half_exponent(torch.ones(2, 2).bfloat16()) is None, "the library multiplies those"


def test_a_machine_whose_halves_feel_company_keeps_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    real = arithmetic._packed

    def sums_differ_by_height(
        weight: torch.Tensor, exponent: int | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        multiply = real(weight, exponent)
        return lambda x: multiply(x) * (1 + 1e-6 * (exponent is not None and len(x) == 14))

    monkeypatch.setattr(arithmetic, "_packed", sums_differ_by_height)
    halves_hold.cache_clear()
    try:
        assert not halves_hold() and not Linear(torch.ones(64, 64)).kind.halves
        assert cpu_arithmetic().endswith("float")
        check_row_independence({ProductKind(128, 64, halves=False)})
    finally:
        halves_hold.cache_clear()  # of the real machine


def test_how_weights_are_held_is_told() -> None:
    half, whole = (ProductKind(64, 64, halves=halves) for halves in (True, False))
    assert describe_products({half}) == "half-held weights"
    assert describe_products({whole}) == "weights as they are"
    assert describe_products({half, whole}) == "half-held weights and weights as they are"


def test_fewer_rows_than_a_tile_are_refused() -> None:
    assert [pad_rows(n) for n in (0, 1, 2, 3, 17)] == [2, 2, 2, 4, 18]
    with pytest.raises(InvariantError, match="5 rows"):
        Linear(torch.zeros(8, 64))(torch.zeros(5, 64))


@pytest.mark.parametrize("halves", [False, True])
def test_the_check_at_start_notices_dependence(
    monkeypatch: pytest.MonkeyPatch, halves: bool
) -> None:
    kinds = {ProductKind(128, 64, halves=halves and halves_hold())}
    check_row_independence(kinds)

    class SumsDifferByHeight(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            y = super().__call__(x)
            assert self.kind in kinds
            return y * (1 + 1e-7) if len(x) < 32 else y

    monkeypatch.setattr(arithmetic, "Linear", SumsDifferByHeight)
    with pytest.raises(InvariantError, match="depends on the rows beside it"):
        check_row_independence(kinds)


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": lambda x: swiglu(x, x),
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 0.1),
    "rms_norm": lambda x: rms_norm(x, torch.ones(x.shape[-1]), 1e-6),
    "row_sum": lambda x: x.sum(-1),
    "softmax": lambda x: torch.softmax(x * 8, -1),
    "rope": lambda x: apply_rope(x.view(len(x), -1, 8), spread_rope(x[:, :4], x[:, 4:8])).flatten(
        1
    ),
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
    turned = apply_rope(x, spread_rope(cos, sin))
    for position in (0, 1, 57, 99):
        for pair in range(8):
            c, s = cos[position, pair], sin[position, pair]
            a, b = x[position, 1, 2 * pair], x[position, 1, 2 * pair + 1]
            assert turned[position, 1, 2 * pair] == a * c - b * s
            assert turned[position, 1, 2 * pair + 1] == b * c + a * s
