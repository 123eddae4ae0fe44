"""Dual-AR checkpoints, from files to drawn rows, against the plain model in float64.

The tolerance is that of float32: 24 bits over these depths leave errors of about 1e-5 of the
values' size; whatever is built wrongly (a norm on the wrong side, a missing scale, a swapped
projection) shows as 1e-1 and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from duplet_core.messages import Sampling
from duplet_engine import model as model_module
from duplet_engine.checkpoint import load_checkpoint
from duplet_engine.model import DualAr
from duplet_engine.model_config import ModelConfig
from duplet_engine.sampling import LONGEST_WINDOW, Draws, Noise, draw_entry, pack_sampling
from tests.engine.plain_model import PlainModel
from tests.parity.paged import PagedModel
from tests.parity.published import FLAT, S2_LIKE, SMALL, write_flat, write_nested, write_pickled

TOLERANCE = 2e-4
ROWS = 40
GREEDY = Sampling(seed=1, temperature=0.0, top_p=1.0, top_k=0, repetition_window=0)
Write = Callable[[Path, ModelConfig], dict[str, Tensor]]
CASES: dict[str, tuple[Write, ModelConfig]] = {
    "nested-tied-fused": (write_nested, S2_LIKE),
    "nested-untied-projected": (write_nested, replace(SMALL, hidden_after_norm=True)),
    "flat-separate-biased": (write_flat, FLAT),
    "flat-pickled": (write_pickled, SMALL),
    "flat-tied-after-norm": (write_flat, replace(FLAT, tied_head=True, hidden_after_norm=True)),
}


def load(write: Write, config: ModelConfig, directory: Path) -> tuple[DualAr, PlainModel]:
    tensors = write(directory, config)
    found, weights = load_checkpoint(str(directory), "cpu", torch.float32, lambda done, total: None)
    assert found == replace(config, name=directory.name, default_max_rows=1024)
    assert weights.keys() == tensors.keys()
    return DualAr(found, weights), PlainModel(config, tensors)


def prompt(config: ModelConfig) -> Tensor:
    """Text and semantic rows in turns, int64 [ROWS, columns]."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.zeros(ROWS, config.columns, dtype=torch.int64)
    rows[:, 0] = torch.randint(0, 150, (ROWS,), generator=generator)
    semantic = torch.arange(ROWS) % 3 > 0
    codes = torch.randint(0, 96, (int(semantic.sum()), config.codebooks), generator=generator)
    rows[semantic, 0] = config.semantic_first + codes[:, 0]
    rows[semantic, 1:] = codes
    return rows


@pytest.mark.parametrize("case", CASES)
def test_a_whole_step_is_the_plain_models(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, config = CASES[case]
    model, plain = load(write, config, tmp_path)
    rows = prompt(config)
    paged = PagedModel(model, "float32")
    stream = paged.chunks(rows, range(8), [17])
    torch.testing.assert_close(stream.double(), plain.stream(rows), rtol=1e-5, atol=TOLERANCE)
    logits = plain.logits(rows)[:, list(config.drawable_ids)]
    torch.testing.assert_close(paged.logits(stream).double(), logits, rtol=0, atol=TOLERANCE)

    seen: list[Tensor] = []

    def recording_draw(logits: Tensor, draws: Draws, noise: Noise) -> Tensor:
        seen.append(logits)
        return draw_entry(logits, draws, noise)

    monkeypatch.setattr(model_module, "draw_entry", recording_draw)
    recent = torch.full((ROWS, LONGEST_WINDOW), -1)
    drawn, _ = model.draw_rows(stream, pack_sampling([GREEDY] * ROWS, [ROWS] * ROWS), recent)
    assert len(seen) == config.codebooks - 1
    exact = plain.stream(rows)
    stops = 0
    for index, row in enumerate(drawn.tolist()):
        assert row[0] == config.drawable_ids[int(logits[index].argmax())]
        if row[0] == config.stop_id:
            stops += 1
            assert row[1:] == [0] * config.codebooks
            continue
        assert row[1] == row[0] - config.semantic_first
        for book in range(1, config.codebooks):
            expected = plain.code_logits(exact[index], row[1 : book + 1])
            found = seen[book - 1][index, : config.codebook_sizes[book]].double()
            torch.testing.assert_close(
                found, expected[: config.codebook_sizes[book]], rtol=0, atol=TOLERANCE
            )
            assert row[book + 1] == int(found.argmax())
    assert stops < ROWS // 2
    paged.close()


def test_the_switches_matter(tmp_path: Path) -> None:
    """Each is a difference that the test above would see."""
    rows = prompt(SMALL)
    _, plain = load(write_flat, SMALL, tmp_path)
    stream = plain.stream(rows)
    for changed in (
        replace(SMALL, scaled_embeddings=False),
        replace(SMALL, backbone=replace(SMALL.backbone, qk_norm=False)),
        replace(SMALL, backbone=replace(SMALL.backbone, rope_rounded=False)),
    ):
        other = PlainModel(changed, plain.weights).stream(rows)
        assert (other - stream).abs().max() > 10 * TOLERANCE
    after = PlainModel(replace(SMALL, hidden_after_norm=True), plain.weights)
    codes = [[7], [7, 8], [7, 8, 9]]
    for known in codes:
        difference = after.code_logits(stream[5], known) - plain.code_logits(stream[5], known)
        assert difference.abs().max() > 10 * TOLERANCE


def test_bfloat16_stays_near_float64(tmp_path: Path) -> None:
    """8 bits, a rounding after each group of operations: 2^-9 each, some dozen in a row, which
    by then are 1 to 3 % of the stream's size."""
    tensors = write_nested(tmp_path, S2_LIKE)
    config, weights = load_checkpoint(
        str(tmp_path), "cpu", torch.bfloat16, lambda done, total: None
    )
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    rows = prompt(config)
    exact = PlainModel(config, rounded).stream(rows)
    paged = PagedModel(DualAr(config, weights), "bfloat16")
    stream = paged.chunks(rows, range(8), [17]).double()
    error = (stream - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.03
    paged.close()
