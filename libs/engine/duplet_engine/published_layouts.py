"""How published checkpoints name and cut their tensors, and how ours are made of them.

Three layouts, told apart by their names:

- nested dual-AR: `text_model.model.*`, `audio_decoder.*` (S2-Pro); the names we use ourselves;
- flat dual-AR: no first prefix, `codebook_embeddings.*`, `fast_*` (S1-mini, fish-speech);
- Hugging Face: `model.layers.{i}.self_attn.q_proj.*` (Qwen2, Qwen3, Llama).

q, k and v may be one tensor or three in either dual-AR layout. Hugging Face's models turn pairs
(j, j + dim / 2) by RoPE, ours turn (2j, 2j + 1). Rows of q and k, and the norms per head, are
brought into our order here, once: a product of q and k does not change when both are permuted,
so one rotation, in one kernel, serves every model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from duplet_engine.model_config import ModelConfig, TransformerConfig
from duplet_engine.weights import tensor_shapes

_TEXT = "text_model.model."
_AUDIO = "audio_decoder."
_COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|freqs_cis|causal_mask)$")
"""Tables that older checkpoints store and that are made anew here."""
_HF_NAMES = {
    "embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_HF_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_BLOCK = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Part:
    """One published tensor, and what of it is ours."""

    name: str
    shape: tuple[int, ...]
    half_heads: int = 0
    """Heads whose rows come in the order (0, d/2, 1, d/2 + 1, …) of ours; 0: as they are."""

    def take(self, tensor: Tensor) -> Tensor:
        """The published tensor with its rows in our order."""
        if not self.half_heads:
            return tensor
        halves = tensor.unflatten(0, (self.half_heads, 2, -1))
        return halves.transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each of our tensors comes from."""

    recipes: dict[str, tuple[Part, ...]]
    """Our name to the parts that follow one another along dimension 0."""
    spare: frozenset[str]
    """Published tensors that may be there and are not needed."""

    @property
    def parts(self) -> dict[str, Part]:
        """Every published tensor that is needed."""
        return {part.name: part for parts in self.recipes.values() for part in parts}


def find_layout(config: ModelConfig, names: Iterable[str]) -> Layout:
    """The layout of a checkpoint of this model with these tensor names."""
    found = set(names)
    nested = any(name.startswith((_TEXT, _AUDIO)) for name in found)
    hugging = not nested and config.codebook_transformer is None
    spare = {name for name in found if _COMPUTED.search(name)}
    if config.tied_head:
        # Some writers store the embedding a second time as the head.
        spare.add("lm_head.weight" if hugging else _publish(f"{_TEXT}output.weight", nested))
    recipes = {}
    for name, shape in tensor_shapes(config).items():
        if hugging:
            recipes[name] = _hugging_face(config.backbone, name, shape)
        else:
            small = config.codebook_transformer if name.startswith(_AUDIO) else None
            published = _publish(name, nested)
            recipes[name] = _dual_ar(small or config.backbone, published, shape, found)
    return Layout(recipes, frozenset(spare))


def _publish(name: str, nested: bool) -> str:
    """Our name as a dual-AR layout writes it."""
    if nested:
        return name
    if name.startswith(f"{_AUDIO}codebook_embeddings"):
        return name.removeprefix(_AUDIO)
    if name.startswith(_AUDIO):
        return f"fast_{name.removeprefix(_AUDIO)}"
    return name.removeprefix(_TEXT)


def _dual_ar(
    config: TransformerConfig, name: str, shape: tuple[int, ...], found: set[str]
) -> tuple[Part, ...]:
    if ".wqkv." not in name or name in found:
        return (Part(name, shape),)
    separate = [name.replace(".wqkv.", f".w{letter}.") for letter in "qkv"]
    if not found & set(separate):
        # Neither is there: the error names the usual one.
        return (Part(name, shape),)
    heads = (config.heads, config.kv_heads, config.kv_heads)
    return tuple(
        Part(part, (count * config.head_dim, *shape[1:]))
        for part, count in zip(separate, heads, strict=True)
    )


def _hugging_face(config: TransformerConfig, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    own = name.removeprefix(_TEXT)
    block = _BLOCK.fullmatch(own)
    if block is None:
        return (Part(_HF_NAMES[own], shape),)
    layer, place, kind = block.groups()
    prefix = f"model.layers.{layer}"
    if place == "attention.wqkv":
        projections = (
            ("q", config.heads, config.heads),
            ("k", config.kv_heads, config.kv_heads),
            ("v", config.kv_heads, 0),
        )
        return tuple(
            Part(
                f"{prefix}.self_attn.{letter}_proj.{kind}",
                (count * config.head_dim, *shape[1:]),
                half_heads,
            )
            for letter, count, half_heads in projections
        )
    turned = place in ("attention.q_norm", "attention.k_norm")
    return (Part(f"{prefix}.{_HF_BLOCK_NAMES[place]}.{kind}", shape, int(turned)),)


def join_parts(parts: tuple[Part, ...], tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """One of our tensors, contiguous; the published one itself where nothing changes."""
    taken = [part.take(tensor).to(dtype) for part, tensor in zip(parts, tensors, strict=True)]
    return taken[0].contiguous() if len(taken) == 1 else torch.cat(taken)
