"""Backbone logits against transformers, from the files that transformers itself writes.

Tolerances. float32: both sides round every product and sum to 24 bits, in different orders;
over these depths and widths that leaves errors of about 1e-5 of the logits' size (1 to 4), so
1e-4 is ten times what is seen, and a wrong pairing in RoPE, a missing bias or norm is off by
more than 1e-1. bfloat16 has 8 bits: the two sides round at different places (ours once after
each group of operations), each about 2^-9 of its value, several dozen times in a row. Both are
therefore compared with the float32 logits of the same weights: ours may be off by 1.25 times
what transformers' own bfloat16 run is off, in the root mean square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from duplet_engine.checkpoint import load_checkpoint
from duplet_engine.kv_store import DTYPES
from duplet_engine.model import DualAr
from duplet_pages.engine_config import Arrangement
from tests.parity.paged import PagedModel

FLOAT32 = 1e-4
BFLOAT16_RATIO = 1.25
SHAPE: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 200,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama3-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": LLAMA3,
        },
    ),
}
PAGES = [list(range(first, first + 16)) for first in (3, 40, 70, 100)]


@dataclass
class Twins:
    """transformers' model, and ours from its files."""

    theirs: PreTrainedModel
    directory: Path

    def ours(self, dtype: str = "float32") -> DualAr:
        config, weights = load_checkpoint(
            str(self.directory), "cpu", DTYPES[dtype], lambda done, total: None
        )
        return DualAr(config, weights)

    def their_logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.theirs(ids[None]).logits[0]
        return logits.float()


def make(kind: str, directory: Path) -> Twins:
    # Any: transformers' constructors carry no types.
    model_class, config_class, more = MODELS[kind]
    torch.manual_seed(11)
    model: PreTrainedModel = model_class(config_class(**SHAPE, **more))
    for name, parameter in model.named_parameters():
        # transformers starts norms at one and biases at zero, which would hide their absence.
        if "norm" in name or "bias" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.train(False)
    model.save_pretrained(directory, max_shard_size="100KB")
    return Twins(model, directory)


@pytest.fixture(scope="module", params=MODELS)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def paged(twins: Twins) -> Iterator[PagedModel]:
    model = PagedModel(twins.ours(), "float32")
    yield model
    model.close()


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 250, (n, 1), generator=generator) for n in (200, 33, 130, 7)]


def test_logits_of_whole_prompts_are_theirs(twins: Twins, paged: PagedModel) -> None:
    assert len(list(twins.directory.glob("*.safetensors"))) > 3
    for rows, pages in zip(prompts(), PAGES, strict=True):
        theirs = twins.their_logits(rows[:, 0])
        assert theirs.square().mean().sqrt() > 0.5
        ours = paged.logits(paged.chunks(rows, pages, []))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("arrangement", ["page-major", "layer-major"])
def test_paging_chunks_and_prefix_hits_change_no_bit(
    twins: Twins, arrangement: Arrangement
) -> None:
    rows, other = prompts()[0], prompts()[2]
    theirs = twins.their_logits(rows[:, 0])
    paged = PagedModel(twins.ours(), "float32", arrangement)
    whole = paged.chunks(rows, PAGES[0], [])
    torch.testing.assert_close(paged.logits(whole), theirs, rtol=0, atol=FLOAT32)
    scattered = PAGES[1][::-1]
    assert torch.equal(paged.chunks(rows, scattered, [16, 17, 96, 150]), whole)
    # A prompt that shares 64 rows takes those four pages and computes the rest.
    shared = torch.cat((rows[:64], other[64:]))
    pages = [*PAGES[0][:4], *PAGES[2][4:]]
    hit = paged.chunk(shared, pages, 64, len(shared))
    expected = twins.their_logits(shared[:, 0])[64:]
    torch.testing.assert_close(paged.logits(hit), expected, rtol=0, atol=FLOAT32)
    assert torch.equal(hit, paged.chunks(shared, PAGES[3], [])[64:])
    paged.close()


def test_steps_in_a_batch_are_theirs_and_as_if_alone(twins: Twins, paged: PagedModel) -> None:
    known = prompts()
    more = torch.randint(0, 250, (4, 6, 1), generator=torch.Generator().manual_seed(6))
    for rows, pages in zip(known, PAGES, strict=True):
        paged.chunks(rows, pages, [])
    for step in range(6):
        known = [torch.cat((rows, more[i, step][None])) for i, rows in enumerate(known)]
        together = paged.step(known, PAGES)
        alone = torch.cat([paged.step([r], [p]) for r, p in zip(known, PAGES, strict=True)])
        assert torch.equal(together, alone)
    logits = paged.logits(together)
    for index, rows in enumerate(known):
        theirs = twins.their_logits(rows[:, 0])[-1]
        torch.testing.assert_close(logits[index], theirs, rtol=0, atol=FLOAT32)


def test_bfloat16_is_as_near_to_float32_as_theirs(twins: Twins) -> None:
    paged = PagedModel(twins.ours("bfloat16"), "bfloat16")
    rows = prompts()[0]
    exact = twins.their_logits(rows[:, 0])
    cut = paged.logits(paged.chunks(rows[:-1], PAGES[0], [16, 80]))
    stepped = paged.logits(paged.step([rows], [PAGES[0]]))
    rough = type(twins.theirs).from_pretrained(twins.directory, dtype=torch.bfloat16)
    theirs = rough(rows[None, :, 0]).logits[0].float()
    ours = torch.cat((cut, stepped))
    their_error = (theirs - exact).square().mean().sqrt()
    assert their_error < 0.1 * exact.square().mean().sqrt()
    assert (ours - exact).square().mean().sqrt() < BFLOAT16_RATIO * their_error
    # The last row came by a decode step over bfloat16 pages; it is no worse than the others.
    assert (stepped - exact[-1:]).abs().max() < 6 * their_error
    paged.close()
