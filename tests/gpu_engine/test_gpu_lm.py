"""Plain language models on one GPU: against transformers from its own files, and against the CPU
engine at the widths and vocabularies of published models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from duplet_core.engine import Start
from duplet_core.messages import Sampling
from duplet_engine.checkpoint import load_checkpoint
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.kv_store import DTYPES
from duplet_engine.model_config import ModelConfig
from duplet_engine.sequences import open_prefill
from duplet_engine.shapes import SHAPES, random_weights
from duplet_pages.engine_config import EngineConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

FLOAT32 = 1e-4
"""As in the CPU's parity tests."""
BFLOAT16_RATIO = 1.25
STEPS = 24
GREEDY = Sampling(1, 0.0, 1.0, 0, 0)
WARM = Sampling(5, 0.9, 0.9, 40, 0)
LENGTHS = (200, 33, 130, 7)
SHAPE: dict[str, Any] = {
    "vocab_size": 5000,
    "hidden_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "initializer_range": 0.08,
}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2"])
def theirs(request: pytest.FixtureRequest) -> Any:
    """transformers' model with random weights, on the CPU in float32."""
    import transformers

    name = {"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2"}[request.param]
    torch.manual_seed(11)
    shape = getattr(transformers, f"{name}Config")(**SHAPE, tie_word_embeddings=name == "Qwen3")
    model = getattr(transformers, f"{name}ForCausalLM")(shape)
    for part, parameter in model.named_parameters():
        if "norm" in part or "bias" in part:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.train(False)
    return model


@pytest.fixture(scope="module")
def directory(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(path)
    return path


def prompts(vocab: int) -> list[np.ndarray]:
    chance = np.random.default_rng(3)
    return [chance.integers(0, vocab, (length, 1)).astype("<i4") for length in LENGTHS]


def rows_of(engine: GpuEngine, asked: list[np.ndarray], sampling: Sampling) -> list[list[int]]:
    """Tokens of each prompt, all streams in one batch, the prompts in chunks."""
    batch, c = engine.new_batch(), engine.config
    pages_each = -(-(max(LENGTHS) + STEPS + 1) // c.page_rows)
    found: list[list[int]] = []
    for seq, prompt in enumerate(asked):
        pages = tuple(range(seq * pages_each, (seq + 1) * pages_each))
        start = Start(seq, pages, prompt.tobytes(), 0, 0, sampling)
        sequence = open_prefill(engine.model_config, start, c.page_rows, c.pool_pages)
        while (first := engine.prefill_chunk(sequence)) is None:
            pass
        found.append([int(first[0])])
        row = first.numpy().astype("<i4").tobytes()
        batch.join(Start(seq, pages, row, len(prompt), STEPS + 1, sampling))
    for _ in range(STEPS):
        rows, broken = engine.decode_step(batch)
        assert not broken.any()
        for seq, row in enumerate(rows.tolist()):
            found[seq].append(row[0])
    return found


def logits_of(directory: Path, dtype: Literal["float32", "bfloat16"], ids: Tensor) -> Tensor:
    """Of a whole prompt, float32 [rows, vocab]."""
    config, weights = load_checkpoint(str(directory), "cuda", DTYPES[dtype], lambda *_: None)
    settings = EngineConfig(
        "monolith", model=str(directory), dtype=dtype, pool_pages=64, slots=2, chunk_rows=256
    )
    engine = GpuEngine(settings, config, weights)
    assert engine._passes is not None
    tables = torch.zeros((8, 32), dtype=torch.int32)
    tables[0] = torch.arange(32)
    hidden = engine._passes._forward(ids[:, None].int(), tables, [(0, 0, len(ids))], engine._kv)
    found = (hidden.float() @ engine.model._head.float().T).cpu()
    engine.close()
    return found


def test_logits_are_transformers(theirs: Any, directory: Path) -> None:
    ids = torch.from_numpy(prompts(SHAPE["vocab_size"])[0][:, 0]).long()
    right = theirs(ids[None]).logits[0].float()
    assert right.square().mean().sqrt() > 0.3
    torch.testing.assert_close(logits_of(directory, "float32", ids), right, rtol=0, atol=FLOAT32)
    rounded = copy.deepcopy(theirs).to(torch.bfloat16)(ids[None]).logits[0].float()

    def error(logits: Tensor) -> float:
        return float((logits - right).square().mean().sqrt())

    assert error(logits_of(directory, "bfloat16", ids)) < BFLOAT16_RATIO * error(rounded)


def test_rows_are_what_transformers_generates(directory: Path) -> None:
    """Greedy, in chunks and in a batch."""
    from transformers import AutoModelForCausalLM

    fresh: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config, weights = load_checkpoint(str(directory), "cuda", torch.float32, lambda *_: None)
    settings = EngineConfig(
        "monolith", model=str(directory), pool_pages=256, slots=4, chunk_rows=64
    )
    engine = GpuEngine(settings, config, weights)
    asked = prompts(config.vocab)
    found = rows_of(engine, asked, GREEDY)
    engine.close()
    for prompt, tokens in zip(asked, found, strict=True):
        ids = torch.from_numpy(np.concatenate((prompt[:, 0], tokens[:-1]))).long()
        right = fresh(ids[None]).logits[0, len(prompt) - 1 :].float()
        drawn = torch.tensor(tokens)
        chosen = right.gather(1, drawn[:, None])[:, 0]
        # The largest, or as large as rounding leaves open.
        assert (chosen >= right.max(-1).values - FLOAT32).all()


def shortened(name: str) -> ModelConfig:
    """A published shape with two layers."""
    shape = SHAPES[name]
    return replace(shape, backbone=replace(shape.backbone, layers=2), longest_sequence=512)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
def test_draws_among_a_whole_vocabulary(name: str) -> None:
    """bfloat16 at published widths: two engines draw the same rows, and sampled ones vary."""
    config = shortened(name)
    device = torch.device("cuda", 0)
    settings = EngineConfig(
        "monolith", model=config.name, dtype="bfloat16", pool_pages=256, slots=4, chunk_rows=64
    )
    asked = prompts(config.vocab)
    found = []
    for _ in range(2):
        engine = GpuEngine(settings, config, random_weights(config, device, torch.bfloat16))
        found.append([rows_of(engine, asked, sampling) for sampling in (GREEDY, WARM)])
        engine.close()
    assert found[0] == found[1]
    greedy, warm = found[0]
    assert greedy != warm
    tokens = [token for stream in warm for token in stream]
    assert len(set(tokens)) > len(tokens) // 2
    assert all(0 <= token < config.vocab for token in tokens)
