"""lb's check of what a client asks for, before anything is spent on it.

A prompt is checked in C, by NumPy over all rows at once; Python looks at a single value only
to name the first fault.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason
from duplet_core.messages import Sampling
from duplet_pages.spec import ModelSpec, SamplingDefaults

MOST_TEMPERATURE = 5.0
MOST_REPETITION_WINDOW = 128
MOST_TOP_K = 2**31 - 1
MOST_SEED = 2**63 - 1

_VALUE = np.dtype("<i4")


def check_prompt(data: bytes, columns: int, spec: ModelSpec) -> int:
    """Check a packed prompt against the model.

    Args:
        data: little-endian int32 [rows, columns], column 0 token ids, the others codes.
        columns: integers a row, as the client says.
        spec: the unit's model.

    Returns:
        The number of rows, at least 1.

    Raises:
        InvalidInput: PROMPT_TOO_LONG when no output row would fit, or no message could hold
            it; INVALID_PROMPT otherwise. The detail begins with the field, and names row, column
            and value of the first fault.
    """
    if columns != spec.columns:
        raise _invalid(f"columns: {columns}, but a row of model {spec.name} is {spec.columns}")
    row_bytes = columns * _VALUE.itemsize
    if len(data) % row_bytes:
        raise _invalid(f"prompt: {len(data)} bytes are not whole rows of {row_bytes} bytes")
    rows = len(data) // row_bytes
    if rows == 0:
        raise _invalid("prompt: empty")
    if rows > spec.longest_prompt:
        raise InvalidInput(
            Reason.PROMPT_TOO_LONG,
            f"prompt: {rows} rows, but model {spec.name} takes {spec.longest_prompt} and one of "
            "output",
        )
    values = np.frombuffer(data, dtype=_VALUE).reshape(rows, columns)
    faults = _find_faults(values, spec)
    first = int(faults.argmax())
    if faults.flat[first]:
        row, column = divmod(first, columns)
        raise _invalid(_describe_fault(values, row, column, spec))
    return rows


def _find_faults(values: NDArray[np.int32], spec: ModelSpec) -> NDArray[np.bool_]:
    """Mark values at fault: int32 [rows, columns] -> bool [rows, columns]."""
    limits = np.array((spec.vocab, *spec.codebook_sizes), dtype=np.uint32)
    # As unsigned numbers, negative ones are too large: one comparison checks both ends.
    faults: NDArray[np.bool_] = values.view(np.uint32) >= limits
    if spec.codebooks == 0:
        return faults
    ids, codes = values[:, 0], values[:, 1:]
    plain = _plain_rows(ids, spec)
    faults[:, 1:] |= (codes != 0) & plain[:, None]
    faults[:, 1] |= (codes[:, 0] != ids - np.int32(spec.semantic_first)) & ~plain
    return faults


def _plain_rows(ids: NDArray[np.int32], spec: ModelSpec) -> NDArray[np.bool_]:
    """Rows without codes: int32 [rows] -> bool [rows]."""
    if not _has_semantic_ids(spec):
        return np.ones(len(ids), dtype=np.bool_)
    return (ids < spec.semantic_first) | (ids > spec.semantic_last)


def _has_semantic_ids(spec: ModelSpec) -> bool:
    return (spec.semantic_first, spec.semantic_last) != (0, 0)


def _describe_fault(values: NDArray[np.int32], row: int, column: int, spec: ModelSpec) -> str:
    """Why the value at [row, column], which is at fault, is so."""
    value = int(values[row, column])
    token = int(values[row, 0])
    where = f"prompt: row {row}, column {column}: value {value}"
    if column == 0:
        return f"{where} is not a token id in [0, {spec.vocab})"
    size = spec.codebook_sizes[column - 1]
    if not 0 <= value < size:
        return f"{where} is not a code in [0, {size})"
    if not (_has_semantic_ids(spec) and spec.semantic_first <= token <= spec.semantic_last):
        return f"{where} is not 0, but id {token} is not semantic"
    return f"{where} is not {token - spec.semantic_first}, the first code of semantic id {token}"


def check_sampling(
    *,
    defaults: SamplingDefaults,
    seed: int,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    repetition_window: int | None = None,
) -> Sampling:
    """Check sampling values; None takes the one of `defaults`, the model's.

    Raises:
        InvalidInput: INVALID_SAMPLING; the detail names the field, the value and the range.
    """
    if temperature is None:
        temperature = defaults.temperature
    if top_p is None:
        top_p = defaults.top_p
    if top_k is None:
        top_k = defaults.top_k
    if repetition_window is None:
        repetition_window = defaults.repetition_window
    _check_range("seed", seed, 0, MOST_SEED)
    _check_range("temperature", temperature, 0, MOST_TEMPERATURE)
    _check_range("top_p", top_p, 0, 1, above=True)
    _check_range("top_k", top_k, 1, MOST_TOP_K)
    _check_range("repetition_window", repetition_window, 0, MOST_REPETITION_WINDOW)
    return Sampling(
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_window=repetition_window,
    )


def _check_range(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """`above`: `low` itself is not in the range."""
    # Integers are compared as integers: 2**63 as a float would pass for 2**63 - 1.
    if isinstance(value, float) and not math.isfinite(value):
        wanted = "finite"
    elif not low <= value <= high or (above and value == low):
        wanted = f"in {'(' if above else '['}{low}, {high}]"
    else:
        return
    raise InvalidInput(Reason.INVALID_SAMPLING, f"sampling.{field}: {value} is not {wanted}")


def _invalid(detail: str) -> InvalidInput:
    return InvalidInput(Reason.INVALID_PROMPT, detail)
