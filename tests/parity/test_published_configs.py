"""`config.json` of published models, as they are published, and of some that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duplet_core.errors import InvalidInput
from duplet_engine.model_config import ModelConfig
from duplet_engine.published_configs import read_model_config
from duplet_engine.shapes import SHAPES
from tests.parity.published import flat_config, nested_config, token_texts, write_json

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


def read(directory: Path, data: dict[str, Any]) -> ModelConfig:
    write_json(directory / "config.json", data)
    return read_model_config(directory)


def test_qwen3_and_llama(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3) == replace(SHAPES["qwen3-0.6b"], name=tmp_path.name)
    llama = replace(SHAPES["llama-3.2-1b"], name=tmp_path.name)
    stops = {"stop_id": 128_001, "other_stop_ids": (128_008, 128_009)}
    assert read(tmp_path, LLAMA) == replace(llama, **stops)  # type: ignore[arg-type]
    both = LLAMA | {"rope_parameters": LLAMA["rope_scaling"] | {"rope_theta": 5e5}}
    del both["rope_scaling"], both["rope_theta"]
    assert read(tmp_path, both) == replace(llama, **stops)  # type: ignore[arg-type]


def test_dual_ar_in_both_forms(tmp_path: Path) -> None:
    assert read(tmp_path, nested_config(SHAPES["s2-pro"])) == replace(
        SHAPES["s2-pro"], name=tmp_path.name
    )
    s1 = SHAPES["s1-mini"]
    write_json(tmp_path / "special_tokens.json", token_texts(s1))
    assert read(tmp_path, flat_config(s1)) == replace(s1, name=tmp_path.name)
    (tmp_path / "special_tokens.json").unlink()
    ids = {"semantic_begin_id": 151_678, "semantic_end_id": 155_773, "eos_token_id": 151_645}
    assert read(tmp_path, flat_config(s1) | ids) == replace(s1, name=tmp_path.name)


def test_a_drawn_stop_is_the_stop_whichever_it_was(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert [config.drawn_ids[i] for i in (5, 128_001, 128_008, 128_009)] == [5, *[128_001] * 3]
    several = replace(SHAPES["small-dual-ar"], other_stop_ids=(151,))
    ids = several.drawable_ids
    assert ids[-2:] == (150, 151) and several.drawn_ids[-2:] == (150, 150)
    for token in range(several.vocab):
        expected = ids.index(token) if token in ids else None
        assert several.drawable_index(token) == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    (QWEN3 | {"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', wanted fish_qwen3_omni, "),
    (QWEN3 | {"hidden_size": "big"}, "hidden_size is 'big', wanted a positive integer"),
    (QWEN3 | {"num_hidden_layers": 0}, "num_hidden_layers is 0, wanted a positive integer"),
    (QWEN3 | {"use_sliding_window": True}, "use_sliding_window is True, wanted False"),
    (QWEN3 | {"hidden_act": "gelu"}, "hidden_act is 'gelu', wanted 'silu'"),
    (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is "),
    (QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
    (QWEN3 | {"num_key_value_heads": 5}, "heads is 16, wanted a multiple of 5 KV heads"),
    (QWEN3 | {"eos_token_id": 151936}, r"eos_token_id is 151936, wanted ids in \[0, 151936\)"),
    (QWEN3 | {"eos_token_id": None}, "eos_token_id is missing"),
    (QWEN3 | {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', wanted true or false"),
    (LLAMA | {"mlp_bias": True}, "mlp_bias is True, wanted False"),
    (LLAMA | {"rope_theta": 0}, "rope_theta is 0, wanted a positive number"),
    (
        nested_config(SHAPES["s2-pro"]) | {"semantic_end_token_id": 155_775},
        r"semantic_end_token_id is 155775, wanted in \[151678, 155774\)",
    ),
    (
        nested_config(SHAPES["s2-pro"]) | {"audio_decoder_config": None},
        "audio_decoder_config is missing, wanted an object",
    ),
    (
        nested_config(SHAPES["s2-pro"]) | {"text_config": {"dim": 2560, "use_moe": True}},
        "text_config.use_moe is True, wanted False",
    ),
    (flat_config(SHAPES["s1-mini"]), "special_tokens.json: cannot be read"),
]


@pytest.mark.parametrize(("data", "detail"), REFUSED)
def test_what_is_not_built_is_refused_by_name(
    tmp_path: Path, data: dict[str, Any], detail: str
) -> None:
    with pytest.raises(InvalidInput, match=detail) as caught:
        read(tmp_path, data)
    assert str(tmp_path) in caught.value.detail
