"""What pages hold in the simulation: a tag a row that says whose row it is.

A tag is `(content << 16) | row`: row `row` of the voice or the text with that content number;
0 is a row that nobody has written. Rows that decode generates get negative tags. A prompt's
rows have two columns: the tag, and before it a column that is the same in all prompts, as a
voice's first codebook may be, but in a prompt's last row says whether the first row drawn
after it is the stop row.

The KV of a row depends on all rows before it. A tag can stand for it because a content number
stands behind one beginning only. So whether pages hold a prompt is decided by their tags, and
an output row carries the number of the prompt that the pages held which it was computed from.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

COLUMNS = 2
_ROW = struct.Struct("<IH")

ROW_BYTES = _ROW.size
FOREIGN = 0xFFFFFFFF
"""The content number of a row computed from KV that is not one request's prompt."""

EMPTY = 0
DAMAGED = 1 << 40
"""Added to the tag of a row whose memory went bad."""

Rows = tuple[int, ...]
"""The row tags of one page, or of a prompt."""

Known = Mapping[Rows, int]
"""Prompts by their tags: each one's number."""


def tag(content: int, row: int) -> int:
    return content << 16 | row


def tags(content: int, start: int, end: int) -> Rows:
    """Rows [start, end) of a content."""
    first = content << 16
    return tuple(range(first + start, first + end))


def generated(seq: int, position: int) -> int:
    return -(seq << 16 | position)


def pack_prompt(rows: Rows, stops_at_once: bool) -> bytes:
    """Little-endian int32 [len(rows), COLUMNS]."""
    columns = [0, 0] * len(rows)
    columns[1::2] = rows
    columns[-2] = int(stops_at_once)
    return struct.pack(f"<{len(columns)}i", *columns)


def unpack_prompt(prompt: bytes) -> tuple[Rows, bool]:
    """The tags of its rows, and whether it stops at once."""
    columns = struct.unpack(f"<{len(prompt) // 4}i", prompt)
    return columns[1::2], columns[-2] == 1


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
