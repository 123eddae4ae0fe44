"""One model over one pool on one GPU: passes over prompts, decode steps and digests, each in two
halves: queued by `launch_…`, waited for by `read_…`."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from duplet_core.chunks import ChunkPart
from duplet_core.errors import InvalidInput, Reason, require
from duplet_engine.gpu_batch import GpuBatch
from duplet_engine.gpu_digests import DigestFlight, PageDigests
from duplet_engine.gpu_graphs import BucketGraphs, capture_steps
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_memory import MemoryUse, fit_pages
from duplet_engine.gpu_model import GpuModel
from duplet_engine.gpu_passes import Named, PassFlight, PromptPasses
from duplet_engine.gpu_prefill_loop import MOST_PARTS, PassDone
from duplet_engine.gpu_state import StreamState
from duplet_engine.kv_hash import KV_HASH
from duplet_engine.model_config import ModelConfig
from duplet_engine.model_spec import describe_model
from duplet_engine.sequences import PrefillSequence, refuse
from duplet_engine.weights import fingerprint
from duplet_memory.cuda_driver import open_devices
from duplet_memory.cuda_pool import CudaPool, create_cuda_pool
from duplet_memory.layout import ENGINES_HANDLE, PoolDescription, describe_pool
from duplet_pages.engine_config import EngineConfig

_ARITHMETIC = "gpu-blocks-4"
"""Name of how the GPU engine computes; changes with anything that changes KV."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched. Owns the pinned memory that its rows are copied to."""

    seqs: tuple[int, ...]
    """Of its rows, in order."""
    rows: Tensor
    """int32 [bucket, columns + 1], valid once `done` is."""
    done: torch.cuda.Event


class GpuEngine:
    """Model, graphs and pool: what its role needs of them, and no state of sequences. Owns them
    from construction to `close`.

    Everything is queued on the current CUDA stream of the thread that calls, but digests, which
    have a stream of their own: they are taken while steps run.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        weights: MutableMapping[str, Tensor],
    ) -> None:
        """Build the model, learn what it needs, and give the pool the rest.

        Args:
            config: `pool_pages` may be 0, for as many as fit; `self.config` has their number.
            model_config: the model's.
            weights: of `config.dtype`, on the current CUDA device; emptied of the model's tensors.

        Raises:
            InvalidInput: the model is not covered, or it or the pool does not fit.
            CudaError: the driver refused the pool or its handle.
        """
        ordinal = torch.cuda.current_device()
        self._device = next(iter(weights.values())).device
        self._processors = torch.cuda.get_device_properties(ordinal).multi_processor_count
        self.config = config
        self.model_config = model_config
        weights_fingerprint = fingerprint(weights, _arithmetic(ordinal))
        self.spec = describe_model(config, model_config, weights_fingerprint, KV_HASH)
        table_pages = -(-model_config.longest_sequence // config.page_rows)
        self._state: StreamState | None = None
        self._passes: PromptPasses | None = None
        try:
            rows = max(config.slots, MOST_PARTS)
            self.model = GpuModel(model_config, weights, rows)
            if config.role != "prefill":
                self._state = StreamState.empty(
                    config.slots, table_pages, model_config.columns, self._device
                )
            if config.role != "decode":
                most_rows = max(config.chunk_rows, config.page_rows)
                self._passes = PromptPasses(
                    self.model, config.page_rows, most_rows, self._processors
                )
            self.memory = self._learn_memory()
        except torch.OutOfMemoryError as error:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"model {model_config.name!r} with {config.slots} slots and chunks of "
                f"{config.chunk_rows} rows does not fit on the GPU: {error}",
            ) from error
        page_bytes = self._describe(1).page_bytes
        pool_pages = fit_pages(self.memory, page_bytes, config.pool_pages, table_pages)
        self.config = replace(config, pool_pages=pool_pages)
        description = self._describe(pool_pages)
        self.pool: CudaPool = create_cuda_pool(description, ENGINES_HANDLE, open_devices()[ordinal])
        memory = torch.as_tensor(self.pool, device=self._device)
        self._kv = PagedKv.of_pool(memory, self.pool.description)
        self._digests = PageDigests(memory, self.pool.description)
        self._steps = self._capture_steps(self._kv)
        if self._passes is not None:
            self._passes.prepare(self._kv)

    @property
    def statement(self) -> str:
        """What the pool has of the GPU's memory, for the log at start."""
        d = self.pool.description
        return f"pool of {d.pages} pages, {d.pages * d.page_bytes / 2**30:.1f} GiB; before it " + (
            self.memory.describe()
        )

    # --- decode ---------------------------------------------------------------------

    def new_batch(self) -> GpuBatch:
        """An empty batch; the engine has one at a time, the former one's streams are gone."""
        assert self._state is not None, "prefill decodes nothing"
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
        assert self._steps is not None, "prefill decodes nothing"
        out = self._steps.replay(batch.slots(self._steps.bucket(len(seqs))))
        rows = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        rows.copy_(out, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Flight(seqs, rows, done)

    def step_done(self, flight: Flight) -> bool:
        """Whether `read_step` would not wait."""
        return bool(flight.done.query())

    def read_step(self, flight: Flight) -> tuple[Tensor, Tensor]:
        """Wait for a step: rows int32 [live, columns], and bool [live], True where the model gave
        no finite numbers and the row means nothing."""
        flight.done.synchronize()
        rows = flight.rows[: len(flight.seqs)]
        return rows[:, :-1], rows[:, -1].bool()

    def decode_step(self, batch: GpuBatch) -> tuple[Tensor, Tensor]:
        """Launch a step and wait for it; result as `read_step`'s."""
        return self.read_step(self.launch_step(batch))

    # --- prefill ----------------------------------------------------------------------

    def launch_pass(self, parts: Sequence[Named]) -> PassFlight:
        """Queue a pass over rows of some prompts, the draws of those that end, and, beside what
        runs, digests where KV is to be moved; never waits for the GPU."""
        assert self._passes is not None, "decode computes no prompts"
        return self._passes.launch(parts, self._kv, self._moved_digests)

    def read_pass(self, flight: PassFlight) -> PassDone:
        """Wait for a pass and its digests."""
        assert self._passes is not None, "decode computes no prompts"
        return self._passes.read(flight, self._moved_digests)

    def prefill_chunk(self, sequence: PrefillSequence) -> Tensor | None:
        """Compute the next chunk of a prompt in a pass of its own, and wait for it.

        Returns:
            With the last chunk: the row drawn after the prompt, int32 [columns]. Else None.

        Raises:
            InvalidInput: the model gave no finite numbers; this sequence cannot go on.
        """
        first = sequence.done_rows
        count = min(self.config.chunk_rows, sequence.prompt_rows - first)
        require(count > 0, f"seq {sequence.start.seq} has no rows left")
        last = first + count == sequence.prompt_rows
        part = ChunkPart(sequence.start.seq, first, count, last)
        (done,) = self.read_pass(self.launch_pass([(sequence, part)])).parts
        if not done.finite:
            raise refuse(f"the model gave no finite numbers in rows {first} to {first + count}")
        sequence.done_rows = first + count
        return done.row

    @property
    def _moved_digests(self) -> PageDigests | None:
        """The monolith moves nothing, so nobody checks."""
        return None if self.config.role == "monolith" else self._digests

    # --- digests ----------------------------------------------------------------------

    def launch_digests(self, pages: Sequence[int], valid_rows: Sequence[int]) -> DigestFlight:
        """Queue the digests of pages that are written already, beside the steps that run.

        Args:
            pages: of the pool, at least one.
            valid_rows: rows of each page that count, in [1, page_rows].
        """
        return self._digests.launch(pages, valid_rows, after=None)

    def digests_done(self, flight: DigestFlight) -> bool:
        """Whether `read_digests` would not wait."""
        return self._digests.is_done(flight)

    def read_digests(self, flight: DigestFlight) -> tuple[bytes, ...]:
        """Wait for digests, 16 bytes a page."""
        return self._digests.read(flight)

    def close(self) -> None:
        """Wait for the GPU, drop graphs and views, and close the pool."""
        torch.cuda.synchronize()
        for graphs in (self._steps, self._passes):
            if graphs is not None:
                graphs.close()
        del self._kv, self._digests
        self.pool.close()

    def _capture_steps(self, kv: PagedKv) -> BucketGraphs | None:
        if self._state is None:
            return None
        return capture_steps(self.model, self._state, kv, self._processors)

    def _learn_memory(self) -> MemoryUse:
        """Run the largest pass and capture the steps over a pool of one page, and look."""
        torch.cuda.synchronize()
        weights = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        before, total = torch.cuda.mem_get_info()
        page = self._describe(1)
        memory = torch.zeros(page.total_bytes, dtype=torch.uint8, device=self._device)
        kv = PagedKv.of_pool(memory, page)
        steps = self._capture_steps(kv)
        if self._passes is not None:
            self._passes.prepare(kv)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        if steps is not None:
            steps.close()
        return MemoryUse(total=total, free=free, weights=weights, work=before - free)

    def _describe(self, pages: int) -> PoolDescription:
        backbone = self.model_config.backbone
        return describe_pool(
            layers=backbone.layers,
            page_rows=self.config.page_rows,
            kv_heads=backbone.kv_heads,
            head_dim=backbone.head_dim,
            dtype=self.config.dtype,
            pages=pages,
            arrangement=self.config.arrangement,
        )


def _arithmetic(ordinal: int) -> str:
    """What decides the last bits on this GPU."""
    major, minor = torch.cuda.get_device_capability(ordinal)
    return f"{_ARITHMETIC} sm_{major}{minor} triton {triton.__version__}"
