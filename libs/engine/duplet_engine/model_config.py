"""Shape of a model. A config is made once and flows down; nothing below it has defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """One stack of pre-norm blocks."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    qk_norm: bool
    """Normalise queries and keys per head, before RoPE."""
    rope_base: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dual-AR model: a backbone over rows and a codebook transformer over a row's codes.

    Without codebooks it is a plain language model: one column, and every id may be drawn.
    """

    name: str
    vocab: int
    backbone: TransformerConfig
    codebook_transformer: TransformerConfig | None
    codebooks: int
    codebook_entries: int
    """Entries a codebook has in the tables; `codebook_sizes` says how many are useful."""
    codebook_sizes: tuple[int, ...]
    semantic_first: int
    semantic_last: int
    stop_id: int
    longest_sequence: int
    default_max_rows: int
    rows_per_second: float

    @property
    def columns(self) -> int:
        return 1 + self.codebooks

    @property
    def drawable_ids(self) -> tuple[int, ...]:
        """Ids that may be drawn: semantic ones in order and then stop; all without codebooks."""
        if not self.codebooks:
            return tuple(range(self.vocab))
        return (*range(self.semantic_first, self.semantic_last + 1), self.stop_id)

    @property
    def column_limits(self) -> tuple[int, ...]:
        """Values of column i of a row lie in [0, column_limits[i])."""
        return (self.vocab, *self.codebook_sizes)
