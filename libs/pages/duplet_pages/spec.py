"""The model as its peers must know it: widths, ranges, page size and limits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from duplet_core.errors import InvalidInput, Reason

MOST_PROMPT_BYTES = 2 << 20
"""Ceiling of a packed prompt, whatever the model takes, so that messages are bounded before
anybody knows the model. The longest of S2-Pro, 32,767 rows of 11 integers, has 1.4 MiB."""

MOST_REQUEST_BYTES = MOST_PROMPT_BYTES + (64 << 10)
"""Longest message of a client: the longest prompt and what stands around it."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a model's rows are drawn with where the client does not say; S2-Pro's published
    values where a model's files do not say."""

    temperature: float = 0.8
    top_p: float = 0.8
    top_k: int = 30
    repetition_window: int = 10


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts of one loaded model. lb is ready only when prefill's and decode's are equal."""

    name: str
    fingerprint: str
    """Digest of weights, dtype and kernels' arithmetic: equal fingerprints give equal KV."""
    codebooks: int
    """0 for a plain language model."""
    vocab: int
    """Column 0 holds ids in [0, vocab)."""
    codebook_sizes: tuple[int, ...]
    """Useful entries of each codebook; columns 1.. hold codes in [0, size)."""
    semantic_first: int
    semantic_last: int
    """At ids in [first, last] a row has codes and column 1 = id - first; elsewhere codes are 0.
    Both 0 where the model has no semantic tokens."""
    stop_id: int
    page_rows: int
    longest_sequence: int
    """Most rows of prompt and output together."""
    default_max_rows: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """Of the KV: 'float32' or 'bfloat16'."""
    kv_hash: str
    """Name of the page digest (S10), such as 'xxh3-128'."""
    rows_per_second: float
    """Output rows that make one second of audio; 0 where the model's files do not say."""
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def columns(self) -> int:
        """Integers a row."""
        return 1 + self.codebooks

    @property
    def longest_prompt(self) -> int:
        """Most rows of a prompt: one row of output fits after it, and a message holds it."""
        return min(self.longest_sequence - 1, MOST_PROMPT_BYTES // (4 * self.columns))

    def pages_for(self, rows: int) -> int:
        """Pages that hold `rows` rows."""
        return -(-rows // self.page_rows)

    def to_json(self) -> str:
        """Canonical JSON: equal specs give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> ModelSpec:
        """Parse `to_json`'s text.

        Raises:
            InvalidInput: not a spec of this version.
        """
        try:
            fields = json.loads(text)
            fields["codebook_sizes"] = tuple(fields["codebook_sizes"])
            fields["sampling"] = SamplingDefaults(**fields["sampling"])
            return ModelSpec(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInput(Reason.PEER_PROTOCOL, f"model spec: {error}") from error
