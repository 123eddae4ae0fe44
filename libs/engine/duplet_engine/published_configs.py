"""`config.json` of published checkpoints as a `ModelConfig`.

What would change the numbers and is not built here (other activations, sliding windows, other
stretches of RoPE, experts) is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duplet_core.errors import InvalidInput
from duplet_engine.generation_config import apply_generation_config
from duplet_engine.model_config import ModelConfig, RopeScaling, TransformerConfig
from duplet_engine.tensor_files import read_json, refuse_checkpoint
from duplet_pages.spec import SamplingDefaults

DUAL_AR_ROWS_PER_SECOND = 44_100 / 2_048
RESIDUAL_ENTRIES = 1024
"""Useful entries of every codebook but the first; the tables are padded to the first's size."""
DEFAULT_MAX_ROWS = 1024
_CONFIG = "config.json"
_SPECIAL_TOKENS = "special_tokens.json"


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object whose values are checked as they are taken; errors name file and field."""

    path: Path
    data: Mapping[str, Any]
    prefix: str = ""

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; null counts as not there."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(name, value, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.refuse(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, value, "true or false")
        return value

    def token(self, name: str, vocab: int) -> int:
        """A token id."""
        value = self._value(name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
            raise self.refuse(name, value, f"an id in [0, {vocab})")
        return value

    def table(self, name: str) -> Fields:
        value = self._value(name, None)
        if not isinstance(value, dict):
            raise self.refuse(name, value, "an object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def expect(self, name: str, *wanted: object) -> None:
        """Check a field that is not there or has one of these values."""
        value = self.data.get(name)
        if value is not None and value not in wanted:
            raise self.refuse(name, value, " or ".join(repr(w) for w in wanted))

    def refuse(self, name: str, value: object, wanted: str) -> InvalidInput:
        found = "missing" if value is None else repr(value)
        return refuse_checkpoint(self.path, f"{self.prefix}{name} is {found}, wanted {wanted}")

    def _value(self, name: str, default: object) -> object:
        value = self.data.get(name)
        return default if value is None else value


def read_model_config(directory: Path) -> ModelConfig:
    """Read a checkpoint's shape and defaults; the model is called as its directory is.

    Raises:
        InvalidInput: no config, or one of a model that is not built here; the detail names file
            and field.
    """
    path = directory / _CONFIG
    model = _read_shape(directory.resolve().name, Fields(path, read_json(path)))
    return apply_generation_config(directory, model)


def _read_shape(name: str, fields: Fields) -> ModelConfig:
    kind = fields.data.get("model_type")
    if kind == "fish_qwen3_omni":
        return _nested_dual_ar(name, fields)
    if kind == "dual_ar":
        return _flat_dual_ar(name, fields)
    if kind in ("llama", "qwen2", "qwen3"):
        return _hugging_face(name, str(kind), fields)
    kinds = "fish_qwen3_omni, dual_ar, llama, qwen2 or qwen3"
    raise fields.refuse("model_type", kind, kinds)


def _nested_dual_ar(name: str, fields: Fields) -> ModelConfig:
    text, audio = fields.table("text_config"), fields.table("audio_decoder_config")
    backbone = _fish_transformer(text)
    vocab, entries = text.integer("vocab_size"), audio.integer("vocab_size")
    codebooks = audio.integer("num_codebooks")
    first, last = _semantic_ids(
        fields, "semantic_start_token_id", "semantic_end_token_id", vocab, entries
    )
    return ModelConfig(
        name=name,
        vocab=vocab,
        tied_head=text.flag("tie_word_embeddings", True),
        backbone=backbone,
        codebook_transformer=_fish_transformer(audio),
        hidden_after_norm=fields.flag("norm_fastlayer_input", True),
        scaled_embeddings=fields.flag("scale_codebook_embeddings", True),
        codebooks=codebooks,
        codebook_entries=entries,
        codebook_sizes=codebook_sizes(codebooks, entries),
        semantic_first=first,
        semantic_last=last,
        stop_id=fields.token("eos_token_id", vocab),
        other_stop_ids=(),
        longest_sequence=text.integer("max_seq_len"),
        default_max_rows=min(DEFAULT_MAX_ROWS, text.integer("max_seq_len")),
        rows_per_second=DUAL_AR_ROWS_PER_SECOND,
        sampling=SamplingDefaults(),
    )


def _fish_transformer(fields: Fields) -> TransformerConfig:
    fields.expect("use_moe", False)
    width, heads = fields.integer("dim"), fields.integer("n_head")
    return _check_heads(
        fields,
        TransformerConfig(
            layers=fields.integer("n_layer"),
            width=width,
            heads=heads,
            kv_heads=fields.integer("n_local_heads", heads),
            head_dim=fields.integer("head_dim", width // heads),
            mlp=fields.integer("intermediate_size"),
            qk_norm=fields.flag("attention_qk_norm", False),
            qkv_bias=fields.flag("attention_qkv_bias", False),
            out_bias=fields.flag("attention_o_bias", False),
            rope_base=fields.number("rope_base"),
            rope_scaling=None,
            rope_rounded=True,
            norm_eps=fields.number("norm_eps"),
        ),
    )


def _flat_dual_ar(name: str, fields: Fields) -> ModelConfig:
    """The codebook transformer's fields are `fast_*`, and the backbone's where those miss."""
    shared = ("dim", "n_head", "n_local_heads", "head_dim", "intermediate_size")
    switches = ("attention_qkv_bias", "attention_qk_norm", "attention_o_bias")
    small = dict(fields.data) | {"n_layer": fields.integer("n_fast_layer")}
    for field in (*shared, *switches):
        value = fields.data.get(f"fast_{field}")
        small[field] = fields.data.get(field) if value is None else value
    vocab, entries = fields.integer("vocab_size"), fields.integer("codebook_size")
    codebooks = fields.integer("num_codebooks")
    tokens = _special_tokens(fields, entries)
    first, last = _semantic_ids(tokens, "semantic_begin_id", "semantic_end_id", vocab, entries)
    return ModelConfig(
        name=name,
        vocab=vocab,
        tied_head=fields.flag("tie_word_embeddings", True),
        backbone=_fish_transformer(fields),
        codebook_transformer=_fish_transformer(Fields(fields.path, small)),
        hidden_after_norm=fields.flag("norm_fastlayer_input", False),
        scaled_embeddings=fields.flag("scale_codebook_embeddings", False),
        codebooks=codebooks,
        codebook_entries=entries,
        codebook_sizes=codebook_sizes(codebooks, entries),
        semantic_first=first,
        semantic_last=last,
        stop_id=tokens.token("eos_token_id", vocab),
        other_stop_ids=(),
        longest_sequence=fields.integer("max_seq_len"),
        default_max_rows=min(DEFAULT_MAX_ROWS, fields.integer("max_seq_len")),
        rows_per_second=DUAL_AR_ROWS_PER_SECOND,
        sampling=SamplingDefaults(),
    )


def _special_tokens(fields: Fields, entries: int) -> Fields:
    """Ids that flat checkpoints keep in their config or beside it, under the tokens' texts."""
    needed = ("semantic_begin_id", "semantic_end_id", "eos_token_id")
    if all(fields.data.get(name) is not None for name in needed):
        return fields
    path = fields.path.with_name(_SPECIAL_TOKENS)
    texts = read_json(path)
    spelled = ("<|semantic:0|>", f"<|semantic:{entries - 1}|>", "<|im_end|>")
    missing = [text for text in spelled if text not in texts]
    if missing:
        raise refuse_checkpoint(path, f"there is no {missing[0]}")
    return Fields(path, {name: texts[text] for name, text in zip(needed, spelled, strict=True)})


def codebook_sizes(codebooks: int, entries: int) -> tuple[int, ...]:
    """Useful entries of each codebook of a dual-AR model."""
    return (entries, *[min(entries, RESIDUAL_ENTRIES)] * (codebooks - 1))


def _semantic_ids(
    fields: Fields, first_name: str, last_name: str, vocab: int, entries: int
) -> tuple[int, int]:
    """First and last semantic id; id `first + c` has code c in codebook 0."""
    first, last = fields.token(first_name, vocab), fields.token(last_name, vocab)
    if not first <= last < first + entries:
        raise fields.refuse(last_name, last, f"in [{first}, {first + entries}): a code each")
    return first, last


def _hugging_face(name: str, kind: str, fields: Fields) -> ModelConfig:
    fields.expect("hidden_act", "silu")
    fields.expect("use_sliding_window", False)
    fields.expect("mlp_bias", False)
    layer_types = set(fields.data.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise fields.refuse("layer_types", sorted(map(str, layer_types)), "'full_attention'")
    vocab, longest = fields.integer("vocab_size"), fields.integer("max_position_embeddings")
    stop_ids = _stop_ids(fields, vocab)
    return ModelConfig(
        name=name,
        vocab=vocab,
        tied_head=fields.flag("tie_word_embeddings", False),
        backbone=_hugging_face_transformer(kind, fields),
        codebook_transformer=None,
        hidden_after_norm=True,
        scaled_embeddings=False,
        codebooks=0,
        codebook_entries=0,
        codebook_sizes=(),
        semantic_first=0,
        semantic_last=0,
        stop_id=stop_ids[0],
        other_stop_ids=stop_ids[1:],
        longest_sequence=longest,
        default_max_rows=min(DEFAULT_MAX_ROWS, longest),
        rows_per_second=0.0,
        sampling=SamplingDefaults(),
    )


def _hugging_face_transformer(kind: str, fields: Fields) -> TransformerConfig:
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    both_biases = kind != "qwen2" and fields.flag("attention_bias", False)
    base, scaling = _rope(fields)
    return _check_heads(
        fields,
        TransformerConfig(
            layers=fields.integer("num_hidden_layers"),
            width=width,
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", 128 if kind == "qwen3" else width // heads),
            mlp=fields.integer("intermediate_size"),
            qk_norm=kind == "qwen3",
            qkv_bias=both_biases or kind == "qwen2",
            out_bias=both_biases,
            rope_base=base,
            rope_scaling=scaling,
            rope_rounded=False,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
        ),
    )


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """RoPE's base and stretch; they stand in one table since transformers 5, apart before."""
    if fields.data.get("rope_parameters") is not None:
        table = fields.table("rope_parameters")
        base = table.number("rope_theta", fields.number("rope_theta", 1e4))
    else:
        base = fields.number("rope_theta", 1e4)
        if fields.data.get("rope_scaling") is None:
            return base, None
        table = fields.table("rope_scaling")
    table.expect("partial_rotary_factor", 1.0)
    kind = table.data.get("rope_type", table.data.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise table.refuse("rope_type", kind, "'default' or 'llama3'")
    return base, RopeScaling(
        factor=table.number("factor"),
        low_factor=table.number("low_freq_factor"),
        high_factor=table.number("high_freq_factor"),
        original_positions=table.integer("original_max_position_embeddings"),
    )


def _stop_ids(fields: Fields, vocab: int) -> tuple[int, ...]:
    """One or several ids that end a text, the first one first."""
    found = fields.data.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    if not ids or any(type(i) is not int or not 0 <= i < vocab for i in ids):
        raise fields.refuse("eos_token_id", found, f"ids in [0, {vocab})")
    return tuple(dict.fromkeys(ids))


def _check_heads(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    if config.heads % config.kv_heads:
        wanted = f"a multiple of {config.kv_heads} KV heads"
        raise fields.refuse("heads", config.heads, wanted)
    if config.head_dim % 2:
        raise fields.refuse("head_dim", config.head_dim, "even: RoPE turns pairs")
    return config
