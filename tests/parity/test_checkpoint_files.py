"""Checkpoints on disk: what is read, and what is said of those that are broken."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from duplet_core.errors import InvalidInput
from duplet_engine.checkpoint import load_checkpoint
from duplet_engine.model_config import ModelConfig
from duplet_engine.shapes import SHAPES, random_weights
from duplet_engine.tiny import TINY, tiny_weights
from duplet_engine.weights import fingerprint, tensor_shapes
from tests.parity.published import FLAT, S2_LIKE, write_flat, write_json, write_nested

SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "text_model.model.layers.1.ffn_norm.weight"


def load(
    model: str | Path, dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, dict[str, Tensor]]:
    return load_checkpoint(str(model), "cpu", dtype, lambda done, total: None)


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def shard_of(directory: Path, name: str) -> Path:
    index = json.loads((directory / INDEX).read_text())
    return directory / str(index["weight_map"][name])


def test_progress_grows_to_the_files_bytes(tmp_path: Path) -> None:
    tensors = write_nested(tmp_path, S2_LIKE)
    told: list[tuple[int, int]] = []
    load_checkpoint(
        str(tmp_path), "cpu", torch.bfloat16, lambda done, total: told.append((done, total))
    )
    whole = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert told[0] == (0, whole) and told[-1] == (whole, whole)
    assert told == sorted(told) and len(told) == len(tensors) + 1


def test_tensors_that_stay_as_they_are_stay_mapped(tmp_path: Path) -> None:
    write_nested(tmp_path, S2_LIKE)
    _, weights = load(tmp_path)
    assert str(tmp_path / SHARD) in Path("/proc/self/maps").read_text()
    del weights
    assert str(tmp_path / SHARD) not in Path("/proc/self/maps").read_text()


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    write_flat(tmp_path, FLAT)
    edit(tmp_path / "model.safetensors", lambda t: t.pop("layers.2.feed_forward.w2.weight"))
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path)
    assert caught.value.detail == (
        f"{tmp_path}/model.safetensors: 1 tensor missing: layers.2.feed_forward.w2.weight [96, 256]"
    )


def test_tensors_of_another_model_are_counted_and_named(tmp_path: Path) -> None:
    write_flat(tmp_path, FLAT)
    path = tmp_path / "config.json"
    write_json(path, json.loads(path.read_text()) | {"n_layer": 2})
    with pytest.raises(
        InvalidInput, match=r"13 tensors unexpected: .* in model.safetensors and 9 more"
    ):
        load(tmp_path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_nested(tmp_path, S2_LIKE)
    shard = shard_of(tmp_path, NORM)
    edit(shard, lambda t: t.update({NORM: torch.ones(95)}))
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path)
    assert caught.value.detail == f"{shard}: {NORM} has shape [95], config.json makes it [96]"


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    write_nested(tmp_path, S2_LIKE)
    edit(shard_of(tmp_path, NORM), lambda t: t.update({NORM: torch.ones(96, dtype=torch.int8)}))
    with pytest.raises(InvalidInput, match=f"{NORM} is I8; quantised"):
        load(tmp_path)


def test_shards_and_index_must_agree(tmp_path: Path) -> None:
    write_nested(tmp_path, S2_LIKE)
    edit(shard_of(tmp_path, NORM), lambda t: t.pop(NORM))
    with pytest.raises(
        InvalidInput, match=rf"safetensors: {NORM} is not here, but {INDEX} says so"
    ):
        load(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"].pop("audio_decoder.norm.weight")
    write_json(tmp_path / INDEX, index)
    with pytest.raises(InvalidInput, match=r"audio_decoder.norm.weight is here, but .* says not"):
        load(tmp_path)
    (tmp_path / SHARD).unlink()
    with pytest.raises(InvalidInput, match=f"{SHARD}: the shard is missing"):
        load(tmp_path)
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    write_json(tmp_path / INDEX, index)
    with pytest.raises(InvalidInput, match=r"is in '\.\./elsewhere.safetensors', no file name"):
        load(tmp_path)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    write_nested(tmp_path, S2_LIKE)
    shard = tmp_path / SHARD
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match=f"{SHARD}: cannot be read: "):
        load(tmp_path)


def test_a_directory_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"config.json: cannot be read: .*No such file"):
        load(tmp_path)
    write_flat(tmp_path, FLAT)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match=f"there is no {INDEX}, model.safetensors or model.pth"):
        load(tmp_path)


class Payload:
    """Unpickled, it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_can_only_be_weights(tmp_path: Path) -> None:
    write_flat(tmp_path, FLAT)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"norm.weight": Payload(tmp_path / "made")}, tmp_path / "model.pth")
    with pytest.raises(InvalidInput, match=r"model.pth: cannot be read as weights only: "):
        load(tmp_path)
    assert not (tmp_path / "made").exists()
    torch.save({"state": {"norm.weight": torch.ones(1)}}, tmp_path / "model.pth")
    with pytest.raises(InvalidInput, match=r"model.pth: is no plain dict of tensors"):
        load(tmp_path)


def test_what_is_stored_twice_or_made_anew_may_be_there(tmp_path: Path) -> None:
    write_flat(tmp_path, replace(FLAT, tied_head=True))
    extra = {"output.weight": torch.ones(300, 96), "freqs_cis": torch.ones(4, 8, 2)}
    edit(tmp_path / "model.safetensors", lambda t: t.update(extra))
    _, weights = load(tmp_path)
    assert "text_model.model.output.weight" not in weights


def test_random_weights_are_a_function_of_shape_and_seed() -> None:
    config, weights = load("random:small-lm")
    again = random_weights(config, torch.device("cpu"), torch.float32)
    assert fingerprint(weights, "x") == fingerprint(again, "x") != fingerprint(again, "y")
    other = random_weights(config, torch.device("cpu"), torch.float32, seed=2)
    assert {name: t.shape for name, t in other.items()} == tensor_shapes(config)
    same = [name for name in weights if torch.equal(weights[name], other[name])]
    assert same and all(name.endswith("norm.weight") for name in same)
    assert len({tensor.sum().item() for tensor in weights.values()}) > len(weights) // 2


def test_known_shapes_are_those_of_their_models() -> None:
    s2 = SHAPES["s2-pro"]
    shapes = tensor_shapes(s2)
    assert shapes["text_model.model.layers.35.attention.wqkv.weight"] == (6144, 2560)
    assert shapes["text_model.model.layers.35.attention.wo.weight"] == (2560, 4096)
    assert shapes["text_model.model.layers.0.attention.q_norm.weight"] == (128,)
    assert shapes["audio_decoder.codebook_embeddings.weight"] == (40_960, 2560)
    assert shapes["audio_decoder.layers.3.feed_forward.w1.weight"] == (9728, 2560)
    assert "audio_decoder.layers.0.attention.q_norm.weight" not in shapes
    assert not any("project_in" in name or ".output" in name for name in shapes if "text" in name)
    assert (s2.semantic_first, s2.semantic_last, s2.stop_id) == (151_678, 155_773, 151_645)
    assert s2.codebook_sizes == (4096, *[1024] * 9)
    assert len(s2.drawable_ids) == 4097
    for name, kv_row_bytes in (("s2-pro", 144 * 1024), ("s1-mini", 112 * 1024)):
        stack = SHAPES[name].backbone
        assert stack.layers * 2 * stack.kv_heads * stack.head_dim * 2 == kv_row_bytes
    assert "text_model.model.output.weight" in tensor_shapes(SHAPES["s1-mini"])


def test_tiny_comes_by_name_and_in_bfloat16() -> None:
    assert fingerprint(load("tiny")[1], "x") == fingerprint(tiny_weights(), "x")
    config, weights = load("tiny", torch.bfloat16)
    assert config is TINY
    assert all(torch.equal(t.bfloat16(), weights[name]) for name, t in tiny_weights().items())


@pytest.mark.parametrize("name", ["huge", "random:huge", "/no/such/directory"])
def test_an_unknown_model_is_told_what_there_is(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(name)
    assert repr(name) in caught.value.detail
    assert "'tiny'" in caught.value.detail and "s2-pro" in caught.value.detail


TELL = """
import sys
from duplet_engine.load_progress import told_progress
with told_progress("decode", "/models/s2-pro") as progress:
    for done in range(0, 101, 5):
        progress(done * 10**7, 10**9)
"""


def test_a_load_is_logged_where_nobody_watches() -> None:
    done = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["percent"] for line in lines] == [0, 20, 40, 60, 80, 100]
    assert {(line["service"], line["model"]) for line in lines} == {
        ("decode-engine", "/models/s2-pro")
    }
    assert done.stdout == ""


def test_a_load_is_a_bar_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", TELL], stderr=theirs, check=True)
    os.close(theirs)
    text = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "loading /models/s2-pro" in text
    assert "953.7/953.7 MiB" in text
