"""Page digests beside the steps that run: queued in a stream of their own, read when done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duplet_engine.kv_hash import finish_digests, launch_page_sums
from duplet_memory.layout import PoolDescription


@dataclass(frozen=True, slots=True)
class DigestFlight:
    """Digests that were launched. Owns the pinned memory that their sums are copied to."""

    sums: Tensor
    """int64, see `launch_page_sums`; valid once `done` is."""
    valid_rows: tuple[int, ...]
    done: torch.cuda.Event


class PageDigests:
    """Digests of one pool's pages. Owns its stream, borrows the pool's memory."""

    def __init__(self, memory: Tensor, description: PoolDescription) -> None:
        """`memory`: uint8 [total_bytes] on the current device, the pool's allocation."""
        self._memory = memory
        self._description = description
        # A step fills the GPU; digests that queued behind its blocks would hold up a first row.
        self._stream = torch.cuda.Stream(priority=-1)

    def launch(
        self, pages: Sequence[int], valid_rows: Sequence[int], after: torch.cuda.Event | None
    ) -> DigestFlight:
        """Queue the digests of `pages`, of which `valid_rows` count; never waits for the GPU.

        `after`: passed before they are read; None where they are written already.
        """
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            sums = launch_page_sums(
                self._memory,
                self._description,
                torch.tensor(pages, dtype=torch.int64)
                .pin_memory()
                .to(self._memory.device, non_blocking=True),
                torch.tensor(valid_rows, dtype=torch.int32)
                .pin_memory()
                .to(self._memory.device, non_blocking=True),
            )
            copied = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            copied.copy_(sums, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return DigestFlight(copied, tuple(valid_rows), done)

    def is_done(self, flight: DigestFlight) -> bool:
        """Whether `read` would not wait."""
        return bool(flight.done.query())

    def read(self, flight: DigestFlight) -> tuple[bytes, ...]:
        """Wait for the digests, 16 bytes a page."""
        flight.done.synchronize()
        return finish_digests(flight.sums, flight.valid_rows)
