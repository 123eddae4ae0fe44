"""lb's checks of prompts and sampling, against a slow check that says the same row by row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_core.errors import InvalidInput, Reason
from duplet_core.messages import Sampling
from duplet_pages.prompt import check_prompt, check_sampling
from duplet_pages.spec import MOST_PROMPT_BYTES, ModelSpec, SamplingDefaults

SPEC = ModelSpec(
    name="small",
    fingerprint="0",
    codebooks=3,
    vocab=40,
    codebook_sizes=(10, 6, 4),
    semantic_first=20,
    semantic_last=29,
    stop_id=12,
    page_rows=4,
    longest_sequence=32,
    default_max_rows=8,
    layers=1,
    kv_heads=1,
    head_dim=4,
    dtype="float32",
    kv_hash="xxh3-128",
    rows_per_second=21.5,
)
PLAIN = replace(
    SPEC, codebooks=0, codebook_sizes=(), semantic_first=0, semantic_last=0, name="plain"
)

Row = tuple[int, ...]


def pack(rows: list[Row]) -> bytes:
    return np.array(rows, dtype="<i4").tobytes()


plain_rows = (
    st.integers(0, SPEC.vocab - 1).filter(lambda i: not 20 <= i <= 29).map(lambda i: (i, 0, 0, 0))
)
semantic_rows = st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 3)).map(
    lambda codes: (codes[0] + 20, *codes)
)
good_prompts = st.lists(plain_rows | semantic_rows, min_size=1, max_size=31)
values = st.integers(-3, 45) | st.integers(-(2**31), 2**31 - 1)


def first_fault(rows: list[Row]) -> tuple[int, int] | None:
    """(row, column) of the first value at fault, by the words of the contract."""
    for index, row in enumerate(rows):
        semantic = SPEC.semantic_first <= row[0] <= SPEC.semantic_last
        for column, value in enumerate(row):
            if column == 0:
                good = 0 <= value < SPEC.vocab
            elif not semantic:
                good = value == 0
            else:
                good = 0 <= value < SPEC.codebook_sizes[column - 1]
                good = good and (column != 1 or value == row[0] - SPEC.semantic_first)
            if not good:
                return index, column
    return None


@given(good_prompts)
@settings(deadline=None)
def test_good_prompts_pass(rows: list[Row]) -> None:
    assert check_prompt(pack(rows), 4, SPEC) == len(rows)


@given(good_prompts, st.data())
@settings(deadline=None, max_examples=400)
def test_first_fault_is_named(rows: list[Row], data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(rows) - 1))
        changed = list(rows[index])
        changed[data.draw(st.integers(0, 3))] = data.draw(values)
        rows[index] = tuple(changed)
    fault = first_fault(rows)
    if fault is None:
        assert check_prompt(pack(rows), 4, SPEC) == len(rows)
        return
    row, column = fault
    with pytest.raises(InvalidInput) as caught:
        check_prompt(pack(rows), 4, SPEC)
    assert caught.value.reason is Reason.INVALID_PROMPT
    assert caught.value.detail.startswith(
        f"prompt: row {row}, column {column}: value {rows[row][column]} is not "
    )


@given(st.binary(max_size=200), st.integers(0, 6))
@settings(deadline=None)
def test_junk_raises_nothing_else(data: bytes, columns: int) -> None:
    try:
        rows = check_prompt(data, columns, SPEC)
    except InvalidInput:
        return
    assert columns == 4
    assert rows == len(data) // 16
    assert first_fault([tuple(row) for row in np.frombuffer(data, "<i4").reshape(-1, 4)]) is None


@pytest.mark.parametrize(
    ("rows", "detail"),
    [
        ([(1, 0, 0, 0), (40, 0, 0, 0)], "row 1, column 0: value 40 is not a token id in [0, 40)"),
        ([(-1, 0, 0, 0)], "row 0, column 0: value -1 is not a token id in [0, 40)"),
        ([(22, 2, 6, 0)], "row 0, column 2: value 6 is not a code in [0, 6)"),
        ([(22, 2, 0, -1)], "row 0, column 3: value -1 is not a code in [0, 4)"),
        ([(22, 3, 0, 0)], "row 0, column 1: value 3 is not 2, the first code of semantic id 22"),
        ([(12, 0, 0, 1)], "row 0, column 3: value 1 is not 0, but id 12 is not semantic"),
    ],
)
def test_each_kind_of_fault_has_its_words(rows: list[Row], detail: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_prompt(pack(rows), 4, SPEC)
    assert caught.value.detail == f"prompt: {detail}"


@pytest.mark.parametrize(
    ("data", "columns", "reason", "detail"),
    [
        (bytes(16), 3, Reason.INVALID_PROMPT, "columns: 3, "),
        (bytes(16), 0, Reason.INVALID_PROMPT, "columns: 0, "),
        (bytes(17), 4, Reason.INVALID_PROMPT, "prompt: 17 bytes are not whole rows of 16 bytes"),
        (b"", 4, Reason.INVALID_PROMPT, "prompt: empty"),
        (bytes(16 * 32), 4, Reason.PROMPT_TOO_LONG, "prompt: 32 rows, "),
    ],
)
def test_faults_of_form(data: bytes, columns: int, reason: Reason, detail: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_prompt(data, columns, SPEC)
    assert caught.value.reason is reason
    assert caught.value.detail.startswith(detail)


def test_longest_prompt_leaves_one_row() -> None:
    assert check_prompt(bytes(16 * 31), 4, SPEC) == 31


def test_a_prompt_fits_a_message_whatever_the_model_takes() -> None:
    endless = replace(SPEC, longest_sequence=1 << 30)
    longest = MOST_PROMPT_BYTES // 16
    assert endless.longest_prompt == longest
    assert check_prompt(bytes(16 * longest), 4, endless) == longest
    with pytest.raises(InvalidInput, match=f"takes {longest} and one of output") as caught:
        check_prompt(bytes(16 * (longest + 1)), 4, endless)
    assert caught.value.reason is Reason.PROMPT_TOO_LONG


def test_plain_language_model_has_ids_alone() -> None:
    assert check_prompt(pack([(0,), (39,)]), 1, PLAIN) == 2
    with pytest.raises(InvalidInput, match="row 1, column 0: value 40"):
        check_prompt(pack([(0,), (40,)]), 1, PLAIN)


def test_sampling_defaults_are_the_models() -> None:
    model = SamplingDefaults(temperature=0.7, top_p=0.9, top_k=5, repetition_window=0)
    assert check_sampling(defaults=model, seed=7) == Sampling(7, 0.7, 0.9, 5, 0)
    own = check_sampling(defaults=model, seed=7, top_p=0.5, repetition_window=3)
    assert own == Sampling(7, 0.7, 0.5, 5, 3)


checked = partial(check_sampling, defaults=SPEC.sampling)


def test_sampling_borders_are_in_range() -> None:
    low = check_sampling(
        defaults=SPEC.sampling, seed=0, temperature=0.0, top_p=5e-324, top_k=1, repetition_window=0
    )
    assert (low.temperature, low.top_k, low.repetition_window) == (0, 1, 0)
    high = check_sampling(
        defaults=SPEC.sampling, seed=2**63 - 1, temperature=5.0, top_p=1.0, repetition_window=128
    )
    assert (high.seed, high.temperature, high.top_p) == (2**63 - 1, 5, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", 5.1),
        ("top_p", float("nan")),
        ("top_p", float("-inf")),
        ("top_p", 0.0),
        ("top_p", 1.0000001),
        ("top_k", 0),
        ("top_k", 2**31),
        ("repetition_window", -1),
        ("repetition_window", 129),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_sampling_faults_are_named(field: str, value: float) -> None:
    values: dict[str, float] = {"seed": 1, field: value}
    with pytest.raises(InvalidInput) as caught:
        checked(**values)  # type: ignore[arg-type]
    assert caught.value.reason is Reason.INVALID_SAMPLING
    assert caught.value.detail.startswith(f"sampling.{field}: {value} ")


def test_a_fault_names_the_range_that_is_taken() -> None:
    for value in (0.0, 2.0):
        with pytest.raises(InvalidInput, match=r"is not in \(0, 1\]$"):
            checked(seed=1, top_p=value)


def test_a_spec_comes_back_from_its_text_with_its_sampling() -> None:
    spec = replace(SPEC, sampling=SamplingDefaults(0.7, 0.9, 1025, 0))
    assert ModelSpec.from_json(spec.to_json()) == spec
