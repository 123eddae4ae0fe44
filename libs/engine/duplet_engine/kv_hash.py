"""Page digests on a GPU (S10): `duplet-mix128-v1`, a position-keyed NH sum over 64-bit units.

A page's valid rows are read in the canonical order `[layer][keys, values][row][head][dim]`,
whatever the arrangement, as little-endian 64-bit units; unit p has low and high words w0, w1.
All arithmetic is modulo 2^32 in words and modulo 2^64 in sums:

    k  = mix(p)          q = (k ^ (k >> 15)) * 0x2C1B3C6D
    A += (w0 + k + 0x9E3779B9) * (w1 + q + 0x85EBCA6B)      32 by 32 to 64 bits
    B += (w0 + q + 0xC2B2AE35) * (w1 + k + 0x27D4EB2F)
    mix(p): x = p * 0x9E3779B1; x ^= x >> 16; x *= 0x7FEB352D

and the digest is `finish(A, rows) || finish(B, rows + 2^32)`, big-endian, with murmur3's 64-bit
finaliser. It finds accidents: a lost, stale, swapped or flipped row. A single changed word
changes A or B but for a chance of 2^-64; it is no defence against somebody who chooses the bytes.

The sums are exact and commute, so the split of the work over programs does not show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

from duplet_core.errors import InvalidInput, Reason
from duplet_memory.layout import PoolDescription

KV_HASH = "duplet-mix128-v1"
"""Name of this digest in a model's spec."""

UNIT_BYTES = 8
SPLITS = 24
"""Programs a page: a prompt of 100 pages fills a large GPU several times over."""
_TILE_UNITS = 1024
_WARPS = 2


@triton.jit
def _mix(p):  # type: ignore[no-untyped-def]
    x = p * 0x9E3779B1
    x = x ^ (x >> 16)
    return x * 0x7FEB352D


@triton.jit  # type: ignore[untyped-decorator]
def sum_pages(  # type: ignore[no-untyped-def]
    pool,
    pages,
    valid_rows,
    sums,
    slabs,
    page_stride,
    slab_stride,
    ROW_UNITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
):
    """Partial sums A and B of page `pages[program 0]`, over every SPLITS-th tile from program 1.

    Args:
        pool: pointer to 64-bit units, the pool's first row.
        pages: int64 [n], page numbers.
        valid_rows: int32 [n], rows of each page that count.
        sums: uint64 [n, SPLITS, 2], written.
        slabs: slabs a page. page_stride, slab_stride: rows from one to the next.
    """
    index = tl.program_id(0)
    split = tl.program_id(1)
    page = tl.load(pages + index)
    rows = tl.load(valid_rows + index)
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    unit = tl.arange(0, BLOCK_UNITS)
    a = tl.zeros((BLOCK_ROWS, BLOCK_UNITS), tl.uint64)
    b = tl.zeros((BLOCK_ROWS, BLOCK_UNITS), tl.uint64)
    for tile in range(split, slabs * row_blocks, tl.num_programs(1)):
        slab = tile // row_blocks
        row = (tile % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        place = page * page_stride + slab.to(tl.int64) * slab_stride + row
        mask = (row < rows)[:, None] & (unit < ROW_UNITS)[None, :]
        words = tl.load(pool + place[:, None] * ROW_UNITS + unit[None, :], mask=mask, other=0)
        words = words.to(tl.uint64, bitcast=True)
        w0 = words.to(tl.uint32)
        w1 = (words >> 32).to(tl.uint32)
        p = ((slab * rows + row) * ROW_UNITS)[:, None] + unit[None, :]
        k = _mix(p.to(tl.uint32))
        q = (k ^ (k >> 15)) * 0x2C1B3C6D
        a1 = tl.where(mask, w0 + k + 0x9E3779B9, 0).to(tl.uint64)
        a2 = (w1 + q + 0x85EBCA6B).to(tl.uint64)
        b1 = tl.where(mask, w0 + q + 0xC2B2AE35, 0).to(tl.uint64)
        b2 = (w1 + k + 0x27D4EB2F).to(tl.uint64)
        a += a1 * a2
        b += b1 * b2
    place = sums + (index * tl.num_programs(1) + split) * 2
    tl.store(place, tl.sum(tl.sum(a, axis=1), axis=0))
    tl.store(place + 1, tl.sum(tl.sum(b, axis=1), axis=0))


def launch_page_sums(
    memory: Tensor, description: PoolDescription, pages: Tensor, valid_rows: Tensor
) -> Tensor:
    """Queue the partial sums of some pages on the current stream.

    Args:
        memory: uint8 [total_bytes], the pool's allocation, lent for the launch.
        description: the pool's layout.
        pages: int64 [n] on the pool's device, each in the pool.
        valid_rows: int32 [n] on the pool's device, each in [1, page_rows].

    Returns:
        int64 [n, SPLITS, 2] on the device, for `finish_digests` once it was copied.

    Raises:
        InvalidInput: the pool's rows are no whole 64-bit units.
    """
    d = description
    if d.row_bytes % UNIT_BYTES:
        raise InvalidInput(
            Reason.TRANSFER_FAILED, f"{KV_HASH}: rows of {d.row_bytes} bytes, not a multiple of 8"
        )
    pool = memory[d.offset : d.total_bytes].view(torch.int64)
    row_units = d.row_bytes // UNIT_BYTES
    block_units = triton.next_power_of_2(row_units)
    block_rows = max(1, min(triton.next_power_of_2(d.page_rows), _TILE_UNITS // block_units))
    sums = torch.empty((len(pages), SPLITS, 2), dtype=torch.int64, device=memory.device)
    sum_pages[(len(pages), SPLITS)](
        pool,
        pages,
        valid_rows,
        sums,
        d.slabs,
        d.slab_strides[0] * d.page_rows,
        d.slab_step * d.page_rows,
        ROW_UNITS=row_units,
        BLOCK_ROWS=block_rows,
        BLOCK_UNITS=block_units,
        num_warps=_WARPS,
    )
    return sums


def finish_digests(sums: Tensor, valid_rows: Sequence[int]) -> tuple[bytes, ...]:
    """Digests, 16 bytes a page, of sums that were copied to the CPU.

    Args:
        sums: int64 [n, SPLITS, 2] on the CPU.
        valid_rows: rows of each page that counted.
    """
    totals = sums.numpy().view(np.uint64).sum(axis=1, dtype=np.uint64)
    salt = np.array([[rows, rows + (1 << 32)] for rows in valid_rows], np.uint64)
    return tuple(row.tobytes() for row in _finish(totals ^ salt).astype(">u8"))


def page_digests(
    memory: Tensor, description: PoolDescription, pages: Sequence[int], rows: int
) -> tuple[bytes, ...]:
    """Digest `pages`, which hold `rows` rows in order, and wait for the result.

    Raises:
        InvalidInput: `rows` do not fill exactly `pages`, a page is not in the pool, or its rows
            are no whole units.
    """
    d = description
    if rows < 1 or len(pages) != -(-rows // d.page_rows):
        raise InvalidInput(
            Reason.TRANSFER_FAILED, f"{rows} rows of {d.page_rows} a page, in {len(pages)} pages"
        )
    for page in pages:
        if not 0 <= page < d.pages:
            raise InvalidInput(Reason.TRANSFER_FAILED, f"page {page} is not in a pool of {d.pages}")
    valid = [min(d.page_rows, rows - i * d.page_rows) for i in range(len(pages))]
    device = memory.device
    sums = launch_page_sums(
        memory,
        d,
        torch.tensor(pages, dtype=torch.int64, device=device),
        torch.tensor(valid, dtype=torch.int32, device=device),
    )
    return finish_digests(sums.cpu(), valid)


def _finish(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """murmur3's finaliser: spreads every bit of a sum over its digest."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))
