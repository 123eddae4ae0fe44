"""The GPU's page digest against its formula in NumPy. Run by test_kernels_interpreted.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput
from duplet_engine.kv_hash import page_digests
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_pages.engine_config import Arrangement

MASK = np.uint64(0xFFFFFFFF)


def make_pool(
    arrangement: Arrangement, page_rows: int, head_dim: int = 12
) -> tuple[PoolDescription, torch.Tensor]:
    pool = describe_pool(
        layers=2,
        page_rows=page_rows,
        kv_heads=1,
        head_dim=head_dim,
        dtype="bfloat16",
        pages=5,
        arrangement=arrangement,
    )
    content = np.random.default_rng(page_rows).integers(0, 256, pool.total_bytes, np.uint8)
    return pool, torch.from_numpy(content)


def canonical(
    pool: PoolDescription, memory: torch.Tensor, page: int, rows: int
) -> NDArray[np.uint8]:
    """The page's valid rows in canonical order, as bytes."""
    body = memory.numpy()[pool.offset :]
    if pool.arrangement == "page-major":
        pages = body.reshape(pool.pages, pool.slabs, pool.page_rows, pool.row_bytes)
        return np.ascontiguousarray(pages[page, :, :rows])
    slabs = body.reshape(pool.slabs, pool.pages, pool.page_rows, pool.row_bytes)
    return np.ascontiguousarray(slabs[:, page, :rows])


def plain_digest(content: NDArray[np.uint8], rows: int) -> bytes:
    """The formula, unit by unit, in 64-bit arithmetic that masks to 32."""
    units = content.reshape(-1).view(np.uint64)
    w0, w1 = units & MASK, units >> np.uint64(32)
    x = np.arange(len(units), dtype=np.uint64) * np.uint64(0x9E3779B1) & MASK
    k = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & MASK
    q = ((k ^ (k >> np.uint64(15))) * np.uint64(0x2C1B3C6D)) & MASK
    a = ((w0 + k + np.uint64(0x9E3779B9)) & MASK) * ((w1 + q + np.uint64(0x85EBCA6B)) & MASK)
    b = ((w0 + q + np.uint64(0xC2B2AE35)) & MASK) * ((w1 + k + np.uint64(0x27D4EB2F)) & MASK)
    sums = (int(a.sum(dtype=np.uint64)) ^ rows, int(b.sum(dtype=np.uint64)) ^ (rows + (1 << 32)))
    return b"".join(finish(s).to_bytes(8, "big") for s in sums)


def finish(x: int) -> int:
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD % 2**64
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 % 2**64
    return x ^ (x >> 33)


@pytest.mark.parametrize("arrangement", ["page-major", "layer-major"])
@pytest.mark.parametrize(("page_rows", "rows"), [(1, 3), (3, 7), (16, 16), (16, 33), (64, 65)])
def test_digest_follows_its_formula(arrangement: Arrangement, page_rows: int, rows: int) -> None:
    pool, memory = make_pool(arrangement, page_rows)
    pages = [3, 0, 4, 1][: -(-rows // page_rows)]
    found = page_digests(memory, pool, pages, rows)
    for index, page in enumerate(pages):
        valid = min(page_rows, rows - index * page_rows)
        assert found[index] == plain_digest(canonical(pool, memory, page, valid), valid)


def test_arrangement_does_not_show() -> None:
    pool, memory = make_pool("page-major", 16)
    other, there = make_pool("layer-major", 16)
    body = memory[pool.offset :].view(pool.pages, pool.slabs, 16, -1)
    there[other.offset :] = body.transpose(0, 1).reshape(-1)
    assert page_digests(memory, pool, [2, 4], 20) == page_digests(there, other, [2, 4], 20)


def test_every_accident_shows() -> None:
    pool, memory = make_pool("page-major", 4)
    page = memory[pool.offset + pool.page_bytes :][: pool.page_bytes]
    rows = page.view(pool.slabs, 4, pool.row_bytes)
    clean = page_digests(memory, pool, [1], 3)
    rows[:, 3] += 1
    assert page_digests(memory, pool, [1], 3) == clean, "rows beyond the valid ones do not count"
    for slab, row, place in [(0, 0, 0), (3, 2, pool.row_bytes - 1), (1, 1, 9)]:
        rows[slab, row, place] ^= 0x10
        assert page_digests(memory, pool, [1], 3) != clean
        rows[slab, row, place] ^= 0x10
    rows[:, :2] = rows[:, :2].flip(1).clone()
    assert page_digests(memory, pool, [1], 3) != clean, "two rows changed places"
    rows[:, :2] = rows[:, :2].flip(1).clone()
    rows[:2] = rows[:2].flip(0).clone()
    assert page_digests(memory, pool, [1], 3) != clean, "keys and values changed places"


def test_bad_input_is_refused() -> None:
    pool, memory = make_pool("page-major", 4)
    with pytest.raises(InvalidInput, match="page 5 is not in a pool of 5"):
        page_digests(memory, pool, [5], 4)
    with pytest.raises(InvalidInput, match="9 rows of 4 a page, in 2 pages"):
        page_digests(memory, pool, [0, 1], 9)
    narrow, memory = make_pool("page-major", 4, head_dim=2)
    with pytest.raises(InvalidInput, match="rows of 4 bytes, not a multiple of 8"):
        page_digests(memory, narrow, [0], 4)
