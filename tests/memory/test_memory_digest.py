from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from duplet_core.errors import InvalidInput
from duplet_memory.digest import page_digest, page_digests
from duplet_memory.layout import describe_pool
from duplet_memory.pool import Pool, create_pool

LAYERS, PAGE_ROWS, HEADS, DIM, PAGES = 3, 4, 2, 8, 5


@pytest.fixture
def pools() -> Iterator[tuple[Pool, Pool]]:
    """The same pages page-major and layer-major."""
    made = [
        create_pool(
            describe_pool(
                layers=LAYERS,
                page_rows=PAGE_ROWS,
                kv_heads=HEADS,
                head_dim=DIM,
                dtype="float32",
                pages=PAGES,
                arrangement=arrangement,
            )
        )
        for arrangement in ("page-major", "layer-major")
    ]
    page_major, layer_major = made
    values = np.random.default_rng(3).standard_normal(page_major.array.shape)
    page_major.array[:] = values
    layer_major.array[:] = values.transpose(1, 2, 0, 3, 4, 5).reshape(layer_major.array.shape)
    yield page_major, layer_major
    for pool in made:
        pool.close()


@pytest.mark.parametrize("valid_rows", range(1, PAGE_ROWS + 1))
def test_order_is_layer_kv_row_whatever_the_arrangement(
    pools: tuple[Pool, Pool], valid_rows: int
) -> None:
    for page in range(PAGES):
        canonical = b"".join(
            pools[0].array[page, layer, kv, row].tobytes()
            for layer in range(LAYERS)
            for kv in range(2)
            for row in range(valid_rows)
        )
        expected = xxhash.xxh3_128(canonical).digest()
        assert len(expected) == 16
        assert [page_digest(pool, page, valid_rows) for pool in pools] == [expected] * 2


def test_digest_is_big_endian(pools: tuple[Pool, Pool]) -> None:
    number = xxhash.xxh3_128_intdigest(pools[0].array[0].tobytes())
    assert int.from_bytes(page_digest(pools[0], 0, PAGE_ROWS), "big") == number


def test_a_full_page_is_hashed_where_it_is(
    pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def note(data: memoryview) -> bytes:
        seen.append(np.frombuffer(data, dtype=np.uint8).ctypes.data)
        return bytes(16)

    monkeypatch.setattr(xxhash, "xxh3_128_digest", note)
    page_digest(pools[0], 2, PAGE_ROWS)
    d = pools[0].description
    assert seen == [pools[0].memory.ctypes.data + d.offset + 2 * d.page_bytes]


@pytest.mark.parametrize("which", [0, 1])
def test_rows_beyond_the_valid_ones_do_not_count(pools: tuple[Pool, Pool], which: int) -> None:
    pool = pools[which]
    before = page_digests(pool, [3, 1], PAGE_ROWS + 2)
    rows = (
        pool.array[1][:, :, 2:] if which == 0 else pool.array[:, :, PAGE_ROWS + 2 : 2 * PAGE_ROWS]
    )
    rows[:] = 0
    assert page_digests(pool, [3, 1], PAGE_ROWS + 2) == before
    assert page_digests(pool, [3, 1], PAGE_ROWS + 3) != before


def test_any_bit_counts(pools: tuple[Pool, Pool]) -> None:
    pool = pools[0]
    before = page_digest(pool, 4, PAGE_ROWS)
    pool.memory[-1] ^= 1
    assert page_digest(pool, 4, PAGE_ROWS) != before


@pytest.mark.parametrize(
    ("pages", "rows"), [([0], 0), ([0], 5), ([0, 1], 4), ([], 1), ([5], 1), ([-1], 1)]
)
def test_pages_that_do_not_fit_the_rows_are_refused(
    pools: tuple[Pool, Pool], pages: list[int], rows: int
) -> None:
    with pytest.raises(InvalidInput):
        page_digests(pools[0], pages, rows)
