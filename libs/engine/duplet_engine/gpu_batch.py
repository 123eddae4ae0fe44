"""Decode's live streams on a GPU: the host knows who has which slot, the GPU the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from duplet_core.engine import Start
from duplet_core.errors import require
from duplet_engine.gpu_state import StreamState
from duplet_engine.model_config import ModelConfig
from duplet_engine.sampling import LONGEST_WINDOW, as_int64, check_sampling
from duplet_engine.sequences import check_pages, parse_rows, refuse


class GpuBatch:
    """Slots of live streams, and what their arrays on the GPU hold at first.

    Joins and steps are queued on one CUDA stream, so a slot that is given away again is written
    after the last step that was queued for its former owner.
    """

    def __init__(
        self, config: ModelConfig, state: StreamState, page_rows: int, pool_pages: int
    ) -> None:
        """An empty batch over `state`, which it borrows and nobody else uses meanwhile."""
        self._config = config
        self._page_rows = page_rows
        self._pool_pages = pool_pages
        self._slots = state.positions.shape[0] - 1
        self._slot_of: dict[int, int] = {}
        self._packed: dict[int, Tensor] = {}
        """What `slots` answered since the last stream came or went, by bucket."""
        self.state = state

    @property
    def seqs(self) -> tuple[int, ...]:
        """Live streams in the order of a step's rows."""
        return tuple(self._slot_of)

    def join(self, start: Start) -> None:
        """Add a stream; its first output row is computed by the next step.

        Raises:
            InvalidInput: a field of `start` is wrong; the detail names it.
            InvariantError: no slot is free, or the stream is there already.
        """
        require(start.seq not in self._slot_of, f"seq {start.seq} is started twice")
        require(len(self._slot_of) < self._slots, f"more than {self._slots} streams")
        check_sampling(start.sampling)
        row = parse_rows(self._config, start.rows)
        if row.shape[0] != 1:
            raise refuse(f"rows: {row.shape[0]} rows, decode starts from one")
        if start.start_row < 1 or start.max_rows < 1:
            raise refuse(f"start_row {start.start_row}, max_rows {start.max_rows}")
        # The last row that is drawn has no KV yet when the stream ends.
        positions = start.start_row + start.max_rows - 1
        if positions > self._config.longest_sequence:
            raise refuse(
                f"max_rows: {start.start_row} + {start.max_rows} rows, "
                f"the longest sequence is {self._config.longest_sequence}"
            )
        check_pages(start.pages, positions, self._page_rows, self._pool_pages)
        slot = min(set(range(self._slots)) - set(self._slot_of.values()))
        fill_slot(self.state, slot, self._config, start, row[0], start.start_row, drawn=True)
        self._slot_of[start.seq] = slot
        self._packed.clear()

    def leave(self, seq: int) -> None:
        """Take a stream out; no step that is queued from now on names its pages."""
        del self._slot_of[seq]
        self._packed.clear()

    def slots(self, bucket: int) -> Tensor:
        """int32 [bucket] on the host, pinned where there is a GPU: the live streams' slots in
        the order of `seqs`, and the spare. Not to be written."""
        if bucket not in self._packed:
            live = list(self._slot_of.values())
            slots = torch.tensor(live + [self._slots] * (bucket - len(live)), dtype=torch.int32)
            self._packed[bucket] = slots.pin_memory() if self.state.rows.is_cuda else slots
        return self._packed[bucket]


def fill_slot(
    state: StreamState,
    slot: int,
    config: ModelConfig,
    start: Start,
    row: Tensor,
    position: int,
    *,
    drawn: bool,
) -> None:
    """Queue a stream's arrays: its newest row, int64 [columns], stands at `position`.

    `drawn`: that row was drawn and not given, so that repetition-aware sampling knows it.
    """
    sampling = start.sampling
    pages = torch.tensor(start.pages[: state.tables.shape[1]], dtype=torch.int32)
    recent = torch.full((LONGEST_WINDOW,), -1, dtype=torch.int32)
    index = config.drawable_index(int(row[0])) if drawn else None
    if index is not None:
        recent[position % LONGEST_WINDOW] = index
    _put(state.tables[slot, : len(pages)], pages)
    _put(state.rows[slot], row.int())
    _put(state.recent[slot], recent)
    for array, value in (
        (state.positions, position),
        (state.seeds, as_int64(sampling.seed)),
        (state.temperature, sampling.temperature),
        (state.top_p, sampling.top_p),
        (state.top_k, min(sampling.top_k, 2**31 - 1)),
        (state.window, sampling.repetition_window),
    ):
        array[slot].fill_(value)


def _put(place: Tensor, values: Tensor) -> None:
    """Copy without waiting; pinned memory goes back to torch once the copy is through."""
    if place.is_cuda:
        values = values.pin_memory()
    place.copy_(values, non_blocking=True)
