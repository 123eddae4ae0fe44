from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine import gpu_graphs, gpu_linear, gpu_tiles
from duplet_engine.gpu_linear import linear, logits_of
from duplet_engine.gpu_pass_graphs import MOST_ROWS, sizes_up_to
from duplet_engine.gpu_passes import _WARM_ROWS
from duplet_engine.gpu_swiglu import gated_linear
from duplet_engine.gpu_tiles import Gpu, Tiles

H200 = Gpu(132, 227 * 1024, (9, 0))


def test_a_pass_does_not_ask_the_driver_for_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes a millisecond: passes of few rows took 165."""
    asked: list[int] = []

    def answer(ordinal: int) -> dict[str, int]:
        asked.append(ordinal)
        return {"multiprocessor_count": 132, "max_shared_mem": 227 * 1024}

    driver = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace()))
    driver.active.utils.get_device_properties = answer
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _ordinal: (9, 0))
    gpu_tiles._gpu.cache_clear()
    x: Any = SimpleNamespace(device=torch.device("cuda", 1))
    assert Gpu.of(x) == Gpu.of(x) == H200
    assert asked == [1]
    gpu_tiles._gpu.cache_clear()


@pytest.mark.parametrize(
    ("capability", "form"),
    [((9, 0), "launch_early_weights"), ((10, 0), "launch_stream_weights")],
)
def test_every_product_of_few_rows_takes_its_gpus_form(
    capability: tuple[int, int], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[bool] = []

    def note(x: Tensor, weight: Tensor, tiles: Tiles, gated: bool) -> Tensor:
        queued.append(gated)
        return tiles.new_out(x, weight.shape[0] // 2 if gated else weight.shape[0], gated)

    monkeypatch.setattr(gpu_linear, form, note)
    monkeypatch.setattr(gpu_tiles, "_gpu", lambda _ordinal: Gpu(132, 227 * 1024, capability))
    x, weight = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (2, 32))
    assert linear(x, weight).shape[1:] == logits_of(x, weight).shape[1:] == (2, 32)
    assert gated_linear(x, weight).shape == (2, 16)
    assert queued == [False, False, True]


def test_no_pass_without_a_graph_meets_a_kernel_that_was_not_built_at_start() -> None:
    """Building one takes seconds, and the prompt that meets it waits. Large products are a
    library's; the other kernels are told apart by whether 16 divides the rows."""
    assert min(_WARM_ROWS) > MOST_ROWS >= gpu_linear._MOST_ROWS
    assert {rows % 16 == 0 for rows in _WARM_ROWS} == {True, False}
    assert sizes_up_to(4096)[-1] == MOST_ROWS
    assert sizes_up_to(100) == (16, 32, 64, 100)


def test_graphs_that_are_given_back_together_have_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch may free a library's workspace with any graph that was captured on its stream."""
    seen: list[object] = []

    def note(_work: Any, _given: Any, _pool: Any, stream: object) -> None:
        seen.append(stream)

    monkeypatch.setattr(gpu_graphs, "_Captured", note)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: object())
    for _ in range(2):
        gpu_graphs.BucketGraphs((1, 2, 4), lambda _: (lambda given: given, torch.zeros(1)))
    assert len(set(seen[:3])) == len(set(seen[3:])) == 1
    assert len(seen) == 6 and seen[0] is not seen[3]
