"""The built-in model `tiny`: no training, no files, the shape of a real dual-AR model.

Its weights are scaled so that rows depend strongly on all rows before them (a wrong page of
KV shows in the output within a few rows) and so that most streams draw the stop row by
themselves, after some 20 to 400 rows.
"""

from __future__ import annotations

from torch import Tensor

from duplet_engine.model_config import ModelConfig, TransformerConfig
from duplet_engine.weights import tensor_shapes, uniform_tensor
from duplet_pages.engine_config import TINY_MODEL
from duplet_pages.spec import SamplingDefaults

_SEED = 20_480
_STOP_SCALE = 0.9
"""Of the stop id's embedding, and with the tied head of its logit: how often streams stop."""
_STDS = {
    "text_model.model.embeddings.weight": 0.25,
    "audio_decoder.codebook_embeddings.weight": 1.0,
    "audio_decoder.embeddings.weight": 0.5,
    "audio_decoder.output.weight": 0.25,
    "wqkv.weight": 64**-0.5,
    "wo.weight": 64**-0.5,
    "w1.weight": 64**-0.5,
    "w3.weight": 64**-0.5,
    "w2.weight": 0.5 * 192**-0.5,
}
_NORMS = {"q_norm.weight": 1.2, "k_norm.weight": 1.2}

TINY = ModelConfig(
    name=TINY_MODEL,
    vocab=1024,
    tied_head=True,
    backbone=TransformerConfig(
        layers=3,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=192,
        qk_norm=True,
        qkv_bias=False,
        out_bias=False,
        rope_base=1e4,
        rope_scaling=None,
        rope_rounded=True,
        norm_eps=1e-6,
    ),
    codebook_transformer=TransformerConfig(
        layers=1,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=192,
        qk_norm=False,
        qkv_bias=False,
        out_bias=False,
        rope_base=1e4,
        rope_scaling=None,
        rope_rounded=True,
        norm_eps=1e-6,
    ),
    hidden_after_norm=True,
    scaled_embeddings=True,
    codebooks=10,
    codebook_entries=256,
    codebook_sizes=(256,) + (64,) * 9,
    semantic_first=512,
    semantic_last=767,
    stop_id=259,
    other_stop_ids=(),
    longest_sequence=4096,
    default_max_rows=256,
    rows_per_second=44_100 / 2_048,
    sampling=SamplingDefaults(),
)


def tiny_weights() -> dict[str, Tensor]:
    """Make the weights, the same everywhere; float32."""
    weights = {}
    for name, shape in tensor_shapes(TINY).items():
        if len(shape) == 1:
            scale = next((s for end, s in _NORMS.items() if name.endswith(end)), 1.0)
            weights[name] = scale * (1.0 + uniform_tensor(_SEED, name, shape, 0.05))
        else:
            std = next(s for end, s in _STDS.items() if name.endswith(end))
            weights[name] = uniform_tensor(_SEED, name, shape, std)
    weights["text_model.model.embeddings.weight"][TINY.stop_id] *= _STOP_SCALE
    return weights
