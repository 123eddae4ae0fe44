"""Whole engines over checkpoints and shapes: the same rows however they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from duplet_core.engine import Start
from duplet_core.messages import Sampling
from duplet_engine.engine import Engine
from duplet_engine.sequences import open_prefill
from duplet_engine.warmup import warm_up
from duplet_pages.engine_config import EngineConfig
from duplet_pages.prompt import check_prompt
from tests.engine.plain_model import PlainModel
from tests.parity.published import S2_LIKE, write_nested

LENGTHS = (5, 70, 140)
STEPS = 12
GREEDY = Sampling(seed=1, temperature=0.0, top_p=1.0, top_k=0, repetition_window=0)
DRAWN = Sampling(seed=5, temperature=0.9, top_p=0.9, top_k=40, repetition_window=10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_nested(directory, S2_LIKE)
    return directory


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def make(engines: list[Engine], model: str, **settings: object) -> Engine:
    fields: dict[str, object] = {"role": "monolith", "pool_pages": 128, "model": model} | settings
    engines.append(Engine(EngineConfig(**fields)))  # type: ignore[arg-type]
    return engines[-1]


def prompts(engine: Engine) -> list[np.ndarray]:
    c, rng = engine.model_config, np.random.default_rng(3)
    made = []
    for length in LENGTHS:
        rows = np.zeros((length, c.columns), dtype="<i4")
        rows[:, 0] = rng.integers(0, 150, length)
        if c.codebooks:
            rows[::2, 1:] = rng.integers(0, 64, (len(rows[::2]), c.codebooks))
            rows[::2, 0] = c.semantic_first + rows[::2, 1]
        assert check_prompt(rows.tobytes(), c.columns, engine.spec) == length
        made.append(rows)
    return made


def run(engine: Engine, which: list[int], sampling: Sampling) -> list[list[list[int]]]:
    """`1 + STEPS` rows of some of the prompts, all in one batch; goes on after stop rows."""
    batch, rows = engine.new_batch(), []
    for seq, index in enumerate(which):
        prompt = prompts(engine)[index]
        pages = tuple(range(seq * 10, seq * 10 + 10))
        start = Start(seq, pages, prompt.tobytes(), 0, 0, sampling)
        sequence = open_prefill(engine.model_config, start, 16, 128)
        while (first := engine.prefill_chunk(sequence)) is None:
            pass
        packed = first.numpy().astype("<i4").tobytes()
        batch.join(Start(seq, pages, packed, len(prompt), STEPS + 1, sampling))
        rows.append([first.tolist()])
    for _ in range(STEPS):
        drawn, broken = engine.decode_step(batch)
        assert not broken.any()
        for known, row in zip(rows, drawn.tolist(), strict=True):
            known.append(row)
    return rows


@pytest.mark.parametrize("model", ["random:small-dual-ar", "random:small-lm", "checkpoint"])
def test_rows_do_not_depend_on_company_chunks_or_layout(
    model: str, checkpoint: Path, engines: list[Engine]
) -> None:
    name = str(checkpoint) if model == "checkpoint" else model
    plain = make(engines, name)
    small = make(engines, name, chunk_rows=32, arrangement="layer-major")
    assert plain.spec == small.spec
    alone = [run(plain, [index], DRAWN)[0] for index in range(len(LENGTHS))]
    assert len({str(rows) for rows in alone}) == len(LENGTHS)
    assert run(small, [0, 1, 2], DRAWN) == alone


def test_greedy_rows_of_a_checkpoint_are_the_plain_models(
    checkpoint: Path, engines: list[Engine]
) -> None:
    engine = make(engines, str(checkpoint), chunk_rows=32)
    spec = engine.spec
    assert (spec.name, spec.layers, spec.dtype) == (checkpoint.name, 3, "float32")
    plain = PlainModel(S2_LIKE, write_nested(checkpoint, S2_LIKE))
    known = prompts(engine)[1].astype(np.int64)
    for row in run(engine, [1], GREEDY)[0]:
        assert plain.greedy_row(torch.from_numpy(known)) == row
        known = np.concatenate((known, [row]))


@pytest.mark.parametrize("model", ["tiny", "random:small-dual-ar", "random:small-lm"])
def test_bfloat16_engines_serve(model: str, engines: list[Engine]) -> None:
    engine = make(engines, model, dtype="bfloat16")
    exact = make(engines, model)
    assert engine.pool.array.dtype == np.uint16
    assert engine.pool.description.dtype == engine.spec.dtype == "bfloat16"
    assert engine.spec.fingerprint != exact.spec.fingerprint
    warm_up(engine)
    rows = run(engine, [0, 1, 2], DRAWN)
    assert len({str(known) for known in rows}) == len(LENGTHS)
    assert engine.pool.array.any()
