"""Compiles Triton kernels ahead of time and launches them through CUDA's driver.

Triton's own launcher needs torch in the process; kvproxy has none. Triton compiles to a cubin,
which the driver loads. What a cubin's parameters are is Triton's business, so their number is
checked against the PTX before the first launch.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

from duplet_core.errors import require
from duplet_memory.cuda_driver import CudaError, Device, call, call_quickly

WARPS = 8
THREADS = WARPS * 32
REGISTERS = 48
"""Most of a thread: five programs are on a multiprocessor at once."""
TILE_BYTES = 16 << 10
"""Of one tile: four 16-byte words for each of the threads."""


class _Parameters(ctypes.Structure):
    """The kernel's parameters, which the driver copies at the launch. Triton appends pointers
    to global scratch and to profile scratch; our kernels need neither."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("dest", ctypes.c_uint64),
        ("source_pages", ctypes.c_uint64),
        ("dest_pages", ctypes.c_uint64),
        ("page_rows", ctypes.c_int32),
        ("first_row", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("slabs", ctypes.c_int32),
        ("source_page_step", ctypes.c_int32),
        ("dest_page_step", ctypes.c_int32),
        ("source_step", ctypes.c_int32),
        ("dest_step", ctypes.c_int32),
        ("walkers", ctypes.c_int32),
        ("global_scratch", ctypes.c_uint64),
        ("profile_scratch", ctypes.c_uint64),
    )


_OFFSETS = tuple(getattr(_Parameters, name).offset for name, _ in _Parameters._fields_)
_PLACES = ctypes.c_void_p * len(_OFFSETS)


@dataclass(frozen=True, slots=True)
class RowShape:
    """What `move_rows` is compiled for."""

    word_bytes: int
    row_words: int
    block_rows: int

    @staticmethod
    def of(row_bytes: int) -> RowShape:
        """The shape for rows of so many bytes."""
        word_bytes = next(size for size in (8, 4, 2) if row_bytes % size == 0)
        block_bytes = 1 << (row_bytes - 1).bit_length()
        block_rows = max(1, min(128, TILE_BYTES // block_bytes))
        return RowShape(word_bytes, row_bytes // word_bytes, block_rows)

    @property
    def block_words(self) -> int:
        """The power of two at or above `row_words`."""
        return 1 << (self.row_words - 1).bit_length()


def compile_move_rows(shape: RowShape, capability: int) -> Any:
    """Triton's compiled kernel for GPUs of this compute capability (90, 100, 120).

    Needs no GPU. The result's `asm` holds `ptx` and `cubin`, its `metadata` the shared memory.
    """
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    from duplet_kvproxy.kernel_move_rows import WORD_TYPES, move_rows

    word = f"*{WORD_TYPES[shape.word_bytes]}"
    signature = {"source": word, "dest": word, "source_pages": "*i64", "dest_pages": "*i64"}
    numbers = ("page_rows", "first_row", "rows", "slabs")
    steps = ("source_page_step", "dest_page_step", "source_step", "dest_step")
    signature |= dict.fromkeys((*numbers, *steps, "walkers"), "i32")
    constants = {
        "ROW_WORDS": shape.row_words,
        "BLOCK_ROWS": shape.block_rows,
        "BLOCK_WORDS": shape.block_words,
    }
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [["tt.divisibility", 16]]
    wide = (0, 1) if shape.word_bytes * shape.row_words % 16 == 0 else ()
    source = ASTSource(move_rows, signature, constants, {(i,): aligned for i in wide})
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": WARPS, "maxnreg": REGISTERS})


@dataclass(slots=True)  # not frozen: made at every launch, and that takes three times as long
class LaunchedRows:
    """Arguments of one launch: addresses and int32 numbers, as `move_rows` names them; how many
    programs walk follows from them."""

    source: int
    dest: int
    source_pages: int
    dest_pages: int
    page_rows: int
    first_row: int
    rows: int
    slabs: int
    source_page_step: int
    dest_page_step: int
    source_step: int
    dest_step: int


class LaunchParameters:
    """The parameters of one kernel's launches, set again for each. Owns their memory; belongs to
    one thread."""

    def __init__(self) -> None:
        self._values = _Parameters()
        start = ctypes.addressof(self._values)
        self._places = _PLACES(*(start + offset for offset in _OFFSETS))
        self._address = ctypes.addressof(self._places)

    def set(self, arguments: LaunchedRows, walkers: int) -> int:
        """Address of the table that the driver reads, good until the next call."""
        values, a = self._values, arguments
        values.source, values.dest = a.source, a.dest
        values.source_pages, values.dest_pages = a.source_pages, a.dest_pages
        values.page_rows, values.first_row, values.rows = a.page_rows, a.first_row, a.rows
        values.slabs, values.source_step, values.dest_step = a.slabs, a.source_step, a.dest_step
        values.source_page_step, values.dest_page_step = a.source_page_step, a.dest_page_step
        values.walkers = walkers
        return self._address


def spread_blocks(blocks: int, programs: int) -> int:
    """How many programs share the blocks of rows: as many as there are blocks, or, where those
    are far more than the programs wanted, about so many, with as even a number of blocks each."""
    each = max(1, round(blocks / programs))
    return -(-blocks // each)


class MoveRows:
    """`move_rows` loaded on one GPU. Owns the module for the process's life: a mover that stops
    is about to exit, and unloading would wait for everything in the context."""

    def __init__(self, shape: RowShape, device: Device, programs_per_sm: int) -> None:
        """Compile, or take from Triton's cache, and load. A launch has about `programs_per_sm`
        programs a multiprocessor, fewer where it has fewer tiles.

        Raises:
            CudaError: the driver refuses the cubin, or its parameters are not those we pass.
        """
        compiled = compile_move_rows(shape, device.capability)
        parameters = parameter_count(compiled.asm["ptx"])
        wanted = len(_OFFSETS)
        if parameters != wanted:
            raise CudaError(
                "move_rows", f"Triton compiled {parameters} parameters, this launcher has {wanted}"
            )
        device.use()
        self._shared = int(compiled.metadata.shared)
        self._wanted_programs = programs_per_sm * device.attribute("MULTIPROCESSOR_COUNT")
        self._block_rows = shape.block_rows
        module = call("cuModuleLoadData", compiled.asm["cubin"])
        name = compiled.metadata.name.encode()
        self._function = int(call("cuModuleGetFunction", module, name))
        self._device = device
        self._parameters = LaunchParameters()

    def launch(self, stream: int, arguments: LaunchedRows) -> None:
        """Queue on `stream` of this kernel's GPU.

        Raises:
            CudaError: refused.
        """
        a = arguments
        require(a.rows > 0 and a.slabs > 0, "a launch moves something")
        blocks = -(-a.rows // self._block_rows)
        walkers = spread_blocks(blocks, self._wanted_programs)
        grid = walkers * min(a.slabs, max(1, self._wanted_programs // walkers))
        shape = (grid, 1, 1, THREADS, 1, 1, self._shared)
        self._device.use()
        table = self._parameters.set(a, walkers)
        call_quickly("cuLaunchKernel", self._function, *shape, stream, table, 0)


def parameter_count(ptx: str) -> int:
    """Parameters of the one kernel in a PTX text."""
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    require(entry is not None, "PTX without an entry")
    assert entry is not None
    return entry.group(1).count(".param")
