"""The streams that decode steps together, as arrays over slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duplet_core.engine import Start
from duplet_core.errors import require
from duplet_engine.arithmetic import pad_rows
from duplet_engine.model_config import ModelConfig
from duplet_engine.sampling import LONGEST_WINDOW, Draws, as_int64, check_sampling
from duplet_engine.sequences import check_pages, parse_rows, refuse


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's view of the batch: copies, padded to whole row tiles. Lives for the step."""

    count: int
    """Real rows; the others repeat a slot that nobody owns."""
    rows: Tensor
    """int64 [m, columns], the newest row of each stream."""
    positions: Tensor
    """int64 [m], of those rows."""
    tables: Tensor
    """int64 [m, pages]."""
    draws: Draws
    recent: Tensor
    """int64 [m, LONGEST_WINDOW]."""


class DecodeBatch:
    """State of the live streams. Owns its arrays, not the pages that they name.

    Slot `slots` is a spare: it pads steps to whole row tiles and is never stored.
    """

    def __init__(
        self, config: ModelConfig, slots: int, page_rows: int, pool_pages: int, block_pages: int
    ) -> None:
        """`block_pages`: pages of one attention block; page tables hold whole blocks."""
        self._config = config
        self._page_rows = page_rows
        self._pool_pages = pool_pages
        self._slots = slots
        self._slot_of: dict[int, int] = {}
        pages = -(-config.longest_sequence // page_rows)
        width = -(-pages // block_pages) * block_pages
        self._tables = torch.zeros(slots + 1, width, dtype=torch.int64)
        self._rows = torch.zeros(slots + 1, config.columns, dtype=torch.int64)
        self._positions = torch.zeros(slots + 1, dtype=torch.int64)
        self._seeds = torch.zeros(slots + 1, dtype=torch.int64)
        # The spare slot takes the most probable, which costs least.
        self._temperature = torch.zeros(slots + 1, dtype=torch.float64)
        self._top_p = torch.ones(slots + 1, dtype=torch.float64)
        self._top_k = torch.zeros(slots + 1, dtype=torch.int64)
        self._window = torch.zeros(slots + 1, dtype=torch.int64)
        self._recent = torch.full((slots + 1, LONGEST_WINDOW), -1, dtype=torch.int64)

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
        # The last row that is drawn has no KV yet when the stream ends.
        positions = start.start_row + start.max_rows - 1
        if start.start_row < 1 or start.max_rows < 1:
            raise refuse(f"start_row {start.start_row}, max_rows {start.max_rows}")
        if positions > self._config.longest_sequence:
            raise refuse(
                f"max_rows: {start.start_row} + {start.max_rows} rows, "
                f"the longest sequence is {self._config.longest_sequence}"
            )
        check_pages(start.pages, positions, self._page_rows, self._pool_pages)
        slot = min(set(range(self._slots)) - set(self._slot_of.values()))
        self._fill(slot, start, row[0])
        self._slot_of[start.seq] = slot

    def leave(self, seq: int) -> None:
        """Take a stream out; no later step reads or writes its pages."""
        del self._slot_of[seq]

    def step_input(self) -> StepInput:
        """What the next step computes."""
        live = list(self._slot_of.values())
        count = len(live)
        slots = torch.tensor(live + [self._slots] * (pad_rows(count) - count))
        positions = self._positions[slots]
        draws = Draws(
            seed=self._seeds[slots],
            position=positions + 1,
            temperature=self._temperature[slots],
            top_p=self._top_p[slots],
            top_k=self._top_k[slots],
            window=self._window[slots],
        )
        return StepInput(
            count, self._rows[slots], positions, self._tables[slots], draws, self._recent[slots]
        )

    def advance(self, rows: Tensor, indices: Tensor) -> None:
        """Take a step's drawn `rows [count, columns]` and `indices [count]` as the newest."""
        slots = torch.tensor(list(self._slot_of.values()))
        self._rows[slots] = rows
        self._positions[slots] += 1
        recent = self._recent[slots]
        self._recent[slots] = torch.cat((recent[:, 1:], indices[:, None]), dim=1)

    def _fill(self, slot: int, start: Start, row: Tensor) -> None:
        sampling = start.sampling
        # Entries past the stream's pages name page 0; they are masked.
        self._tables[slot] = 0
        used = min(len(start.pages), self._tables.shape[1])
        self._tables[slot, :used] = torch.tensor(start.pages[:used])
        self._rows[slot] = row
        self._positions[slot] = start.start_row
        self._seeds[slot] = as_int64(sampling.seed)
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._window[slot] = sampling.repetition_window
        self._recent[slot] = -1
        index = self._config.drawable_index(int(row[0]))
        if index is not None:
            self._recent[slot, -1] = index
