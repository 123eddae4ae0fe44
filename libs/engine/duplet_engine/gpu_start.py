"""Start of an engine on a GPU: weights, engine, warm-up, and the loop of its role."""

from __future__ import annotations

import os

import numpy as np
import torch

from duplet_core.engine import Start
from duplet_core.errors import InvalidInput, Reason
from duplet_core.messages import Sampling
from duplet_engine.checkpoint import Progress, load_checkpoint
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.gpu_loop import StepLoop, run_normal, run_overlap
from duplet_engine.gpu_prefill_loop import PassLoop, run_prefill
from duplet_engine.kv_store import DTYPES
from duplet_engine.link import Link
from duplet_engine.load_progress import tell_memory
from duplet_engine.monolith_loop import MonolithLoop
from duplet_engine.sequences import open_prefill
from duplet_memory.cuda_driver import CudaError
from duplet_pages.engine_config import EngineConfig


def start_gpu(config: EngineConfig, progress: Progress) -> tuple[GpuEngine, GpuLoop]:
    """As `duplet_engine.backends.start_backend`, on the one GPU that this process sees."""
    if not torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise InvalidInput(
            Reason.INVALID_REQUEST,
            f"device: cuda, but no GPU is visible (CUDA_VISIBLE_DEVICES is {seen!r}, "
            f"torch {torch.__version__})",
        )
    try:
        model_config, weights = load_checkpoint(
            config.model, "cuda", DTYPES[config.dtype], progress
        )
        engine = GpuEngine(config, model_config, weights)
    except torch.OutOfMemoryError as error:
        raise InvalidInput(
            Reason.INVALID_REQUEST, f"model {config.model!r} does not fit on the GPU: {error}"
        ) from error
    except CudaError as error:
        raise InvalidInput(Reason.INVALID_REQUEST, f"device: cuda: {error.detail}") from error
    warm_up(engine)
    tell_memory(config.role, config.model, engine.statement)
    return engine, GpuLoop(engine)


class GpuLoop:
    """The loop of the engine's role, in the variant that its config asks for."""

    def __init__(self, engine: GpuEngine) -> None:
        self._engine = engine

    def __call__(self, link: Link) -> None:
        """Serve until Shutdown."""
        engine = self._engine
        overlap = engine.config.overlap
        if engine.config.role == "prefill":
            run_prefill(engine, link)
        elif engine.config.role == "monolith":
            ahead = 1 if overlap else 0
            MonolithLoop(link, PassLoop(engine, link, ahead), StepLoop(engine, link, ahead)).run()
        elif overlap:
            run_overlap(engine, link)
        else:
            run_normal(engine, link)


def warm_up(engine: GpuEngine) -> None:
    """Run what the role does once, in the first pages of the pool, which nobody knows yet."""
    config, model = engine.config, engine.model_config
    pages = tuple(range(min(2, config.pool_pages)))
    rows = len(pages) * config.page_rows - 4
    if rows < 1:
        return
    sampling = Sampling(seed=0, temperature=1.0, top_p=1.0, top_k=0, repetition_window=1)
    if config.role != "decode":
        prompt = np.zeros((rows, model.columns), dtype="<i4").tobytes()
        start = Start(0, pages, prompt, 0, 0, sampling)
        sequence = open_prefill(model, start, config.page_rows, config.pool_pages)
        while engine.prefill_chunk(sequence) is None:
            pass
    if config.role != "prefill":
        batch = engine.new_batch()
        first = np.zeros(model.columns, dtype="<i4").tobytes()
        batch.join(Start(0, pages, first, rows, 4, sampling))
        for _ in range(2):
            engine.decode_step(batch)
        valid = [min(config.page_rows, rows - i * config.page_rows) for i in range(len(pages))]
        engine.read_digests(engine.launch_digests(pages, valid))
