"""Kernel: copy scattered rows of all slabs, between any two arrangements.

    for every slab s in [0, slabs), row q in [first_row, first_row + rows):
        p, i = q // page_rows, q % page_rows
        dest[dest_pages[p] * dest_page_step + i + s * dest_step] =
            source[source_pages[p] * source_page_step + i + s * source_step]

Layout: source and dest are words `[…][row_words]`; steps count rows of `row_words` words, from
page to page and from slab to slab, and `…_pages` are page numbers. Pages are disjoint within dest,
and dest and source do not overlap, so the order does not matter. A program takes every
`walkers`-th block of BLOCK_ROWS rows, reads the numbers of a block's pages once, and walks the
slabs in strides; the grid is a multiple of `walkers`, which is at most the number of blocks. Run
on the source's GPU it pushes, on the destination's it pulls; with pages that follow each other on
one side it gathers or scatters.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

WORD_TYPES = {8: "i64", 4: "i32", 2: "i16"}
"""Bytes of a word → its type; the widest that divides a row."""


@triton.jit  # type: ignore[untyped-decorator]
def move_rows(  # type: ignore[no-untyped-def]
    source,
    dest,
    source_pages,
    dest_pages,
    page_rows,
    first_row,
    rows,
    slabs,
    source_page_step,
    dest_page_step,
    source_step,
    dest_step,
    walkers,
    ROW_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """source, dest: pointers to words. source_pages, dest_pages: int64 [pages]. The rest:
    int32 scalars. BLOCK_WORDS: the power of two at or above ROW_WORDS."""
    word = tl.arange(0, BLOCK_WORDS)
    slab_stride = tl.num_programs(0) // walkers
    for block in range(tl.program_id(0) % walkers, tl.cdiv(rows, BLOCK_ROWS), walkers):
        index = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = index < rows
        page = (first_row + index) // page_rows
        in_page = (first_row + index) % page_rows
        source_row = tl.load(source_pages + page, mask=live, other=0) * source_page_step + in_page
        dest_row = tl.load(dest_pages + page, mask=live, other=0) * dest_page_step + in_page
        mask = live[:, None] & (word < ROW_WORDS)[None, :]
        source_words = source + source_row[:, None] * ROW_WORDS + word[None, :]
        dest_words = dest + dest_row[:, None] * ROW_WORDS + word[None, :]
        for slab in range(tl.program_id(0) // walkers, slabs, slab_stride):
            wide = tl.cast(slab, tl.int64) * ROW_WORDS
            words = tl.load(source_words + wide * source_step, mask=mask)
            tl.store(dest_words + wide * dest_step, words, mask=mask)
