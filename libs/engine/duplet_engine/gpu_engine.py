"""One model over one pool on one GPU: the CPU engine's two operations, and a step in two halves."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duplet_core.errors import InvalidInput, Reason, require
from duplet_engine.gpu_attend_chunk import ChunkTiles, launch_attend_chunk
from duplet_engine.gpu_batch import GpuBatch, fill_slot
from duplet_engine.gpu_graphs import EngineGraphs
from duplet_engine.gpu_heads import Places
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_memory import MemoryUse, fit_pages
from duplet_engine.gpu_model import GpuModel
from duplet_engine.gpu_state import StreamState
from duplet_engine.kv_hash import page_digests
from duplet_engine.model_config import ModelConfig
from duplet_engine.sequences import PrefillSequence, refuse
from duplet_memory.cuda_driver import open_devices
from duplet_memory.cuda_pool import CudaPool, create_cuda_pool
from duplet_memory.layout import HandleKind, PoolDescription, describe_pool
from duplet_pages.engine_config import EngineConfig

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched. Owns the pinned memory that its rows are copied to."""

    seqs: tuple[int, ...]
    """Of its rows, in order."""
    rows: Tensor
    """int32 [bucket, columns + 1], valid once `done` is."""
    done: torch.cuda.Event


class GpuEngine:
    """Model, graphs and pool. Owns all three from construction to `close`.

    Everything is queued on the current CUDA stream of the thread that calls, but digests, which
    have a stream of their own: they are taken while steps run.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        weights: MutableMapping[str, Tensor],
        handle: HandleKind,
    ) -> None:
        """Build the model, learn what it needs, and give the pool the rest.

        Args:
            config: `pool_pages` may be 0, for as many as fit.
            model_config: the model's.
            weights: on the current CUDA device; emptied of the model's tensors.
            handle: how the pool is passed on.

        Raises:
            InvalidInput: the model is not covered, or it or the pool does not fit.
        """
        ordinal = torch.cuda.current_device()
        self._device = torch.device("cuda", ordinal)
        self._processors = torch.cuda.get_device_properties(ordinal).multi_processor_count
        self.config = config
        self.model_config = model_config
        pages = -(-model_config.longest_sequence // config.page_rows)
        columns = model_config.columns
        self._digest_stream = torch.cuda.Stream()
        try:
            self.model = GpuModel(model_config, weights, config.slots, self._processors)
            self._state = StreamState.empty(config.slots, pages, columns, self._device)
            self._first = StreamState.empty(1, pages, columns, self._device)
            self._only = torch.zeros(config.chunk_rows, dtype=torch.int32, device=self._device)
            self.memory = self._learn_memory()
        except torch.OutOfMemoryError as error:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"model {model_config.name!r} with {config.slots} slots and chunks of "
                f"{config.chunk_rows} rows does not fit on the GPU: {error}",
            ) from error
        pool_pages = fit_pages(self.memory, self._describe(1).page_bytes, config.pool_pages, pages)
        self.config = replace(config, pool_pages=pool_pages)
        description = self._describe(pool_pages)
        self.pool: CudaPool = create_cuda_pool(description, handle, open_devices()[ordinal])
        self._memory: Tensor = torch.as_tensor(self.pool, device=self._device)
        self._kv = PagedKv.of_pool(self._memory, self.pool.description)
        self._graphs = self._capture(self._kv)

    @property
    def statement(self) -> str:
        """What the pool has of the GPU's memory, for the log at start."""
        d = self.pool.description
        return f"pool of {d.pages} pages, {d.pages * d.page_bytes / 2**30:.1f} GiB; before it " + (
            self.memory.describe()
        )

    def new_batch(self) -> GpuBatch:
        """An empty batch; the engine has one at a time, the former one's streams are gone."""
        return GpuBatch(
            self.model_config, self._state, self.config.page_rows, self.config.pool_pages
        )

    def launch_step(self, batch: GpuBatch) -> Flight:
        """Queue a step of the batch's streams; never waits for the GPU.

        The step computes the KV of each stream's newest row and draws its next one, which is
        then the newest: the next step can be launched before this one is read.
        """
        seqs = batch.seqs
        require(len(seqs) > 0, "a step without streams")
        out = self._graphs.step(batch.slots(self._graphs.bucket(len(seqs))))
        rows = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        rows.copy_(out, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Flight(seqs, rows, done)

    def read_step(self, flight: Flight) -> tuple[Tensor, Tensor]:
        """Wait for a step: rows int32 [live, columns], and bool [live], True where the model gave
        no finite numbers and the row means nothing."""
        flight.done.synchronize()
        rows = flight.rows[: len(flight.seqs)]
        return rows[:, :-1], rows[:, -1].bool()

    def decode_step(self, batch: GpuBatch) -> tuple[Tensor, Tensor]:
        """Launch a step and wait for it; result as `read_step`'s."""
        return self.read_step(self.launch_step(batch))

    def prefill_chunk(self, sequence: PrefillSequence) -> Tensor | None:
        """Compute the next chunk of a prompt into its pages, and wait for it.

        Returns:
            With the last chunk: the row drawn after the prompt, int32 [columns]. Else None.

        Raises:
            InvalidInput: the model gave no finite numbers; this sequence cannot go on.
        """
        first = sequence.done_rows
        count = min(self.config.chunk_rows, sequence.prompt_rows - first)
        require(count > 0, f"seq {sequence.start.seq} has no rows left")
        last_row = sequence.rows[sequence.prompt_rows - 1]
        position = sequence.prompt_rows - 1
        fill_slot(
            self._first, 0, self.model_config, sequence.start, last_row, position, drawn=False
        )
        hidden = self._forward(self._kv, sequence.rows[first : first + count], first)
        finite = torch.isfinite(hidden).all()
        drawn = None
        if first + count == sequence.prompt_rows:
            drawn = self._graphs.draw_first(hidden[-1:])[0]
        if not finite.item():
            raise refuse(f"the model gave no finite numbers in rows {first} to {first + count}")
        sequence.done_rows = first + count
        return None if drawn is None else drawn.cpu()[:-1]

    def page_digests(self, pages: Sequence[int], rows: int) -> tuple[bytes, ...]:
        """Digest `pages`, which hold `rows` rows, beside the steps that run, and wait.

        Raises:
            InvalidInput: `rows` do not fill exactly `pages`, or a page is not in the pool.
        """
        with torch.cuda.stream(self._digest_stream):
            return page_digests(self._memory, self.pool.description, pages, rows)

    def close(self) -> None:
        """Wait for the GPU, drop graphs and views, and close the pool."""
        torch.cuda.synchronize()
        self._graphs.close()
        del self._kv, self._memory
        self.pool.close()

    def _forward(self, kv: PagedKv, rows: Tensor, first: int) -> Tensor:
        """Queue `rows`, int64 [count, columns], at positions from `first` on, of the sequence
        whose pages stand in the first-row state; hidden states [count, width]."""
        count = rows.shape[0]
        heads, kv_heads = self.model_config.backbone.heads, self.model_config.backbone.kv_heads
        on_device = rows.int().pin_memory().to(self._device, non_blocking=True)
        positions = torch.arange(first, first + count, dtype=torch.int32, device=self._device)
        places = Places(self._first.tables, self._only[:count], positions)
        tiles = ChunkTiles.of([(0, first, count)], heads, kv_heads, self._device)

        def attend(layer: int, query: Tensor) -> Tensor:
            return launch_attend_chunk(query, kv, layer, places.tables, tiles, heads)

        return self.model.forward(on_device, kv, places, attend)

    def _capture(self, kv: PagedKv) -> EngineGraphs:
        return EngineGraphs(self.model, self._state, self._first, kv, self._processors)

    def _learn_memory(self) -> MemoryUse:
        """Run the largest chunk and capture all graphs over a pool of one page, and look."""
        torch.cuda.synchronize()
        weights = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        before, total = torch.cuda.mem_get_info()
        page = self._describe(1)
        memory = torch.zeros(page.total_bytes, dtype=torch.uint8, device=self._device)
        kv = PagedKv.of_pool(memory, page)
        graphs = self._capture(kv)
        # Every row lands in page 0, over and over: only the memory matters.
        rows = torch.zeros((self.config.chunk_rows, self.model_config.columns), dtype=torch.int64)
        self._forward(kv, rows, 0)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        graphs.close()
        return MemoryUse(total=total, free=free, weights=weights, work=before - free)

    def _describe(self, pages: int) -> PoolDescription:
        backbone = self.model_config.backbone
        return describe_pool(
            layers=backbone.layers,
            page_rows=self.config.page_rows,
            kv_heads=backbone.kv_heads,
            head_dim=backbone.head_dim,
            dtype=_DTYPE_NAMES[self.model.dtype],
            pages=pages,
            arrangement=self.config.arrangement,
        )
