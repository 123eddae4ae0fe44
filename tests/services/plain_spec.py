"""A plain language model, as lb and decode know one."""

from __future__ import annotations

from duplet_pages.spec import ModelSpec

SPEC = ModelSpec(
    name="test",
    fingerprint="0" * 16,
    codebooks=0,
    vocab=300,
    codebook_sizes=(),
    semantic_first=0,
    semantic_last=0,
    stop_id=256,
    page_rows=16,
    longest_sequence=512,
    default_max_rows=64,
    layers=1,
    kv_heads=1,
    head_dim=8,
    dtype="float32",
    kv_hash="xxh3-128",
    rows_per_second=20,
)
