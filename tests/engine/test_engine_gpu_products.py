from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]

from duplet_engine import gpu_linear
from duplet_engine.gpu_passes import _WARM_ROWS


def test_a_pass_does_not_ask_the_driver_for_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes a millisecond: passes of few rows took 165."""
    asked: list[int] = []

    def answer(ordinal: int) -> dict[str, int]:
        asked.append(ordinal)
        return {"multiprocessor_count": 132, "max_shared_mem": 227 * 1024}

    driver = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace()))
    driver.active.utils.get_device_properties = answer
    monkeypatch.setattr(triton.runtime, "driver", driver)
    gpu_linear._gpu.cache_clear()
    x: Any = SimpleNamespace(device=torch.device("cuda", 1))
    assert gpu_linear.Gpu.of(x) == gpu_linear.Gpu.of(x) == gpu_linear.Gpu(132, 227 * 1024)
    assert asked == [1]
    gpu_linear._gpu.cache_clear()


@pytest.mark.parametrize(("n", "k"), [(6144, 2560), (2560, 4096), (2560, 9728), (3072, 1024)])
@pytest.mark.parametrize("gpu", [gpu_linear.Gpu(132, 227 * 1024), gpu_linear.Gpu(170, 99 * 1024)])
def test_no_pass_meets_a_kernel_that_was_not_built_at_start(
    n: int, k: int, gpu: gpu_linear.Gpu
) -> None:
    """Building one takes seconds, and the prompt that meets it waits."""

    def kind(rows: int) -> tuple[object, ...]:
        tiles: tuple[object, ...] = ()
        if rows <= 128:
            tiles = (
                gpu_linear.choose_tiles(rows, n, k, gpu),
                gpu_linear.choose_tiles(rows, n, k, gpu, gated=True),
            )
        return (*tiles, rows == 1, rows % 16 == 0)

    warm = {kind(rows) for rows in (*_WARM_ROWS, 512)}
    assert {kind(rows) for rows in range(1, 513)} <= warm
