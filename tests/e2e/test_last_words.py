"""A test that fails beside a unit shows what its services said last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.last_words import LINES, LastWords


def test_what_fails_has_the_end_of_every_log(tmp_path: Path) -> None:
    (tmp_path / "decode.log").write_text("".join(f"line {n}\n" for n in range(100)))
    (tmp_path / "prefill.log").write_text("CUDA error: an illegal memory access\n")
    with pytest.raises(AssertionError, match="a test's own") as caught, LastWords(tmp_path):
        raise AssertionError("a test's own")
    decode, prefill = caught.value.__notes__
    assert decode.splitlines() == [
        "--- the end of decode.log",
        *(f"line {n}" for n in range(100 - LINES, 100)),
    ]
    assert "illegal memory access" in prefill
