"""Prompts as callers have them, packed as the contract wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason

Prompt = bytes | NDArray[Any] | Sequence[Sequence[int]]
"""Little-endian int32 bytes, an integer array [rows, columns], or a list of rows."""

_INT32 = np.iinfo(np.int32)


def pack_prompt(prompt: Prompt, columns: int | None = None) -> tuple[bytes, int]:
    """Pack a prompt.

    Args:
        prompt: see `Prompt`. Bytes are passed on unread.
        columns: integers a row; needed with bytes, else checked against the prompt if given.

    Returns:
        Little-endian int32 [rows, columns] as bytes, and columns.

    Raises:
        InvalidInput: INVALID_PROMPT; names the row, column and value at fault. Whether the values
            suit the model is the unit's to say.
    """
    if isinstance(prompt, bytes):
        if columns is None:
            raise _invalid("columns: needed with a prompt of bytes")
        return prompt, columns
    rows = prompt if isinstance(prompt, np.ndarray) else _array_from_lists(prompt)
    if rows.ndim != 2:
        raise _invalid(f"prompt: an array of {rows.ndim} dimensions, not [rows, columns]")
    if not np.issubdtype(rows.dtype, np.integer):
        raise _invalid(f"prompt: an array of {rows.dtype}, not of integers")
    if columns is not None and columns != rows.shape[1]:
        raise _invalid(f"columns: {columns}, but the prompt's rows have {rows.shape[1]}")
    if rows.dtype != np.int32:
        _check_int32(rows)
    return rows.astype("<i4", copy=False).tobytes(), rows.shape[1]


def _array_from_lists(prompt: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """A list of rows as int64 [rows, columns]."""
    if len(prompt) == 0:
        raise _invalid("prompt: empty")
    width: int | None = None
    for index, row in enumerate(prompt):
        if isinstance(row, str | bytes) or not isinstance(row, Sequence | np.ndarray):
            raise _invalid(f"prompt: row {index} is {type(row).__name__}, not a list of integers")
        width = len(row) if width is None else width
        if len(row) != width:
            raise _invalid(f"prompt: row {index} has {len(row)} columns, row 0 has {width}")
        for column, value in enumerate(row):
            _check_value(index, column, value)
    return np.array(prompt, dtype=np.int64)


def _check_value(row: int, column: int, value: object) -> None:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer:
        raise _invalid(f"prompt: row {row}, column {column}: {value!r} is not an integer")
    if not _INT32.min <= value <= _INT32.max:  # type: ignore[operator]
        raise _invalid(f"prompt: row {row}, column {column}: {value} does not fit 32 bits")


def _check_int32(rows: NDArray[Any]) -> None:
    """Check that every integer of [rows, columns] fits int32."""
    outside = (rows > _INT32.max) | (rows < _INT32.min)
    if outside.any():
        row, column = divmod(int(outside.argmax()), rows.shape[1])
        raise _invalid(
            f"prompt: row {row}, column {column}: {rows[row, column]} does not fit 32 bits"
        )


def _invalid(detail: str) -> InvalidInput:
    return InvalidInput(Reason.INVALID_PROMPT, detail)
