from __future__ import annotations

import json
from dataclasses import replace

import pytest

from duplet_core.errors import InvalidInput
from duplet_memory.layout import HEADER_BYTES, PoolDescription, describe_pool


def small_pool() -> PoolDescription:
    return describe_pool(
        layers=3,
        page_rows=4,
        kv_heads=2,
        head_dim=8,
        dtype="bfloat16",
        pages=5,
        arrangement="page-major",
    )


def test_json_goes_both_ways() -> None:
    description = small_pool()
    assert PoolDescription.from_json(description.to_json()) == description


def test_sizes_follow_from_the_fields() -> None:
    description = small_pool()
    assert description.row_bytes == 2 * 8 * 2
    assert description.slab_bytes == 4 * description.row_bytes
    assert description.page_bytes == 3 * 2 * description.slab_bytes
    assert description.total_bytes == HEADER_BYTES + 5 * description.page_bytes


def test_each_pool_has_an_id_and_a_layout_digest_of_its_own() -> None:
    first, second = small_pool(), small_pool()
    assert first.pool_id != second.pool_id
    assert first.layout_digest() != second.layout_digest()
    same = replace(first, pool_id=second.pool_id)
    assert same.layout_digest() == second.layout_digest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("magic", "OTHERPKV"),
        ("version", 2),
        ("pool_id", "xyz"),
        ("pool_id", 7),
        ("layers", 0),
        ("pages", -1),
        ("page_rows", 1.5),
        ("kv_heads", True),
        ("head_dim", None),
        ("kv", 1),
        ("dtype", "float16"),
        ("arrangement", "row-major"),
        ("offset", 0),
        ("offset", 4097),
        ("total_bytes", 1),
    ],
)
def test_wrong_field_is_named_with_its_value(field: str, value: object) -> None:
    fields = json.loads(small_pool().to_json())
    fields[field] = value
    with pytest.raises(InvalidInput, match=f"{field} is {value!r}"):
        PoolDescription.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"surplus": 1}', "nonsense"])
def test_text_that_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="pool description"):
        PoolDescription.from_json(text)
