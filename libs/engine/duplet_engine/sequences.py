"""Live sequences of an engine, and the checks that a Start must pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from duplet_core.engine import Start
from duplet_core.errors import InvalidInput, Reason
from duplet_engine.model_config import ModelConfig
from duplet_engine.sampling import check_sampling


def refuse(detail: str) -> InvalidInput:
    """The error that ends one sequence and no other."""
    return InvalidInput(Reason.ENGINE_FAILED, detail)


def parse_rows(config: ModelConfig, rows: bytes) -> Tensor:
    """Rows of a message as int64 [n, columns], n >= 1.

    Raises:
        InvalidInput: not whole rows, or a value outside its column's range.
    """
    columns = config.columns
    if not rows or len(rows) % (4 * columns):
        raise refuse(f"rows: {len(rows)} bytes are not rows of {columns} int32")
    array = np.frombuffer(rows, dtype="<i4").reshape(-1, columns)
    bad = (array < 0) | (array >= np.asarray(config.column_limits))
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise refuse(
            f"rows: row {row}, column {column} is {array[row, column]}, "
            f"not in [0, {config.column_limits[column]})"
        )
    return torch.from_numpy(array.astype(np.int64))


def check_pages(pages: tuple[int, ...], rows: int, page_rows: int, pool_pages: int) -> None:
    """Check that `pages` of the pool hold at least `rows` rows, each page once.

    Raises:
        InvalidInput: they do not.
    """
    if len(pages) * page_rows < rows:
        raise refuse(f"pages: {len(pages)} pages of {page_rows} rows for {rows} rows")
    for page in pages:
        if not 0 <= page < pool_pages:
            raise refuse(f"pages: page {page} is not in a pool of {pool_pages}")
    if len(set(pages)) != len(pages):
        raise refuse("pages: a page stands twice")


@dataclass(slots=True)
class PrefillSequence:
    """A prompt being computed. Owned by the prefill loop."""

    start: Start
    rows: Tensor
    """int64 [prompt, columns]."""
    pages: Tensor
    """int64 [pages]."""
    done_rows: int
    """Rows whose KV is in the pool."""
    started_ns: int = 0
    computed_ns: int = 0
    """When its last chunk was computed, where the engine can tell that from the draw."""

    @property
    def prompt_rows(self) -> int:
        return self.rows.shape[0]


def open_prefill(
    config: ModelConfig, start: Start, page_rows: int, pool_pages: int
) -> PrefillSequence:
    """Check a prefill's Start.

    Raises:
        InvalidInput: a field is wrong; the detail names it.
    """
    check_sampling(start.sampling)
    rows = parse_rows(config, start.rows)
    n = rows.shape[0]
    if n > config.longest_sequence:
        raise refuse(f"rows: {n} rows, the longest sequence is {config.longest_sequence}")
    if not 0 <= start.start_row < n:
        raise refuse(f"start_row: {start.start_row} of {n} rows; one row must be left to compute")
    if start.start_row % page_rows:
        raise refuse(f"start_row: {start.start_row} is not at a page's start")
    check_pages(start.pages, n, page_rows, pool_pages)
    return PrefillSequence(start, rows, torch.tensor(start.pages), start.start_row)
