"""The streams that decode steps together, on the GPU, and how a step's rows become their newest.

Slot `slots` is a spare with position -1: it pads steps, is stored nowhere and never moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from duplet_engine.gpu_linear import follow
from duplet_engine.sampling import LONGEST_WINDOW


@dataclass(frozen=True, slots=True)
class StreamState:
    """Arrays over slots. Owns them, not the pages that they name. Written in stream order only:
    by joins and by steps, which are queued on one CUDA stream."""

    tables: Tensor
    """int32 [slots + 1, pages]."""
    rows: Tensor
    """int32 [slots + 1, columns], the newest row, whose KV the next step computes."""
    positions: Tensor
    """int32 [slots + 1], of those rows; -1 in the spare."""
    seeds: Tensor
    """int64 [slots + 1]."""
    temperature: Tensor
    """float32 [slots + 1]; 0 takes the most probable entry."""
    top_p: Tensor
    """float32 [slots + 1]."""
    top_k: Tensor
    """int32 [slots + 1]; 0 keeps all."""
    window: Tensor
    """int32 [slots + 1]."""
    recent: Tensor
    """int32 [slots + 1, LONGEST_WINDOW]: the index drawn for position p stands at
    p % LONGEST_WINDOW; -1 where none was."""

    @staticmethod
    def empty(slots: int, pages: int, columns: int, device: torch.device) -> StreamState:
        """Arrays for `slots` streams of at most `pages` pages and one spare."""
        n = slots + 1

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((n, *shape), value, dtype=dtype, device=device)

        return StreamState(
            tables=full(0, torch.int32, pages),
            rows=full(0, torch.int32, columns),
            positions=full(-1, torch.int32),
            seeds=full(0, torch.int64),
            temperature=full(1, torch.float32),
            top_p=full(1, torch.float32),
            top_k=full(0, torch.int32),
            window=full(0, torch.int32),
            recent=full(-1, torch.int32, LONGEST_WINDOW),
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one step's draws write, and how they read it back. Lives for the step."""

    index: Tensor
    """int32 [m], of the token among the drawable ids."""
    codes: Tensor
    """int32 [m, codebooks]; of column 0 the first one has the entry, at most `code_entries` - 1."""
    broken: Tensor
    """int32 [m], 1 where a logit of the token is not finite."""
    stop_index: int
    code_entries: int
    code_embeddings: Tensor | None
    """[entries, width], of the codebook transformer; None without one."""


@triton.jit  # type: ignore[untyped-decorator]
def advance(  # type: ignore[no-untyped-def]
    slots,
    drawn,
    codes,
    broken,
    ids,
    state_rows,
    positions,
    recent,
    out,
    stop_id,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (row): the drawn row becomes the slot's newest and goes out.

    Args:
        slots: int32 [m]. drawn: int32 [m], index of the drawn id. codes: int32 [m, COLUMNS - 1].
        broken: int32 [m]. ids: int32, the drawable ids.
        out: int32 [m, COLUMNS + 1], written: the row, and 1 where it means nothing.
    """
    if OVERLAP:
        follow()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    index = tl.load(drawn + row)
    token = tl.load(ids + index)
    column = tl.arange(0, BLOCK)
    code = tl.load(
        codes + row * (COLUMNS - 1) + column - 1,
        mask=(column > 0) & (column < COLUMNS) & (token != stop_id),
        other=0,
    )
    value = tl.where(column == 0, token, code)
    value = tl.where(column == COLUMNS, tl.load(broken + row), value)
    tl.store(out + row * (COLUMNS + 1) + column, value, mask=column <= COLUMNS)
    position = tl.load(positions + slot)
    if position >= 0:
        tl.store(state_rows + slot * COLUMNS + column, value, mask=column < COLUMNS)
        tl.store(recent + slot * WINDOW + (position + 1) % WINDOW, index)
        tl.store(positions + slot, position + 1)


def launch_advance(
    state: StreamState,
    slots: Tensor,
    drawn: Drawn,
    ids: Tensor,
    stop_id: int,
) -> Tensor:
    """Queue it on the current stream; see `advance`. Returns int32 [m, columns + 1]."""
    m, columns = slots.shape[0], state.rows.shape[1]
    out = slots.new_empty(m, columns + 1)
    advance[(m,)](
        slots,
        drawn.index,
        drawn.codes,
        drawn.broken,
        ids,
        state.rows,
        state.positions,
        state.recent,
        out,
        stop_id,
        COLUMNS=columns,
        BLOCK=triton.next_power_of_2(columns + 1),
        WINDOW=LONGEST_WINDOW,
        OVERLAP=slots.is_cuda,
        num_warps=1,
        launch_pdl=slots.is_cuda,
    )
    return out
