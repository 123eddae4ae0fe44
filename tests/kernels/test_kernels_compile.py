"""Kernels compile for every GPU we serve, without one, and keep everything in registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from duplet_engine.kv_hash import sum_pages
from duplet_kvproxy.kernel_build import RowShape, compile_move_rows, parameter_count

CAPABILITIES = (90, 100, 120)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def resources(ptx: str, tmp_path: Path) -> str:
    """ptxas's own report on a PTX text."""
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target is not None
    blackwell = int(re.sub(r"\D", "", target.group(1))) >= 100
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    tool = TOOLS / ("ptxas-blackwell" if blackwell else "ptxas")
    done = subprocess.run(
        [tool, "-v", f"-arch={target.group(1)}", source, "-o", tmp_path / "kernel.cubin"],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stderr


def assert_no_spills(ptx: str, tmp_path: Path) -> None:
    report = resources(ptx, tmp_path)
    found = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", report)
    assert found is not None, report
    assert found.groups() == ("0", "0", "0"), report
    assert "Used " in report


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("row_bytes", [2048, 6])
def test_move_rows(capability: int, row_bytes: int, tmp_path: Path) -> None:
    compiled = compile_move_rows(RowShape.of(row_bytes), capability)
    ptx = compiled.asm["ptx"]
    assert f"sm_{capability}" in ptx
    assert compiled.asm["cubin"]
    assert parameter_count(ptx) == 15
    assert compiled.metadata.shared == 0
    if row_bytes % 16 == 0:
        assert "st.global.v2.b64" in ptx, "16 bytes a thread"
    assert_no_spills(ptx, tmp_path)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_page_sums(capability: int, tmp_path: Path) -> None:
    signature: dict[str, Any] = {
        "pool": "*i64",
        "pages": "*i64",
        "valid_rows": "*i32",
        "sums": "*i64",
        "slabs": "i32",
        "page_stride": "i32",
        "slab_stride": "i32",
    }
    constants = {"ROW_UNITS": 256, "BLOCK_ROWS": 4, "BLOCK_UNITS": 256}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(sum_pages, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 2})
    assert "ld.global.v2.b64" in compiled.asm["ptx"]
    assert_no_spills(compiled.asm["ptx"], tmp_path)
