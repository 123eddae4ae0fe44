"""What pages hold in the simulation: a tag a row that says whose row it is.

A tag is `(content << 16) | row`: prompt row `row` of the request with that content number;
0 is a row that nobody has written. Rows that decode generates get negative tags. A prompt,
an output row and a digest are bytes made of the same numbers, so a checker can read from a
row at the client which request's KV it was computed from.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_PROMPT = struct.Struct("<IHB")
_ROW = struct.Struct("<IH")

ROW_BYTES = _ROW.size
FOREIGN = 0xFFFFFFFF
"""The content number of a row computed from KV that is not one request's prompt."""

EMPTY = 0

Rows = tuple[int, ...]
"""The row tags of one page."""


def tag(content: int, row: int) -> int:
    return content << 16 | row


def generated(seq: int, position: int) -> int:
    return -(seq << 16 | position)


def pack_prompt(content: int, rows: int, stops_at_once: bool) -> bytes:
    return _PROMPT.pack(content, rows, stops_at_once)


def unpack_prompt(prompt: bytes) -> tuple[int, int, bool]:
    content, rows, stops = _PROMPT.unpack(prompt)
    return content, rows, bool(stops)


def pack_row(content: int, index: int) -> bytes:
    """Output row `index` (0 is the first) of a stream whose prompt is `content`."""
    return _ROW.pack(content, index)


def unpack_row(row: bytes) -> tuple[int, int]:
    content, index = _ROW.unpack(row)
    return content, index


def digest(rows: Rows) -> bytes:
    """Of a page's valid rows."""
    return repr(rows).encode()


def valid_rows(pool: Sequence[Rows], pages: Sequence[int], rows: int, page_rows: int) -> list[Rows]:
    """The valid rows of each of the pages that hold `rows` rows."""
    return [
        pool[page][: min(page_rows, rows - index * page_rows)] for index, page in enumerate(pages)
    ]


def content_of(pages: list[Rows]) -> int:
    """Whose prompt these pages hold, complete and in order; FOREIGN when it is nobody's."""
    content = pages[0][0] >> 16
    expected = tag(content, 0)
    for page in pages:
        for found in page:
            if found != expected:
                return FOREIGN
            expected += 1
    return content if content > 0 else FOREIGN


def write_rows(
    pool: list[Rows], pages: Sequence[int], start: int, tags: Sequence[int], page_rows: int
) -> None:
    """Store `tags` at rows [start, start + len(tags)); pages[0] holds row `start`."""
    first = start // page_rows
    for index, value in enumerate(tags):
        row = start + index
        page = pages[row // page_rows - first]
        at = row % page_rows
        held = pool[page]
        pool[page] = (*held[:at], value, *held[at + 1 :])
