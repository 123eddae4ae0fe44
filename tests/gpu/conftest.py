"""GPU tests: skipped, with the reason, where there are not two GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from duplet_memory.cuda_driver import CudaError, open_devices

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


def why_not() -> str:
    """Why these tests cannot run here; empty where they can."""
    try:
        count = len(open_devices())
    except CudaError as error:
        return f"no GPU: {error.detail}"
    return "" if count >= 2 else f"{count} GPU is visible, these tests need 2"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
