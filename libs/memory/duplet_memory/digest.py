"""Page digests (S10): XXH3-128 over a page's valid rows, whatever the arrangement.

The canonical order is `[layer][keys, values][row][head][dim]`, the rows from 0 up to the
number of valid ones. A full page of a page-major pool lies in memory in just that order and
is hashed where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from duplet_core.errors import InvalidInput, Reason
from duplet_memory.pool import Pool

KV_HASH = "xxh3-128"
"""Name of this digest in a model's spec."""


def page_digest(pool: Pool, page: int, valid_rows: int) -> bytes:
    """Digest one page's first `valid_rows` rows: 16 bytes, big-endian.

    Raises:
        InvalidInput: `page` is not in the pool, or `valid_rows` not in [1, page_rows].
    """
    d = pool.description
    if not 0 <= page < d.pages:
        raise InvalidInput(Reason.TRANSFER_FAILED, f"page {page} is not in a pool of {d.pages}")
    if not 1 <= valid_rows <= d.page_rows:
        raise InvalidInput(
            Reason.TRANSFER_FAILED, f"page {page}: {valid_rows} valid rows of {d.page_rows}"
        )
    if d.arrangement == "page-major":
        rows = pool.array[page][:, :, :valid_rows]
    else:
        first = page * d.page_rows
        rows = pool.array[:, :, first : first + valid_rows]
    # No copy where the rows are contiguous already, which a full page-major page is.
    return xxhash.xxh3_128_digest(np.ascontiguousarray(rows).data)


def page_digests(pool: Pool, pages: Sequence[int], rows: int) -> tuple[bytes, ...]:
    """Digest `pages`, which hold `rows` rows in order: all are full but perhaps the last.

    Raises:
        InvalidInput: `rows` do not fill exactly `pages`, or a page is not in the pool.
    """
    page_rows = pool.description.page_rows
    if rows < 1 or len(pages) != -(-rows // page_rows):
        raise InvalidInput(
            Reason.TRANSFER_FAILED, f"{rows} rows of {page_rows} a page, in {len(pages)} pages"
        )
    return tuple(
        page_digest(pool, page, min(page_rows, rows - index * page_rows))
        for index, page in enumerate(pages)
    )
