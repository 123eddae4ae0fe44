"""The engine of a device, warm, and the loop of its role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from duplet_core.errors import InvalidInput, Reason
from duplet_engine.arithmetic import describe_products
from duplet_engine.checkpoint import Progress
from duplet_engine.decode_loop import DecodeLoop, run_decode
from duplet_engine.engine import Engine
from duplet_engine.link import Link
from duplet_engine.load_progress import tell_products
from duplet_engine.monolith_loop import MonolithLoop
from duplet_engine.prefill_loop import PrefillLoop, run_prefill
from duplet_engine.step_times import SteppedEngine
from duplet_engine.warmup import warm_up
from duplet_memory.layout import PoolDescription
from duplet_pages.engine_config import EngineConfig
from duplet_pages.spec import ModelSpec

RunLoop = Callable[[Link], None]
"""Serves until Shutdown."""


class SharedPool(Protocol):
    """`duplet_memory.pool.Pool` or `duplet_memory.cuda_pool.CudaPool`."""

    description: PoolDescription

    @property
    def fd(self) -> int: ...


class AnyEngine(SteppedEngine, Protocol):
    """What Ready and the end need of an engine."""

    spec: ModelSpec

    @property
    def pool(self) -> SharedPool: ...
    def close(self) -> None: ...


def start_backend(config: EngineConfig, progress: Progress) -> tuple[AnyEngine, RunLoop]:
    """Load the model, make the pool and run everything once. The caller owns the engine.

    Raises:
        InvalidInput: the config asks for what is not there or does not fit.
    """
    if config.device == "cpu":
        engine = Engine(config, progress)
        tell_products(config.role, config.model, describe_products(engine.model.product_kinds))
        warm_up(engine)
        return engine, _cpu_loop(engine)
    if config.damage_pages:
        raise InvalidInput(Reason.INVALID_REQUEST, "damage_pages: only a CPU's KV is damaged")
    # Kernels need Triton, which an installation for the CPU does not have.
    from duplet_engine.gpu_start import start_gpu

    return start_gpu(config, progress)


def _cpu_loop(engine: Engine) -> RunLoop:
    def run(link: Link) -> None:
        if engine.config.role == "prefill":
            run_prefill(engine, link)
        elif engine.config.role == "decode":
            run_decode(engine, link)
        else:
            MonolithLoop(link, PrefillLoop(engine, link), DecodeLoop(engine, link)).run()

    return run
