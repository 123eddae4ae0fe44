"""What transformers makes of the same backbone: one decode step of its `generate`."""

from __future__ import annotations

import time
from typing import Any

import torch

from duplet_engine.model_config import ModelConfig

FEW, MANY = 2, 18
"""Output rows of the two runs whose difference is steps alone."""


def transformers_step_ms(config: ModelConfig, streams: int, prompt_rows: int) -> float:
    """Mean time of a step of `streams` sequences behind prompts of `prompt_rows`, on the current
    GPU: random bfloat16 weights of the backbone's shape, sdpa, no codebooks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    c = config.backbone
    shape = Qwen3Config(
        vocab_size=config.vocab,
        hidden_size=c.width,
        intermediate_size=c.mlp,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        tie_word_embeddings=True,
    )
    shape._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM(shape)  # type: ignore[no-untyped-call]
    model.eval()
    torch.set_default_dtype(before)
    ids = torch.randint(0, 1000, (streams, prompt_rows), device="cuda")

    def seconds(rows: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=rows,
            min_new_tokens=rows,
            do_sample=False,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(FEW)
    few = seconds(FEW)
    return (seconds(MANY) - few) / (MANY - FEW) * 1e3
