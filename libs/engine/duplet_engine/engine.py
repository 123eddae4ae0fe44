"""One model over one pool: the two operations that every loop is made of."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from duplet_core.errors import require
from duplet_core.messages import Sampling
from duplet_engine.arithmetic import check_row_independence, cpu_arithmetic, pad_rows
from duplet_engine.attention import QUERY_TILE, ChunkAttention, StepAttention
from duplet_engine.checkpoint import Progress, load_checkpoint
from duplet_engine.decode_batch import DecodeBatch
from duplet_engine.kv_store import DTYPES, KvStore
from duplet_engine.model import DualAr
from duplet_engine.model_spec import describe_model
from duplet_engine.sampling import LONGEST_WINDOW, pack_sampling
from duplet_engine.sequences import PrefillSequence, refuse
from duplet_engine.weights import fingerprint
from duplet_memory.digest import KV_HASH
from duplet_memory.layout import describe_pool
from duplet_memory.pool import Pool, create_pool
from duplet_pages.engine_config import EngineConfig


def _tell_nobody(_done_bytes: int, _total_bytes: int) -> None:
    """Progress of a load that nobody watches."""


class Engine:
    """Model, pool and nothing else: no free list, no state of sequences.

    Owns the pool from construction to `close`, and the model's weights.
    """

    def __init__(self, config: EngineConfig, progress: Progress = _tell_nobody) -> None:
        """Load the model and make the pool.

        Raises:
            InvalidInput: the config names a model that is not there, or its files are not what
                they should be.
            InvariantError: this machine's arithmetic depends on the batch.
        """
        self.config = config
        self.model_config, weights = load_checkpoint(
            config.model, "cpu", DTYPES[config.dtype], progress
        )
        self.model = DualAr(self.model_config, weights)
        if config.dtype == "float32":
            # In bfloat16 nobody is promised the same bits.
            check_row_independence(self.model.product_kinds)
        backbone = self.model_config.backbone
        description = describe_pool(
            layers=backbone.layers,
            page_rows=config.page_rows,
            kv_heads=backbone.kv_heads,
            head_dim=backbone.head_dim,
            dtype=config.dtype,
            pages=config.pool_pages,
            arrangement=config.arrangement,
        )
        weights_fingerprint = fingerprint(weights, cpu_arithmetic())
        self.spec = describe_model(config, self.model_config, weights_fingerprint, KV_HASH)
        self.pool: Pool = create_pool(description)
        self._store: KvStore | None = KvStore(self.pool)

    def new_batch(self) -> DecodeBatch:
        """An empty batch of this engine's slots."""
        c = self.config
        return DecodeBatch(
            self.model_config, c.slots, c.page_rows, c.pool_pages, self._kv.pages_per_block
        )

    def prefill_chunk(self, sequence: PrefillSequence) -> Tensor | None:
        """Compute the next chunk of a prompt into its pages.

        Returns:
            With the last chunk: the row drawn after the prompt, int64 [columns]. Else None.

        Raises:
            InvalidInput: the model gave no finite numbers; this sequence cannot go on.
        """
        start = sequence.done_rows
        count = min(self.config.chunk_rows, sequence.prompt_rows - start)
        require(count > 0, f"seq {sequence.start.seq} has no rows left")
        padded = -(-count // QUERY_TILE) * QUERY_TILE
        # Rows past the chunk repeat its last one: any valid input does.
        index = torch.arange(start, start + padded).clamp_max_(start + count - 1)
        attend = ChunkAttention(self._kv, sequence.pages, start, count)
        hidden = self.model.forward(sequence.rows[index], index, attend)[:count]
        if not torch.isfinite(hidden).all():
            raise refuse(f"the model gave no finite numbers in rows {start} to {start + count}")
        sequence.done_rows = start + count
        if sequence.done_rows < sequence.prompt_rows:
            return None
        sequence.computed_ns = time.monotonic_ns()
        return self._draw_first(hidden[-1:], sequence.start.sampling, sequence.prompt_rows)

    def decode_step(self, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """Compute the KV of each stream's newest row and draw its next one.

        Returns:
            rows int64 [live, columns] in the order of `batch.seqs`, which the batch has taken as
            its newest; and bool [live], True where the model gave no finite numbers and the row
            means nothing.
        """
        step = batch.step_input()
        attend = StepAttention(self._kv, step.tables, step.positions, step.count)
        hidden = self.model.forward(step.rows, step.positions, attend)
        broken = ~torch.isfinite(hidden[: step.count]).all(-1)
        rows, indices = self.model.draw_rows(hidden, step.draws, step.recent)
        batch.advance(rows[: step.count], indices[: step.count])
        return rows[: step.count], broken

    def close(self) -> None:
        """Drop the views and close the pool."""
        self._store = None
        self.pool.close()

    @property
    def _kv(self) -> KvStore:
        assert self._store is not None, "the engine is closed"
        return self._store

    def _draw_first(self, hidden: Tensor, sampling: Sampling, position: int) -> Tensor:
        tile = pad_rows(1)
        # The rows that pad the tile take the most probable, which costs least.
        padding = [replace(sampling, temperature=0.0)] * (tile - 1)
        draws = pack_sampling([sampling, *padding], [position] * tile)
        recent = torch.full((tile, LONGEST_WINDOW), -1)
        rows, _ = self.model.draw_rows(hidden.expand(tile, -1).contiguous(), draws, recent)
        return rows[0]
