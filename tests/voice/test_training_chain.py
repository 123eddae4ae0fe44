"""Every step of training/ reads what the step before it wrote, and the engine reads the last."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import duplet_models
from duplet_core.engine import Start
from duplet_core.messages import Sampling
from duplet_engine.engine import Engine
from duplet_engine.sequences import open_prefill
from duplet_pages.engine_config import EngineConfig
from duplet_voice.codec import load_codec
from duplet_voice.features import FRAME, LOG_F0, VOICED
from training import make_codes, train_model

RECORDINGS = 60


def write_speech(directory: Path) -> None:
    """Two shards as `speak` writes them, of noise."""
    rng = np.random.default_rng(1)
    for shard in range(2):
        lengths = rng.integers(30, 90, RECORDINGS // 2)
        frames = rng.standard_normal((int(lengths.sum()), FRAME)).astype(np.float16)
        frames[:, VOICED] = frames[:, VOICED] > 0
        frames[:, LOG_F0] = np.log(150)
        np.savez(
            directory / f"{shard:04}.npz",
            phonemes=np.array(["hˈaɪ ðɛɹ."] * len(lengths)),  # noqa: RUF001
            kinds=np.array(["short"] * len(lengths)),
            lengths=lengths,
            frames=frames,
        )


def write_model(directory: Path) -> None:
    """wren's config with one layer each, and its phonemes."""
    wren = duplet_models.directory("wren")
    config = json.loads((wren / "config.json").read_text())
    config["text_config"]["n_layer"] = config["audio_decoder_config"]["n_layer"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("phonemes.json", "generation_config.json"):
        (directory / name).write_text((wren / name).read_text())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def call(main: Callable[[], None], *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        main()

    return call


def test_features_become_a_model_that_the_engine_reads(
    tmp_path: Path, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    speech, codes, model = tmp_path / "speech", tmp_path / "codes", tmp_path / "model"
    speech.mkdir()
    model.mkdir()
    write_speech(speech)
    write_model(model)
    run(make_codes.main, "--shards", speech, "--rounds", 1, "--out", codes, "--device", "cpu")
    monkeypatch.setattr(train_model, "_VALIDATION_BATCHES", 2)
    common = ("--codes", codes / "codes.npz", "--model", model, "--batch-rows", 256, "--workers", 0)
    options = (*common, "--seconds", 1, "--validate-every", 0.3, "--device", "cpu")
    run(train_model.main, *options, "--out", model)
    further = tmp_path / "further"
    run(
        train_model.main,
        *options,
        "--start",
        model / "model.safetensors",
        "--rate",
        0,
        "--out",
        further,
    )
    for directory in (model, further):
        lines = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
        assert all(np.isfinite(line["token"] + line["code"]) for line in lines)
    # It went on from what was published, and at this rate nothing was learnt.
    weights = [(d / "model.safetensors").read_bytes() for d in (model, further)]
    assert weights[0] == weights[1]

    engine = Engine(EngineConfig("monolith", str(model), pool_pages=8, slots=2, threads=1))
    prompt = np.zeros((9, 11), "<i4")
    prompt[:, 0] = np.arange(2, 11)
    start = Start(1, (0, 1), prompt.tobytes(), 0, 0, Sampling(1, 0.5, 0.8, 0, 0))
    with torch.inference_mode():
        row = engine.prefill_chunk(open_prefill(engine.model_config, start, 16, 8))
    engine.close()
    assert row is not None
    codec = load_codec(codes)
    assert np.isfinite(codec.features(row[None, 1:].numpy())).all()
