"""The check of a GenerateRequest that needs no model."""

from __future__ import annotations

from typing import Any

import pytest

from duplet.speech.v1 import speech_pb2 as pb
from duplet_core.errors import InvalidInput, Reason
from duplet_wire.speech import check_request


def test_a_plain_request_passes() -> None:
    check_request(pb.GenerateRequest())
    check_request(
        pb.GenerateRequest(
            request_id="x" * 128, voice="y" * 256, max_rows=1, rows_per_message=1, first_rows=1
        )
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "x" * 129),
        ("voice", "x" * 257),
        ("session", "x" * 257),
        ("max_rows", 0),
        ("rows_per_message", 0),
        ("first_rows", 0),
    ],
)
def test_a_fault_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: ") as caught:
        check_request(pb.GenerateRequest(**{field: value}))
    assert caught.value.reason is Reason.INVALID_REQUEST
