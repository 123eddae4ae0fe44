"""A row's input: its text embedding and, at semantic positions, those of its codes.

e = E_text[r0] + [semantic] sum_i E_codes[r_(i+1) + entries * i],    * scale where semantic
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.model_config import ModelConfig

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def embed_rows(  # type: ignore[no-untyped-def]
    rows,
    text,
    code_tables,
    out,
    width,
    semantic_first,
    semantic_last,
    scale,
    CODEBOOKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = item < width
    place = rows + row * (CODEBOOKS + 1)
    token = tl.load(place).to(tl.int64)
    total = tl.load(text + token * width + item, mask=mask, other=0.0).to(tl.float32)
    if (token >= semantic_first) & (token <= semantic_last):
        for book in tl.static_range(CODEBOOKS):
            entry = tl.load(place + 1 + book).to(tl.int64) + book * ENTRIES
            total += tl.load(code_tables + entry * width + item, mask=mask, other=0.0).to(
                tl.float32
            )
        total *= scale
    tl.store(out + row * width + item, total, mask=mask)


def launch_embed_rows(
    rows: Tensor, text: Tensor, code_tables: Tensor, config: ModelConfig
) -> Tensor:
    """Queue it on the current stream: `rows` int32 [m, columns], every value in its column's
    range, give float32 [m, width]."""
    m, width = rows.shape[0], text.shape[1]
    out = rows.new_empty(m, width, dtype=torch.float32)
    embed_rows[(m, triton.cdiv(width, _BLOCK))](
        rows,
        text,
        code_tables,
        out,
        width,
        config.semantic_first,
        config.semantic_last,
        config.columns**-0.5 if config.scaled_embeddings else 1.0,
        CODEBOOKS=config.codebooks,
        ENTRIES=config.codebook_entries,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
