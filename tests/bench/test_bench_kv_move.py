"""Named results of KV movement follow from cases, and a missing case leaves its name out."""

from __future__ import annotations

import pytest

from bench.kv_move import BEST_KERNEL, BUDGETS, QUOTIENTS, SAME_AS, Measured, name_results
from bench.kv_move_grpc import LINK_GB_S, ROW_BYTES, link_free_ns


def test_every_budget_has_a_result() -> None:
    assert set(BUDGETS) <= {*SAME_AS, *QUOTIENTS, *BEST_KERNEL}


def test_results_follow_from_cases() -> None:
    measured: Measured = {
        "page-major-2048.pages.busy.ratio": (1.07, "ratio"),
        "page-major-2048.churned.busy": (0.9, "ms"),
        "page-major-2048.fresh.busy": (0.8, "ms"),
        "layer-major-2048.push.idle.ratio": (1.2, "ratio"),
        "layer-major-2048.pull.idle.ratio": (1.1, "ratio"),
    }
    assert name_results(measured) == {
        "kv_page_major_busy_ratio": (1.07, "ratio"),
        "kv_scattered_layer_major_ratio": (1.1, "ratio"),
        "kv_churned_over_fresh_ratio": (pytest.approx(1.125), "ratio"),
    }


def test_an_ideal_link_carries_moves_in_order_and_idles_between() -> None:
    move_ns = 256 * ROW_BYTES / LINK_GB_S
    free = link_free_ns([[0, 256], [10, 256], [10_000_000, 128]])
    assert free[0] == pytest.approx(move_ns)
    assert free[10] == pytest.approx(2 * move_ns), "it waits for the one before"
    assert free[10_000_000] == pytest.approx(10_000_000 + move_ns / 2)
