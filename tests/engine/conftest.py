from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from duplet_engine.engine import Engine
from duplet_pages.engine_config import EngineConfig

MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def one_thread_without_gradients() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Makes engines of given settings; closes them at the end."""
    engines: list[Engine] = []

    def make(**settings: object) -> Engine:
        fields = {"role": "monolith", "model": "tiny", "pool_pages": 256} | settings
        engines.append(Engine(EngineConfig(**fields)))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
