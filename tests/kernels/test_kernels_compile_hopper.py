"""Hopper's form of the streamed product compiles without a GPU, for all models we know, and its
instructions stand in the order that makes it right."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.experimental.gluon._runtime import (  # type: ignore[import-untyped]
    GluonASTSource,
)

from duplet_engine.gpu_linear import launch_stream_weights, launcher_of
from duplet_engine.gpu_linear_hopper import early_weights, launch_early_weights, shared_layout
from duplet_engine.gpu_tiles import Gpu, Tiles, choose_tiles
from duplet_engine.model_config import ModelConfig, TransformerConfig
from duplet_engine.published_configs import read_model_config
from duplet_engine.shapes import SHAPES
from duplet_engine.tiny import TINY
from duplet_models import directory
from tests.kernels.test_kernels_compile import assert_no_spills

H200 = Gpu(132, 227 * 1024, (9, 0))
PROCESSOR_BYTES = 228 * 1024
"""Shared memory of a multiprocessor, of which each program takes 1 KiB more than it asks for."""
ROWS = (1, 2, 17, 33, 65)
Case = tuple[Tiles, bool, bool]
"""Tiles, whether gated, whether x has one row: Triton makes a number that is 1 a constant."""


def shapes_of(config: TransformerConfig) -> Iterator[tuple[int, int, bool]]:
    """Rows and columns of a block's weights, and whether they are gated."""
    heads = config.heads * config.head_dim
    yield heads + 2 * config.kv_heads * config.head_dim, config.width, False
    yield config.width, heads, False
    yield 2 * config.mlp, config.width, True
    yield config.width, config.mlp, False


def shapes_of_model(model: ModelConfig) -> Iterator[tuple[int, int, bool]]:
    yield from shapes_of(model.backbone)
    yield len(model.drawable_ids), model.backbone.width, False
    if (codes := model.codebook_transformer) is not None:
        yield from shapes_of(codes)
        yield codes.width, model.backbone.width, False
        for entries in model.codebook_sizes:
            yield entries, codes.width, False


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every kernel that these models' products need on an H200."""
    found: dict[Case, None] = {}
    for model in (SHAPES["s2-pro"], read_model_config(directory("wren")), TINY):
        for n, k, gated in shapes_of_model(model):
            for m in ROWS:
                found[choose_tiles(m, n, k, H200, gated=gated), gated, m == 1] = None
    apart = {
        (t.rows, t.out, t.inner, t.stages, t.warps, g, one): (t, g, one) for t, g, one in found
    }
    return tuple(apart.values())


def name_of(case: Case) -> str:
    tiles, gated, one_row = case
    kind = ("one-" if one_row else "") + ("gated" if gated else "plain")
    return f"{kind}-{tiles.rows}x{tiles.out}x{tiles.inner}x{tiles.stages}"


def compiled(tiles: Tiles, gated: bool, one_row: bool) -> Any:
    """The kernel as `launch_early_weights` has it built."""
    rows, block = (tiles.rows, tiles.inner), (tiles.out, tiles.inner)
    constants = {
        "BLOCK_ROWS": tiles.rows,
        "BLOCK_OUT": tiles.out,
        "BLOCK_IN": tiles.inner,
        "GATED": gated,
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
    }
    signature = {
        "x": f"tensordesc<bf16[{tiles.rows}, {tiles.inner}],{shared_layout(*rows)!r}>",
        "weight": f"tensordesc<bf16[{tiles.out}, {tiles.inner}],{shared_layout(*block)!r}>",
        "out": "*bf16" if gated else "*fp32",
    } | dict.fromkeys(("m", "n", "k", "share"), "i32")
    if one_row:
        constants["m"] = 1
    signature |= dict.fromkeys(constants, "constexpr")
    names = early_weights.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name in ("out", "n", "k", "share")
    }
    return triton.compile(
        GluonASTSource(early_weights, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiles.warps, "launch_pdl": True},
    )


COPY = r"cp\.async\.bulk\.tensor\S+ \[%r\d+\], \[(%rd\d+),"


def copied(ptx: str, part: str) -> list[str]:
    """Which parameter's tensor each copy in a part of the text reads: x is the first one."""
    held = dict(re.findall(r"mov\.b64\s+(%rd\d+), early_weights_param_(\d+);", ptx))
    made = dict(re.findall(r"cvta\.param\.u64\s+(%rd\d+), (%rd\d+);", ptx))
    return ["x" if held[made[name]] == "0" else "weight" for name in re.findall(COPY, part)]


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_early_weights(case: Case, tmp_path: Path) -> None:
    tiles, gated, _ = case
    kernel = compiled(*case)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= H200.shared_bytes
    assert ".target sm_90a" in ptx
    assert "wgmma.mma_async" in ptx
    assert_no_spills(ptx, tmp_path)
    assert_begins_with_weights(ptx, tiles.stages * (2 if gated else 1), tiles.stages)
    assert_slots_are_free(ptx, 2 if gated else 1)


def assert_begins_with_weights(ptx: str, weights: int, stages: int) -> None:
    """Before the wait: barriers that the copy engine sees, weights, and nothing else of memory."""
    before, behind = ptx.split("griddepcontrol.wait;")
    for touch in (
        "ld.global",
        "st.global",
        "griddepcontrol.launch_dependents",
        "red.global",
        "atom.global",
    ):
        assert touch not in before, touch
    assert copied(ptx, before) == ["weight"] * weights
    assert copied(ptx, behind)[:stages] == ["x"] * stages
    assert behind.count("griddepcontrol.launch_dependents") == 1
    assert "st.global" in behind
    made, begun = before.split("fence.proxy.async", 1)
    assert made.count("mbarrier.init") == stages
    assert "mbarrier" not in made.replace("mbarrier.init", "")
    assert "mbarrier.init" not in begun
    assert "bar.sync" in begun[: re.search(COPY, begun).start()]  # type: ignore[union-attr]


def assert_slots_are_free(ptx: str, products: int) -> None:
    """All threads have seen a slot's bytes before its barrier counts anew, and all warps' products
    of it have ended before it is copied to."""
    seen = ptx[ptx.index("mbarrier.try_wait") :]
    assert "bar.sync" in seen[: seen.index("mbarrier.arrive.expect_tx")]
    begun, ended = seen.split("wgmma.wait_group.sync.aligned", 1)
    assert begun.count("wgmma.commit_group") == products
    assert ended.lstrip().startswith(f"{products};"), "all but those just begun"
    first = re.search(COPY, ended)
    assert first is not None
    assert "bar.sync" in ended[: first.start()]


def test_two_programs_share_a_processor_where_they_are_cut_for_it() -> None:
    for m, n, k, gated in ((1, 6144, 2560, False), (1, 19456, 2560, True), (64, 19456, 2560, True)):
        tiles = choose_tiles(m, n, k, H200, gated=gated)
        shared = int(compiled(tiles, gated, m == 1).metadata.shared)
        assert 2 * (shared + 1024) <= PROCESSOR_BYTES, (m, n, k)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 3), (11, 0), (12, 0)])
def test_other_gpus_take_the_plain_form(capability: tuple[int, int]) -> None:
    assert launcher_of(Gpu(132, 227 * 1024, capability)) is launch_stream_weights


def test_hopper_takes_its_own_form() -> None:
    assert launcher_of(H200) is launch_early_weights
