"""Checks of single fields that a peer sent. Each raises RemoteProtocolError naming its field."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from duplet_core.errors import RemoteProtocolError
from duplet_core.ids import InstanceId, TransferId
from duplet_core.timeline import STAMPED

DIGEST_BYTES = 16
MOST_REQUEST_ID_CHARS = 128
MOST_LABEL_CHARS = 256

_ID = re.compile(r"[0-9a-f]{32}")
_INT32_BYTES = 4


def refuse(field: str, fault: str) -> RemoteProtocolError:
    """The error for a field at fault; the caller raises it."""
    return RemoteProtocolError(f"{field}: {fault}")


def _check_id(field: str, text: str) -> str:
    if _ID.fullmatch(text) is None:
        raise refuse(field, f"{text[:40]!r} is not 32 lowercase hex digits")
    return text


def instance_id(field: str, text: str) -> InstanceId:
    """An instance's id."""
    return InstanceId(_check_id(field, text))


def transfer_id(field: str, text: str) -> TransferId:
    """A transfer's id."""
    return TransferId(_check_id(field, text))


def transfer_ids(field: str, texts: Collection[str]) -> tuple[TransferId, ...]:
    """Transfers' ids, each once."""
    ids = tuple(transfer_id(field, text) for text in texts)
    if len(set(ids)) != len(ids):
        raise refuse(field, "a transfer is named twice")
    return ids


def request_id(field: str, text: str) -> str:
    """A request's id: 1 to 128 characters."""
    if not 1 <= len(text) <= MOST_REQUEST_ID_CHARS:
        raise refuse(field, f"{len(text)} characters, not 1 to {MOST_REQUEST_ID_CHARS}")
    return text


def label(field: str, text: str) -> str:
    """A text that is only passed on: at most 256 characters."""
    if len(text) > MOST_LABEL_CHARS:
        raise refuse(field, f"{len(text)} characters, more than {MOST_LABEL_CHARS}")
    return text


def positive(field: str, value: int) -> int:
    """A count of at least 1."""
    if value < 1:
        raise refuse(field, f"{value} is below 1")
    return value


def within(field: str, value: float, low: float, high: float) -> None:
    """A finite number in [low, high]; NaN is in no range."""
    if not (math.isfinite(value) and low <= value <= high):
        raise refuse(field, f"{value} is not in [{low}, {high}]")


def page_numbers(field: str, pages: Sequence[int], rows: int) -> tuple[int, ...]:
    """Pages that hold `rows` rows: at least one row a page, each page once."""
    if not 1 <= len(pages) <= rows:
        raise refuse(field, f"{len(pages)} pages for {rows} rows")
    numbers = tuple(pages)  # once: protobuf makes an object of each number every time
    if len(set(numbers)) != len(numbers):
        raise refuse(field, "a page is named twice")
    return numbers


def packed_rows(field: str, data: bytes, rows: int) -> bytes:
    """Little-endian int32 [rows, columns] for some whole number of columns, at least 1."""
    if rows == 0:
        if data:
            raise refuse(field, f"{len(data)} bytes for no rows")
        return data
    if not data or len(data) % (rows * _INT32_BYTES):
        raise refuse(field, f"{len(data)} bytes are not {rows} rows of whole int32 columns")
    return data


def digests(field: str, data: bytes) -> tuple[bytes, ...]:
    """One digest of 16 bytes a page, at least one page."""
    if not data or len(data) % DIGEST_BYTES:
        raise refuse(field, f"{len(data)} bytes are not whole digests of {DIGEST_BYTES} bytes")
    return tuple(data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES))


def stamps(field: str, times_ns: Sequence[int]) -> tuple[int, ...]:
    """Points of the timeline, ns: no more than there are."""
    if len(times_ns) > len(STAMPED):
        raise refuse(field, f"{len(times_ns)} stamps, more than the {len(STAMPED)} there are")
    return tuple(times_ns)


def step_gaps(field: str, gaps_ns: Sequence[int], output_rows: int) -> tuple[int, ...]:
    """Times between a stream's steps, ns: fewer than it has rows, or as many with a stop row."""
    if len(gaps_ns) > output_rows:
        raise refuse(field, f"{len(gaps_ns)} gaps for {output_rows} rows")
    return tuple(gaps_ns)
