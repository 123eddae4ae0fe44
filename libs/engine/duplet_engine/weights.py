"""Weights: deterministic ones for built-in models, and the fingerprint of any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor

from duplet_engine.model_config import ModelConfig, TransformerConfig

_PIECE_BYTES = 1 << 26
"""A fingerprint reads a GPU's memory in pieces."""


def uniform_tensor(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Uniform values around 0, the same on every machine and in every library version.

    PCG64's raw output and exact arithmetic only: the distributions of NumPy and torch may
    change between versions.
    """
    key = xxhash.xxh3_64_intdigest(name.encode(), seed=seed)
    raw = np.random.PCG64(key).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0
    return torch.from_numpy((unit * (std * 3.0**0.5)).astype(np.float32).reshape(shape))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors: S2-Pro's published names, one layout for all.

    `wqkv` holds q, k and v, one after the other; RoPE turns adjacent pairs.
    """
    backbone = config.backbone
    shapes: dict[str, tuple[int, ...]] = {
        "text_model.model.embeddings.weight": (config.vocab, backbone.width),
        "text_model.model.norm.weight": (backbone.width,),
        **_block_shapes("text_model.model", backbone),
    }
    if not config.tied_head:
        shapes["text_model.model.output.weight"] = (config.vocab, backbone.width)
    small = config.codebook_transformer
    if small is not None:
        entries = config.codebook_entries
        shapes |= {
            "audio_decoder.codebook_embeddings.weight": (
                config.codebooks * entries,
                backbone.width,
            ),
            "audio_decoder.embeddings.weight": (entries, small.width),
            "audio_decoder.norm.weight": (small.width,),
            "audio_decoder.output.weight": (entries, small.width),
            **_block_shapes("audio_decoder", small),
        }
        if config.projects_hidden:
            shapes["audio_decoder.project_in.weight"] = (small.width, backbone.width)
            shapes["audio_decoder.project_in.bias"] = (small.width,)
    return shapes


def _block_shapes(prefix: str, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    heads_width = config.heads * config.head_dim
    qkv_width = heads_width + 2 * config.kv_heads * config.head_dim
    for layer in range(config.layers):
        block = f"{prefix}.layers.{layer}"
        shapes[f"{block}.attention_norm.weight"] = (config.width,)
        shapes[f"{block}.attention.wqkv.weight"] = (qkv_width, config.width)
        shapes[f"{block}.attention.wo.weight"] = (config.width, heads_width)
        if config.qkv_bias:
            shapes[f"{block}.attention.wqkv.bias"] = (qkv_width,)
        if config.out_bias:
            shapes[f"{block}.attention.wo.bias"] = (config.width,)
        if config.qk_norm:
            shapes[f"{block}.attention.q_norm.weight"] = (config.head_dim,)
            shapes[f"{block}.attention.k_norm.weight"] = (config.head_dim,)
        shapes[f"{block}.ffn_norm.weight"] = (config.width,)
        shapes[f"{block}.feed_forward.w1.weight"] = (config.mlp, config.width)
        shapes[f"{block}.feed_forward.w3.weight"] = (config.mlp, config.width)
        shapes[f"{block}.feed_forward.w2.weight"] = (config.width, config.mlp)
    return shapes


def fingerprint(weights: Mapping[str, Tensor], arithmetic: str) -> str:
    """Digest of weights, dtype and arithmetic: equal fingerprints give equal KV and rows, on a
    GPU up to what a batch's shape does to the last bits.

    `arithmetic`: names how the engine computes and on what. The library's version is part of the
    digest, too, because it decides the last bits.
    """
    digest = xxhash.xxh3_128()
    digest.update(f"{arithmetic} {torch.__version__}".encode())
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in _host_pieces(tensor):
            digest.update(piece.numpy().data)
    return digest.hexdigest()


def _host_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's bytes on the host, uint8; each piece lives until the next one is asked for."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if not tensor.is_cuda:
        yield flat
        return
    pinned = torch.empty(min(flat.numel(), _PIECE_BYTES), dtype=torch.uint8, pin_memory=True)
    for first in range(0, flat.numel(), _PIECE_BYTES):
        count = min(flat.numel() - first, _PIECE_BYTES)
        yield pinned[:count].copy_(flat[first : first + count])
