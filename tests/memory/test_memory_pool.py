from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from duplet_core.errors import InvalidInput, InvariantError
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.pool import Pool, create_pool, map_pool
from duplet_pages.engine_config import Arrangement
from tests.descriptors import open_fds


def describe(arrangement: Arrangement = "page-major", dtype: str = "float32") -> PoolDescription:
    return describe_pool(
        layers=2,
        page_rows=4,
        kv_heads=2,
        head_dim=8,
        dtype=dtype,
        pages=3,
        arrangement=arrangement,
    )


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = create_pool(describe())
    yield pool
    pool.close()


def test_a_new_pool_is_zero() -> None:
    pool = create_pool(describe("layer-major", "bfloat16"))
    array = pool.array
    assert array.shape == (2, 2, 12, 2, 8)
    assert array.dtype == np.uint16
    assert not array.any()
    del array
    pool.close()


def test_both_mappings_see_the_same_bytes(pool: Pool) -> None:
    other = map_pool(pool.fd, pool.description)
    other.array[2, 1, 0, 3] = 7.5
    assert pool.array.shape == (3, 2, 2, 4, 2, 8)
    assert (pool.array[2, 1, 0, 3] == 7.5).all()
    assert np.count_nonzero(pool.array) == 16
    other.close()


def test_a_mapping_outlives_its_maker() -> None:
    pool = create_pool(describe())
    pool.array[0] = 3.0
    other = map_pool(pool.fd, pool.description)
    pool.close()
    assert (other.array[0] == 3.0).all()
    other.close()


def test_a_read_only_mapping_cannot_be_written(pool: Pool) -> None:
    other = map_pool(pool.fd, pool.description, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        other.array[0] = 1.0
    other.close()


def test_the_caller_keeps_its_descriptor(pool: Pool) -> None:
    fd = os.dup(pool.fd)
    other = map_pool(fd, pool.description)
    os.close(fd)
    assert os.fstat(other.fd).st_size == pool.description.total_bytes
    other.close()


def test_the_size_is_sealed(pool: Pool) -> None:
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool_id": "0" * 32}, "pool id in memory"),
        ({"layers": 1, "page_rows": 8}, "layout digest in memory"),
        ({"arrangement": "layer-major"}, "layout digest in memory"),
        ({"pages": 2, "total_bytes": 4096 + 2048}, "the descriptor has 7168 bytes"),
    ],
)
def test_another_pool_is_refused(pool: Pool, change: dict[str, object], message: str) -> None:
    changed = replace(pool.description, **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=message):
        map_pool(pool.fd, changed)


@pytest.mark.parametrize(("byte", "name"), [(0, "magic"), (8, "version"), (16, "pool id")])
def test_a_damaged_header_is_refused(pool: Pool, byte: int, name: str) -> None:
    pool.memory[byte] ^= 1
    with pytest.raises(InvalidInput, match=f"{name} in memory is"):
        map_pool(pool.fd, pool.description)


def test_memory_without_seals_is_refused(pool: Pool) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(fd, pool.memory.tobytes())
    with pytest.raises(InvalidInput, match="not sealed"):
        map_pool(fd, pool.description)
    os.close(fd)


def test_a_refused_mapping_leaves_no_descriptor(pool: Pool) -> None:
    before = open_fds()
    with pytest.raises(InvalidInput):
        map_pool(pool.fd, replace(pool.description, pool_id="0" * 32))
    assert open_fds() <= before


def test_a_pool_is_not_unmapped_under_a_view() -> None:
    pool = create_pool(describe())
    view = pool.array
    with pytest.raises(BufferError):
        pool.close()
    view[0] = 1.0
    del view
    pool.close()
    pool.close()
    with pytest.raises(InvariantError, match="closed pool"):
        _ = pool.array
