"""A loaded model as its peers must know it."""

from __future__ import annotations

from duplet_engine.model_config import ModelConfig
from duplet_pages.engine_config import EngineConfig
from duplet_pages.spec import ModelSpec


def describe_model(
    config: EngineConfig, model: ModelConfig, weights_fingerprint: str, kv_hash: str
) -> ModelSpec:
    """The spec. `weights_fingerprint`: `duplet_engine.weights.fingerprint`'s; `kv_hash`: name
    of the page digest."""
    return ModelSpec(
        name=model.name,
        fingerprint=weights_fingerprint,
        codebooks=model.codebooks,
        vocab=model.vocab,
        codebook_sizes=model.codebook_sizes,
        semantic_first=model.semantic_first,
        semantic_last=model.semantic_last,
        stop_id=model.stop_id,
        page_rows=config.page_rows,
        longest_sequence=model.longest_sequence,
        default_max_rows=model.default_max_rows,
        layers=model.backbone.layers,
        kv_heads=model.backbone.kv_heads,
        head_dim=model.backbone.head_dim,
        dtype=config.dtype,
        kv_hash=kv_hash,
        rows_per_second=model.rows_per_second,
        sampling=model.sampling,
    )
