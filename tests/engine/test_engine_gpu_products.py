from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]

from duplet_engine import gpu_linear


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
