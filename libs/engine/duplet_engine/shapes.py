"""Shapes of known models with random weights: benchmarks and tests without a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch
import xxhash
from torch import Tensor

from duplet_engine.model_config import ModelConfig, RopeScaling, TransformerConfig
from duplet_engine.published_configs import DUAL_AR_ROWS_PER_SECOND, codebook_sizes
from duplet_engine.weights import tensor_shapes
from duplet_pages.engine_config import RANDOM
from duplet_pages.spec import SamplingDefaults

_SEED = 1
_EMBEDDING_STD = 0.02


def _stack(
    layers: int, width: int, heads: tuple[int, int, int], mlp: int, *, base: float
) -> TransformerConfig:
    """A stack as Llama has it. `heads`: query heads, KV heads, head dim."""
    return TransformerConfig(
        layers=layers,
        width=width,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        mlp=mlp,
        qk_norm=False,
        qkv_bias=False,
        out_bias=False,
        rope_base=base,
        rope_scaling=None,
        rope_rounded=False,
        norm_eps=1e-6,
    )


def _dual_ar(
    backbone: TransformerConfig,
    small: TransformerConfig,
    *,
    codes: tuple[int, int],
    ids: tuple[int, int, int],
    longest: int,
) -> ModelConfig:
    """`codes`: codebooks and entries; `ids`: first semantic, stop, vocabulary."""
    return ModelConfig(
        name="",
        vocab=ids[2],
        tied_head=True,
        backbone=replace(backbone, qk_norm=True, rope_rounded=True),
        codebook_transformer=replace(small, rope_rounded=True),
        hidden_after_norm=True,
        scaled_embeddings=True,
        codebooks=codes[0],
        codebook_entries=codes[1],
        codebook_sizes=codebook_sizes(*codes),
        semantic_first=ids[0],
        semantic_last=ids[0] + codes[1] - 1,
        stop_id=ids[1],
        other_stop_ids=(),
        longest_sequence=longest,
        default_max_rows=1024,
        rows_per_second=DUAL_AR_ROWS_PER_SECOND,
        sampling=SamplingDefaults(),
    )


def _plain(backbone: TransformerConfig, vocab: int, stop_id: int, longest: int) -> ModelConfig:
    return ModelConfig(
        name="",
        vocab=vocab,
        tied_head=True,
        backbone=backbone,
        codebook_transformer=None,
        hidden_after_norm=True,
        scaled_embeddings=False,
        codebooks=0,
        codebook_entries=0,
        codebook_sizes=(),
        semantic_first=0,
        semantic_last=0,
        stop_id=stop_id,
        other_stop_ids=(),
        longest_sequence=longest,
        default_max_rows=1024,
        rows_per_second=0.0,
        sampling=SamplingDefaults(),
    )


_FISH_IDS = (151_678, 151_645, 155_776)
_LLAMA_3_2 = RopeScaling(factor=32.0, low_factor=1.0, high_factor=4.0, original_positions=8192)

_NAMELESS = {
    "s2-pro": _dual_ar(
        _stack(36, 2560, (32, 8, 128), 9728, base=1e6),
        _stack(4, 2560, (32, 8, 128), 9728, base=1e6),
        codes=(10, 4096),
        ids=_FISH_IDS,
        longest=32_768,
    ),
    "s1-mini": replace(
        _dual_ar(
            _stack(28, 1024, (16, 8, 128), 3072, base=1e6),
            _stack(4, 1024, (16, 8, 64), 3072, base=1e6),
            codes=(10, 4096),
            ids=_FISH_IDS,
            longest=8192,
        ),
        tied_head=False,
        hidden_after_norm=False,
        scaled_embeddings=False,
    ),
    "qwen3-0.6b": _plain(
        replace(_stack(28, 1024, (16, 8, 128), 3072, base=1e6), qk_norm=True),
        vocab=151_936,
        stop_id=151_645,
        longest=40_960,
    ),
    "llama-3.2-1b": _plain(
        replace(
            _stack(16, 2048, (32, 8, 64), 8192, base=5e5), norm_eps=1e-5, rope_scaling=_LLAMA_3_2
        ),
        vocab=128_256,
        stop_id=128_009,
        longest=131_072,
    ),
    "llama-3.2-3b": _plain(
        replace(
            _stack(28, 3072, (24, 8, 128), 8192, base=5e5), norm_eps=1e-5, rope_scaling=_LLAMA_3_2
        ),
        vocab=128_256,
        stop_id=128_009,
        longest=131_072,
    ),
    "small-dual-ar": replace(
        _dual_ar(
            _stack(3, 96, (6, 2, 32), 256, base=1e4),
            _stack(2, 64, (4, 2, 16), 128, base=1e4),
            codes=(4, 96),
            ids=(200, 150, 300),
            longest=2048,
        ),
        tied_head=False,
        hidden_after_norm=False,
    ),
    "small-lm": _plain(
        replace(_stack(3, 96, (6, 2, 32), 256, base=1e4), qk_norm=True, qkv_bias=True),
        vocab=300,
        stop_id=2,
        longest=2048,
    ),
}
SHAPES = {name: replace(shape, name=f"{RANDOM}{name}") for name, shape in _NAMELESS.items()}
"""By the name that follows 'random:'. The small ones are for tests."""


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = _SEED
) -> dict[str, Tensor]:
    """Weights of a config's shape, made on `device`; they keep the hidden state's size.

    Equal for equal seeds on equal devices under one version of torch. A CPU's and a GPU's differ.
    """
    weights = {}
    for name, shape in tensor_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            weights[name] = tensor.fill_(1.0)
            continue
        generator = torch.Generator(device)
        generator.manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> 1)
        table = len(shape) == 1 or "embeddings" in name
        std = _EMBEDDING_STD if table else shape[1] ** -0.5
        weights[name] = tensor.normal_(0.0, std, generator=generator)
    return weights
