"""First calls are slow: they are made before Ready, so that no request pays for them."""

from __future__ import annotations

import numpy as np

from duplet_core.engine import Start
from duplet_core.messages import Sampling
from duplet_engine.engine import Engine
from duplet_engine.sequences import open_prefill


def warm_up(engine: Engine) -> None:
    """Run a prompt and a few steps in the first pages of the pool, which nobody knows yet."""
    config, model = engine.config, engine.model_config
    rows = min(2 * config.page_rows, config.pool_pages * config.page_rows) - 4
    if rows < 1:
        return
    pages = tuple(range(min(2, config.pool_pages)))
    sampling = Sampling(seed=0, temperature=1.0, top_p=1.0, top_k=0, repetition_window=1)
    prompt = np.zeros((rows, model.columns), dtype="<i4").tobytes()
    sequence = open_prefill(
        model, Start(0, pages, prompt, 0, 0, sampling), config.page_rows, config.pool_pages
    )
    while engine.prefill_chunk(sequence) is None:
        pass
    batch = engine.new_batch()
    first = np.zeros(model.columns, dtype="<i4").tobytes()
    batch.join(Start(0, pages, first, rows, 4, sampling))
    for _ in range(2):
        engine.decode_step(batch)
