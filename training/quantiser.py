"""A residual quantiser: book after book codes what the books before it left over.

Tensors may lie on any device; results lie where `rows` does.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_ROWS = {"cpu": 1 << 11, "cuda": 1 << 15}
"""Rows at a time: on a CPU, what their products with a book need stays in its cache."""
_DEAD_SHARE = 0.02
"""An entry that takes less than this share of the mean number of rows is set anew."""


def find_nearest(rows: Tensor, book: Tensor) -> Tensor:
    """Index of the nearest entry of `book [entries, n]` to each of `rows [m, n]`, int64 [m]."""
    lengths = 0.5 * (book * book).sum(dim=1)
    return torch.cat(
        [
            (block @ book.T - lengths).argmax(dim=1)
            for block in rows.split(_BLOCK_ROWS[rows.device.type])
        ]
    )


def fit_book(rows: Tensor, entries: int, rounds: int, generator: torch.Generator) -> Tensor:
    """k-means of `rows [m, n]`, m >= entries; float32 [entries, n].

    Every round runs over all rows; entries that hardly a row is nearest to are set on random rows.
    """

    def draw(count: int) -> Tensor:
        return rows[torch.randperm(len(rows), generator=generator)[:count].to(rows.device)]

    book = draw(entries).clone()
    for turn in range(rounds):
        nearest = find_nearest(rows, book)
        counts = torch.bincount(nearest, minlength=entries)
        sums = torch.zeros_like(book).index_add_(0, nearest, rows)
        book = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), book)
        dead = (counts < _DEAD_SHARE * len(rows) / entries).nonzero()[:, 0]
        if len(dead) and turn < rounds - 1:
            book[dead] = draw(len(dead))
    return book


def fit_books(rows: Tensor, books: int, entries: int, rounds: int, seed: int) -> Tensor:
    """Residual codebooks of `rows [m, n]`, float32 [books, entries, n].

    Values are rounded to float16, as they are stored, before the next book is fitted.
    """
    generator = torch.Generator().manual_seed(seed)
    rest = rows.clone()
    fitted = []
    for _ in range(books):
        book = fit_book(rest, entries, rounds, generator).half().float()
        rest -= book[find_nearest(rest, book)]
        fitted.append(book)
    return torch.stack(fitted)


def encode(rows: Tensor, books: Tensor) -> Tensor:
    """Codes int64 [m, books] of `rows [m, n]`."""
    rest = rows.clone()
    codes = []
    for book in books:
        codes.append(find_nearest(rest, book))
        rest -= book[codes[-1]]
    return torch.stack(codes, dim=1)


def decode(codes: Tensor, books: Tensor) -> Tensor:
    """Rows float32 [m, n] of codes [m, books]."""
    return torch.stack([book[codes[:, place]] for place, book in enumerate(books)]).sum(dim=0)


def pack_codes(codes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Codes below 1,024 in ten bits each, four in five octets; their shape is not kept."""
    flat = np.zeros(-(-codes.size // 4) * 4, np.uint64)
    flat[: codes.size] = codes.ravel()
    shifts = np.arange(30, -1, -10, dtype=np.uint64)
    words = (flat.reshape(-1, 4) << shifts).sum(axis=1, dtype=np.uint64)
    return words.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 3:].ravel()


def unpack_codes(packed: NDArray[np.uint8], rows: int, books: int) -> NDArray[np.int16]:
    """Codes int16 [rows, books] of `pack_codes`."""
    words = np.zeros(len(packed) // 5, np.uint64)
    for place in range(5):
        words = (words << np.uint64(8)) | packed[place::5]
    shifts = np.arange(30, -1, -10, dtype=np.uint64)
    codes = ((words[:, None] >> shifts) & np.uint64(1023)).astype(np.int16)
    return codes.ravel()[: rows * books].reshape(rows, books)
