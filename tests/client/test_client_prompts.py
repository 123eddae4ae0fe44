"""Packing of prompts: every form gives the same bytes, every fault is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_client.prompts import pack_prompt
from duplet_core.errors import InvalidInput, Reason

int32s = st.integers(-(2**31), 2**31 - 1)
tables = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(int32s, min_size=width, max_size=width), min_size=1, max_size=8)
)


@given(tables, st.sampled_from(["<i4", ">i4", "<i8"]))
@settings(deadline=None)
def test_all_forms_give_the_same_bytes(table: list[list[int]], dtype: str) -> None:
    data, columns = pack_prompt(table)
    assert columns == len(table[0])
    assert np.frombuffer(data, "<i4").reshape(-1, columns).tolist() == table
    array = np.array(table, dtype=dtype)
    assert pack_prompt(array) == (data, columns)
    assert pack_prompt(np.asfortranarray(array), columns) == (data, columns)
    assert pack_prompt(data, columns) == (data, columns)


@pytest.mark.parametrize(
    ("prompt", "columns", "detail"),
    [
        (b"1234", None, "columns: needed"),
        ([], None, "prompt: empty"),
        ([[1, 2], [3]], None, "prompt: row 1 has 1 columns, row 0 has 2"),
        ([[1, 2], [3, 0.5]], None, "prompt: row 1, column 1: 0.5 is not an integer"),
        ([[1, True]], None, "prompt: row 0, column 1: True is not an integer"),
        ([[1, "2"]], None, "prompt: row 0, column 1: '2' is not an integer"),
        ([[1, None]], None, "prompt: row 0, column 1: None is not an integer"),
        ([[1, 2**31]], None, "prompt: row 0, column 1: 2147483648 does not fit 32 bits"),
        ([[1], [-(10**30)]], None, "prompt: row 1, column 0: -1000"),
        ([1, 2], None, "prompt: row 0 is int"),
        (["12"], None, "prompt: row 0 is str"),
        ([[1, 2]], 3, "columns: 3, but"),
        (np.array([1, 2]), None, "prompt: an array of 1 dim"),
        (np.array([[1.0]]), None, "prompt: an array of float64"),
        (np.array([[True]]), None, "prompt: an array of bool"),
        (np.array([[0, 2**40]]), None, "prompt: row 0, column 1: 1099511627776 does not"),
        (np.array([[0], [2**63]], dtype=np.uint64), None, "prompt: row 1, column 0: 9223"),
    ],
)
def test_faults_are_named(prompt: Any, columns: int | None, detail: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        pack_prompt(prompt, columns)
    assert caught.value.reason is Reason.INVALID_PROMPT
    assert caught.value.detail.startswith(detail)
