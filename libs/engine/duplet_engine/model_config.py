"""Shape of a model. A config is made once and flows down; nothing below it has defaults."""

from __future__ import annotations

from dataclasses import dataclass

from duplet_pages.spec import SamplingDefaults


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretch of RoPE: wavelengths beyond `original_positions / low_factor` positions
    grow by `factor`, those below `original_positions / high_factor` stay, between them it blends.
    """

    factor: float
    low_factor: float
    high_factor: float
    original_positions: int


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
    qkv_bias: bool
    out_bias: bool
    """Of the attention's output projection."""
    rope_base: float
    rope_scaling: RopeScaling | None
    rope_rounded: bool
    """Whether cos and sin are rounded to bfloat16 whatever the weights' dtype is: dual-AR models
    were trained so, and exact tables give over-long, garbled audio. In bfloat16 all are."""
    norm_eps: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dual-AR model: a backbone over rows and a codebook transformer over a row's codes.

    Without codebooks it is a plain language model: one column, and every id may be drawn. Codec
    models that flatten their codes into the vocabulary are plain language models here.
    """

    name: str
    vocab: int
    tied_head: bool
    """The head is the embedding table."""
    backbone: TransformerConfig
    codebook_transformer: TransformerConfig | None
    hidden_after_norm: bool
    """The codebook transformer takes the backbone's hidden state after its final norm; before it
    otherwise."""
    scaled_embeddings: bool
    """At semantic positions the sum of a row's embeddings is divided by sqrt(columns)."""
    codebooks: int
    codebook_entries: int
    """Entries a codebook has in the tables; `codebook_sizes` says how many are useful."""
    codebook_sizes: tuple[int, ...]
    semantic_first: int
    semantic_last: int
    stop_id: int
    other_stop_ids: tuple[int, ...]
    """Drawn, they end a stream as `stop_id` does, and are reported as `stop_id`."""
    longest_sequence: int
    default_max_rows: int
    rows_per_second: float
    """Output rows that make one second of audio; 0 where the files do not say."""
    sampling: SamplingDefaults

    @property
    def columns(self) -> int:
        return 1 + self.codebooks

    @property
    def drawable_ids(self) -> tuple[int, ...]:
        """Ids that may be drawn: semantic ones in order and then the stop ids; all without
        codebooks."""
        if not self.codebooks:
            return tuple(range(self.vocab))
        semantic = range(self.semantic_first, self.semantic_last + 1)
        return (*semantic, self.stop_id, *self.other_stop_ids)

    @property
    def drawn_ids(self) -> tuple[int, ...]:
        """What each of `drawable_ids` is reported as."""
        others = set(self.other_stop_ids)
        return tuple(self.stop_id if i in others else i for i in self.drawable_ids)

    def drawable_index(self, token: int) -> int | None:
        """Where an id in [0, vocab) stands in `drawable_ids`; None where it cannot be drawn."""
        if not self.codebooks:
            return token
        if self.semantic_first <= token <= self.semantic_last:
            return token - self.semantic_first
        stops = (self.stop_id, *self.other_stop_ids)
        if token not in stops:
            return None
        return self.semantic_last - self.semantic_first + 1 + stops.index(token)

    @property
    def projects_hidden(self) -> bool:
        """Whether a projection stands between the backbone and the codebook transformer."""
        small = self.codebook_transformer
        return small is not None and small.width != self.backbone.width

    @property
    def column_limits(self) -> tuple[int, ...]:
        """Values of column i of a row lie in [0, column_limits[i])."""
        return (self.vocab, *self.codebook_sizes)
