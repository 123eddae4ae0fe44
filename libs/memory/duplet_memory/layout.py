"""What a KV pool looks like in memory: everything a stranger needs to read or write it.

Two arrangements exist, both C-contiguous from `offset` on:

- page-major  `[pages][layers][2][page_rows][kv_heads][head_dim]`: one page is one run of bytes;
- layer-major `[layers][2][pages * page_rows][kv_heads][head_dim]`: one page is `layers * 2` runs.

The smallest run that both share is the *slab*: the rows of one page in one layer, keys or
values. A pool is a sequence of `pages * layers * 2` slabs; the arrangement is their order.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import xxhash

from duplet_core.errors import InvalidInput, Reason
from duplet_pages.engine_config import Arrangement

MAGIC = "DUPLETKV"
VERSION = 1
HEADER_BYTES = 4096
"""The header is the page before the pool, so that a pool can start on a page border."""

HandleKind = Literal["memfd", "cumem-fd", "cuda-ipc", "cumem-fabric"]
"""How the allocation is passed on: 'memfd' is CPU memory, the others are a GPU's. 'memfd' and
'cumem-fd' are descriptors that travel beside the description, the others a token inside it."""
ENGINES_HANDLE: HandleKind = "cumem-fd"
"""The one kind that engines make on a GPU."""
TOKEN_BYTES: dict[str, int] = {"memfd": 0, "cumem-fd": 0, "cuda-ipc": 64, "cumem-fabric": 64}
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_COUNTS = ("layers", "page_rows", "kv_heads", "head_dim", "pages")


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """One pool's place and layout. Offsets and sizes are in bytes."""

    pool_id: str
    """32 lowercase hex digits, random: tells this pool from every other one there was."""
    layers: int
    page_rows: int
    kv_heads: int
    head_dim: int
    dtype: str
    """'float32' or 'bfloat16'."""
    pages: int
    arrangement: Arrangement
    offset: int
    """Where the pool starts inside the allocation that the handle names."""
    total_bytes: int
    """The allocation up to the pool's end; on a GPU the allocation itself may go on."""
    handle: HandleKind = "memfd"
    device: str = ""
    """UUID of the GPU that has the memory, 'GPU-…'; empty for CPU memory. Never an ordinal: each
    process counts the GPUs that it sees."""
    token: str = ""
    """The handle itself as hex, where it is no descriptor."""
    kv: int = 2
    magic: str = MAGIC
    version: int = VERSION

    def __post_init__(self) -> None:
        _check(self)

    @property
    def header_offset(self) -> int:
        """Where the header lies inside the allocation."""
        return self.offset - HEADER_BYTES

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """One row of one layer, keys or values."""
        return self.kv_heads * self.head_dim * self.item_bytes

    @property
    def slab_bytes(self) -> int:
        """One page of one layer, keys or values."""
        return self.page_rows * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """One page, all layers, keys and values."""
        return self.layers * self.kv * self.slab_bytes

    @property
    def slab_strides(self) -> tuple[int, int, int]:
        """Slabs from one page, layer, and keys-to-values to the next."""
        if self.arrangement == "page-major":
            return self.layers * self.kv, self.kv, 1
        return 1, self.kv * self.pages, self.pages

    @property
    def slabs(self) -> int:
        """Slabs of one page."""
        return self.layers * self.kv

    @property
    def slab_step(self) -> int:
        """Slabs from one of a page's slabs to its next, in the order layer, keys or values."""
        return self.slab_strides[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pool's array, C-contiguous."""
        if self.arrangement == "page-major":
            head: tuple[int, ...] = (self.pages, self.layers, self.kv, self.page_rows)
        else:
            head = (self.layers, self.kv, self.pages * self.page_rows)
        return (*head, self.kv_heads, self.head_dim)

    def layout_digest(self) -> bytes:
        """16 bytes over every field: equal digests mean equal descriptions."""
        return xxhash.xxh3_128_digest(self.to_json().encode())

    def to_json(self) -> str:
        """Canonical JSON: equal descriptions give equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> PoolDescription:
        """Parse `to_json`'s text.

        Raises:
            InvalidInput: not a description, or one that is wrong in itself.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            return PoolDescription(**fields)
        except (ValueError, TypeError) as error:
            raise InvalidInput(Reason.PEER_PROTOCOL, f"pool description: {error}") from error


def describe_pool(
    *,
    layers: int,
    page_rows: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    pages: int,
    arrangement: Arrangement,
    offset: int = HEADER_BYTES,
) -> PoolDescription:
    """Describe a new pool in CPU memory behind its header, under a new random id.

    Raises:
        InvalidInput: a field is out of range; the detail names it and its value.
    """
    items = pages * layers * 2 * page_rows * kv_heads * head_dim
    return PoolDescription(
        pool_id=secrets.token_hex(16),
        layers=layers,
        page_rows=page_rows,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        pages=pages,
        arrangement=arrangement,
        offset=offset,
        total_bytes=offset + items * ITEM_BYTES.get(dtype, 0),
    )


def _refuse(field: str, value: object, wanted: str) -> InvalidInput:
    return InvalidInput(
        Reason.PEER_PROTOCOL, f"pool description: {field} is {value!r}, wanted {wanted}"
    )


def _check(description: PoolDescription) -> None:
    d = description
    if d.magic != MAGIC:
        raise _refuse("magic", d.magic, repr(MAGIC))
    if d.version != VERSION:
        raise _refuse("version", d.version, str(VERSION))
    for field in (*_COUNTS, "kv", "offset", "total_bytes"):
        value = getattr(d, field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _refuse(field, value, "an integer")
    for field in _COUNTS:
        if getattr(d, field) < 1:
            raise _refuse(field, getattr(d, field), "at least 1")
    if d.kv != 2:
        raise _refuse("kv", d.kv, "2 (keys and values)")
    if d.dtype not in ITEM_BYTES:
        raise _refuse("dtype", d.dtype, " or ".join(ITEM_BYTES))
    if d.arrangement not in get_args(Arrangement):
        raise _refuse("arrangement", d.arrangement, " or ".join(get_args(Arrangement)))
    if not _is_pool_id(d.pool_id):
        raise _refuse("pool_id", d.pool_id, "32 lowercase hex digits")
    if d.offset < HEADER_BYTES or d.offset % HEADER_BYTES:
        raise _refuse("offset", d.offset, f"a positive multiple of {HEADER_BYTES}")
    if d.total_bytes != d.offset + d.pages * d.page_bytes:
        raise _refuse("total_bytes", d.total_bytes, str(d.offset + d.pages * d.page_bytes))
    if d.handle not in get_args(HandleKind):
        raise _refuse("handle", d.handle, " or ".join(get_args(HandleKind)))
    on_gpu = d.handle != "memfd"
    if not isinstance(d.device, str) or d.device.startswith("GPU-") != on_gpu:
        raise _refuse("device", d.device, "a GPU's UUID" if on_gpu else "none for a memfd")
    if not _is_token(d.token, TOKEN_BYTES[d.handle]):
        raise _refuse("token", d.token, f"{TOKEN_BYTES[d.handle]} bytes as hex")


def _is_token(text: object, size: int) -> bool:
    return isinstance(text, str) and len(text) == 2 * size and set(text) <= set("0123456789abcdef")


def _is_pool_id(text: object) -> bool:
    return isinstance(text, str) and len(text) == 32 and set(text) <= set("0123456789abcdef")
