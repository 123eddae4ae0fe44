from __future__ import annotations

import pytest

from duplet_core.errors import InvalidInput
from duplet_engine.gpu_graphs import buckets_up_to
from duplet_engine.gpu_memory import KEPT_BYTES, MOST_PAGES, MemoryUse, fit_pages

PAGE = 1 << 20
USE = MemoryUse(total=80 << 30, free=KEPT_BYTES + 100 * PAGE + 5, weights=9 << 30, work=1 << 30)


def test_a_pool_takes_what_is_free() -> None:
    assert fit_pages(USE, PAGE, wanted=0, least=10) == 100
    assert fit_pages(USE, PAGE, wanted=60, least=10) == 60


@pytest.mark.parametrize(("wanted", "least"), [(101, 10), (0, 101), (50, 60)])
def test_a_pool_that_does_not_fit_is_refused_at_start(wanted: int, least: int) -> None:
    with pytest.raises(InvalidInput, match=r"pool_pages: .* GiB\): 100 pages fit"):
        fit_pages(USE, PAGE, wanted, least)


def test_a_pool_of_small_pages_has_not_millions_of_them() -> None:
    assert fit_pages(USE, 100, wanted=0, least=10) == MOST_PAGES
    assert fit_pages(USE, 100, wanted=MOST_PAGES + 1, least=10) == MOST_PAGES + 1


def test_nothing_free_is_no_negative_pool() -> None:
    full = MemoryUse(total=80 << 30, free=1 << 20, weights=78 << 30, work=1 << 30)
    with pytest.raises(InvalidInput, match=": 0 pages fit"):
        fit_pages(full, PAGE, wanted=0, least=1)


def test_the_largest_bucket_is_the_slots() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(20) == (1, 2, 4, 8, 16, 20)
    assert buckets_up_to(64)[-2:] == (48, 64)
