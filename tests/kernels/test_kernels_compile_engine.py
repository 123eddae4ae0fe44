"""The engine's kernels compile for every GPU we serve, without one, and spill nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from duplet_engine.gpu_attend_chunk import attend_chunk
from duplet_engine.gpu_attend_step import attend_step, join_splits
from duplet_engine.gpu_draw import draw_entry
from duplet_engine.gpu_draw_wide import draw_wide
from duplet_engine.gpu_embed import embed_rows
from duplet_engine.gpu_heads import place_heads
from duplet_engine.gpu_linear import stream_weights
from duplet_engine.gpu_norm import add_norm
from duplet_engine.gpu_state import advance
from duplet_engine.gpu_swiglu import swiglu
from duplet_engine.gpu_tiles import Gpu, choose_tiles
from tests.kernels.test_kernels_compile import CAPABILITIES, assert_no_spills

Case = tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]

_BF16 = ("query", "keys", "weight", "q_norm", "k_norm", "text", "code_tables", "embeddings", "bias")
_FLOATS = ("parts", "logs", "x", "delta", "both", "qkv", "cos", "sin", "logits")
_NUMBERS = ("scale", "eps", "redraw_temperature", "redraw_top_p")
_LONGS = ("seeds",)
_POINTERS = (
    *("tables", "table_index", "positions", "tiles", "rows", "slots", "top_ks", "windows"),
    *("recent", "drawn", "codes", "broken", "ids", "state_rows"),
)
_HEADS = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAGE_ROWS": 16}
_STEP = _HEADS | {"QUERIES": 16, "BLOCK_ROWS": 64, "PRECISION": "tf32", "OVERLAP": True}
_CHUNK = _STEP | {"GROUP_PADDED": 4, "QUERIES": 128}
_DRAW = {"WINDOW": 128, "CODES": 4096, "WIDTH": 4096, "OVERLAP": True}

SHARED_BYTES = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Most that one program may have."""

CASES: dict[str, Case] = {
    "attend_step": (attend_step, {"out": "*bf16"}, _STEP | {"SPLITS": 1}, {"num_warps": 4}),
    "attend_step_split": (attend_step, {"out": "*bf16"}, _STEP | {"SPLITS": 8}, {"num_warps": 4}),
    "join_splits": (
        join_splits,
        {"out": "*bf16"},
        {"HEAD_DIM": 128, "SPLITS": 64, "BLOCK": 1, "OVERLAP": True},
        {"num_warps": 4},
    ),
    "join_splits_of_a_pass": (
        join_splits,
        {"out": "*bf16"},
        {"HEAD_DIM": 128, "SPLITS": 2, "BLOCK": 8, "OVERLAP": True},
        {"num_warps": 4},
    ),
    "attend_chunk": (attend_chunk, {"out": "*bf16"}, _CHUNK | {"SPLITS": 1}, {"num_warps": 8}),
    "attend_chunk_split": (
        attend_chunk,
        {"out": "*bf16"},
        _CHUNK | {"SPLITS": 2},
        {"num_warps": 8},
    ),
    "attend_row": (
        attend_step,
        {"out": "*bf16"},
        _STEP | {"SPLITS": 1, "BLOCK_ROWS": 16},
        {"num_warps": 2},
    ),
    "add_norm": (
        add_norm,
        {"out": "*bf16"},
        {"PARTS": 3, "BLOCK": 4096, "OVERLAP": True},
        {"num_warps": 8},
    ),
    "swiglu": (swiglu, {"out": "*bf16"}, {"BLOCK": 1024, "OVERLAP": True}, {"num_warps": 4}),
    "place_heads": (
        place_heads,
        {},
        _HEADS | {"PARTS": 2, "BIAS": True, "QK_NORM": True, "BLOCK_HEADS": 8, "OVERLAP": True},
        {"num_warps": 4},
    ),
    "embed_rows": (
        embed_rows,
        {"out": "*fp32"},
        {"CODEBOOKS": 10, "ENTRIES": 4096, "BLOCK": 1024},
        {"num_warps": 4},
    ),
    "advance": (
        advance,
        {"out": "*i32"},
        {"COLUMNS": 11, "BLOCK": 16, "WINDOW": 128, "OVERLAP": True},
        {"num_warps": 1},
    ),
    "draw_code": (
        draw_entry,
        {"temperatures": "*fp32", "top_ps": "*fp32"},
        _DRAW | {"ENTRIES": 1024, "BLOCK": 1024, "PARTS": 5, "REDRAW_COLUMN": 0},
        {"num_warps": 4},
    ),
    "draw_wide": (
        draw_wide,
        {"temperatures": "*fp32", "top_ps": "*fp32"},
        {"ENTRIES": 151936, "BLOCK": 4096, "REDRAW_COLUMN": 1, "WINDOW": 128, "OVERLAP": True},
        {"num_warps": 16},
    ),
    "draw_token": (
        draw_entry,
        {"temperatures": "*fp32", "top_ps": "*fp32"},
        _DRAW | {"ENTRIES": 4097, "BLOCK": 4096, "PARTS": 2, "REDRAW_COLUMN": 11},
        {"num_warps": 8},
    ),
}

STANDING = {
    add_norm: 2,
    attend_chunk: 4,
    attend_step: 2,
    draw_entry: 6,
    place_heads: 16,
}
"""Instructions in which a kernel reads, before it waits, what nobody writes while it may run:
weights, and places and settings of the rows, which stand since two kernels earlier at least."""


def type_of(name: str, own: dict[str, str]) -> str:
    for names, kind in ((_BF16, "*bf16"), (_FLOATS, "*fp32"), (_LONGS, "*i64"), (_NUMBERS, "fp32")):
        if name in names:
            return own.get(name, kind)
    return own.get(name, "*i32" if name in _POINTERS else "i32")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", CASES)
def test_engine_kernel(name: str, capability: int, tmp_path: Path) -> None:
    function, own, constants, options = CASES[name]
    signature = {
        argument: "constexpr" if argument in constants else type_of(argument, own)
        for argument in function.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (argument, kind) in enumerate(signature.items())
        if kind.startswith("*") or argument.endswith(("stride", "width", "n", "k", "share"))
    }
    source = ASTSource(function, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    assert_no_spills(compiled.asm["ptx"], tmp_path)
    if name in ("attend_step", "attend_chunk", "attend_chunk_split"):
        assert "cp.async" in compiled.asm["ptx"], "reads ahead"
    if "OVERLAP" in constants:
        assert_waits_first(compiled.asm["ptx"], STANDING.get(function, 0))


def assert_waits_first(ptx: str, standing: int = 0) -> None:
    """Nothing is read or written, and no kernel let in, before those queued earlier have ended;
    weights may be asked for, and what stands still read in `standing` instructions at most."""
    before = ptx[: ptx.index("griddepcontrol.wait")].replace("cp.async.bulk.prefetch.L2", "")
    for touch in ("st.global", "cp.async", "griddepcontrol.launch_dependents"):
        assert touch not in before, touch
    assert before.count("ld.global") <= standing
    assert (before.count("ld.global") > 0) == (standing > 0)
    assert ptx.count("griddepcontrol.launch_dependents") == 1


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [1, 32, 64, 128])
def test_stream_weights(m: int, gated: bool, capability: int, tmp_path: Path) -> None:
    """S2-Pro's products, cut for each GPU's memory."""
    shared_bytes = SHARED_BYTES[capability]
    for n, k in ((19456, 2560),) if gated else ((6144, 2560), (2560, 9728)):
        cut = choose_tiles(m, n, k, Gpu(132, shared_bytes, divmod(capability, 10)), gated=gated)
        constants = {
            "BLOCK_ROWS": cut.rows,
            "BLOCK_OUT": cut.out,
            "BLOCK_IN": cut.inner,
            "GATED": gated,
            "OVERLAP": True,
        }
        signature = dict.fromkeys(("m", "n", "k", "share", "ahead"), "i32")
        signature["weights"] = "*bf16"
        signature |= dict.fromkeys(constants, "constexpr")
        signature["x"] = f"tensordesc<bf16[{cut.rows}, {cut.inner}]>"
        signature["weight"] = f"tensordesc<bf16[{cut.out}, {cut.inner}]>"
        signature["out"] = "*bf16" if gated else "*fp32"
        names = stream_weights.arg_names
        signature = {name: signature[name] for name in names}
        aligned = {
            (names.index(name),): [["tt.divisibility", 16]] for name in ("out", "n", "k", "share")
        }
        compiled = triton.compile(
            ASTSource(stream_weights, signature, constants, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": cut.warps, "num_stages": cut.stages, "launch_pdl": True},
        )
        assert compiled.metadata.shared <= shared_bytes
        assert_no_spills(compiled.asm["ptx"], tmp_path)
        assert "cp.async.bulk.tensor" in compiled.asm["ptx"], "reads ahead"
        asked, waited = compiled.asm["ptx"].split("griddepcontrol.wait", 1)
        assert asked.count("cp.async.bulk.prefetch.L2") == (2 if gated else 1)
        assert "cp.async.bulk.prefetch" not in waited
        assert_waits_first(compiled.asm["ptx"])
