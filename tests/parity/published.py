"""Dual-AR checkpoints on disk, named and cut as their publishers do it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from duplet_engine.model_config import ModelConfig, TransformerConfig
from duplet_engine.shapes import SHAPES
from duplet_engine.weights import tensor_shapes

SMALL = SHAPES["small-dual-ar"]
S2_LIKE = replace(
    SMALL,
    tied_head=True,
    hidden_after_norm=True,
    codebook_transformer=replace(SMALL.backbone, layers=2, qk_norm=False),
)
"""Tied head, hidden after the final norm, equal widths, q/k norm in the backbone only."""
FLAT = replace(
    SMALL,
    backbone=replace(SMALL.backbone, qk_norm=False, qkv_bias=True, out_bias=True),
    scaled_embeddings=False,
)
"""Own head, hidden before the norm, a projection between the widths, biases, no scaling."""


def random_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Weights that use every tensor: norms around one, biases around zero."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = 0.3 * noise + float(name.endswith("norm.weight"))
        else:
            tensors[name] = noise * (0.5 if "embeddings" in name else 1.5 * shape[1] ** -0.5)
    return tensors


def flat_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        if name == "audio_decoder.codebook_embeddings.weight":
            name = "codebook_embeddings.weight"
        renamed[name.replace("text_model.model.", "").replace("audio_decoder.", "fast_")] = tensor
    return renamed


def separate_qkv(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    cut = {}
    for name, tensor in tensors.items():
        if ".wqkv." not in name:
            cut[name] = tensor
            continue
        small = config.codebook_transformer
        stack = small if small and name.startswith(("fast_", "audio_")) else config.backbone
        sizes = [n * stack.head_dim for n in (stack.heads, stack.kv_heads, stack.kv_heads)]
        for letter, part in zip("qkv", torch.split(tensor, sizes), strict=True):
            cut[name.replace("wqkv", f"w{letter}")] = part.contiguous()
    return cut


def stack_fields(config: TransformerConfig) -> dict[str, Any]:
    return {
        "n_layer": config.layers,
        "dim": config.width,
        "n_head": config.heads,
        "n_local_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "attention_qk_norm": config.qk_norm,
        "attention_qkv_bias": config.qkv_bias,
        "attention_o_bias": config.out_bias,
        "rope_base": config.rope_base,
        "norm_eps": config.norm_eps,
    }


def nested_config(config: ModelConfig) -> dict[str, Any]:
    """S2-Pro's `config.json`."""
    small = config.codebook_transformer
    assert small is not None
    return {
        "model_type": "fish_qwen3_omni",
        "dtype": "bfloat16",
        "eos_token_id": config.stop_id,
        "pad_token_id": 151,
        "semantic_start_token_id": config.semantic_first,
        "semantic_end_token_id": config.semantic_last,
        "text_config": stack_fields(config.backbone)
        | {
            "vocab_size": config.vocab,
            "max_seq_len": config.longest_sequence,
            "tie_word_embeddings": config.tied_head,
            "use_moe": False,
        },
        "audio_decoder_config": stack_fields(small)
        | {
            "vocab_size": config.codebook_entries,
            "num_codebooks": config.codebooks,
            "max_seq_len": config.columns,
            "text_dim": config.backbone.width,
        },
    }


def flat_config(config: ModelConfig) -> dict[str, Any]:
    """The older `config.json`, as S1-mini has it: without the ids of its tokens."""
    small = config.codebook_transformer
    assert small is not None
    fast = stack_fields(small)
    shared = {"n_layer", "rope_base", "norm_eps"}
    return {
        "model_type": "dual_ar",
        **stack_fields(config.backbone),
        **{f"fast_{name}": value for name, value in fast.items() if name not in shared},
        "n_fast_layer": small.layers,
        "vocab_size": config.vocab,
        "codebook_size": config.codebook_entries,
        "num_codebooks": config.codebooks,
        "max_seq_len": config.longest_sequence,
        "tie_word_embeddings": config.tied_head,
        "norm_fastlayer_input": config.hidden_after_norm,
        "scale_codebook_embeddings": config.scaled_embeddings,
    }


def token_texts(config: ModelConfig) -> dict[str, int]:
    """`special_tokens.json`."""
    semantic = range(config.semantic_first, config.semantic_last + 1)
    return {f"<|semantic:{i}|>": token for i, token in enumerate(semantic)} | {
        "<|im_end|>": config.stop_id
    }


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data))


def write_shards(directory: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """Safetensors files with their index; neighbours by name lie in different ones."""
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map}
    )


def write_nested(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """A checkpoint as S2-Pro's, in two shards; its tensors under our names."""
    tensors = random_tensors(config)
    write_json(directory / "config.json", nested_config(config))
    write_shards(directory, tensors, 2)
    return tensors


def write_flat(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """An older checkpoint: one file, flat names, q, k and v apart."""
    tensors = random_tensors(config)
    write_json(directory / "config.json", flat_config(config))
    write_json(directory / "special_tokens.json", token_texts(config))
    save_file(separate_qkv(flat_names(tensors), config), directory / "model.safetensors")
    return tensors


def write_pickled(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """As S1-mini is published: flat names, `model.pth`."""
    tensors = random_tensors(config)
    write_json(directory / "config.json", flat_config(config))
    write_json(directory / "special_tokens.json", token_texts(config))
    torch.save(flat_names(tensors), directory / "model.pth")
    return tensors
