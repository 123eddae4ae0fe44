"""CPU pools: anonymous shared memory that is passed by descriptor and never by name.

A name could be left behind by a crash or be reused by another instance; a memfd disappears
with its last descriptor and mapping. Seals forbid changing its size, so a mapping can not
turn into SIGBUS under its reader. The first page of the allocation is a header that whoever
maps the pool reads back through the mapping: proof that this descriptor is that pool.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason, require
from duplet_memory.layout import MAGIC, VERSION, PoolDescription

HEADER = struct.Struct("<8sI4x16s16s")
"""Magic, version, pool id, layout digest."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
}


class Pool:
    """One mapping of one pool in this process.

    Owns its descriptor and its mapping, both until `close`. The memory itself lives until the
    last process has closed: the death of its maker does not invalidate a mapping elsewhere.
    """

    def __init__(self, description: PoolDescription, fd: int, mapping: mmap.mmap) -> None:
        """Take ownership of `fd` and `mapping`; made by `create_pool` and `map_pool`."""
        self.description = description
        self._fd = fd
        self._mapping = mapping
        self._memory: NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)

    @property
    def fd(self) -> int:
        """The pool's memfd, lent: valid until `close`."""
        require(self._memory is not None, "fd of a closed pool")
        return self._fd

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The whole allocation, header included: what copy plans' offsets count in. Lent."""
        require(self._memory is not None, "memory of a closed pool")
        assert self._memory is not None
        return self._memory

    @property
    def array(self) -> NDArray[Any]:
        """The pool as `description.shape`; float32, or uint16 bit patterns of bfloat16. Lent."""
        body = self.memory[self.description.offset :]
        return body.view(_ARRAY_DTYPES[self.description.dtype]).reshape(self.description.shape)

    def close(self) -> None:
        """Unmap and close the descriptor; a second call does nothing.

        Raises:
            BufferError: somebody still holds a view of the pool. Nothing is unmapped, for that
                view could still be read or written.
        """
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        del memory
        try:
            self._mapping.close()
        except BufferError:
            self._memory = np.frombuffer(self._mapping, dtype=np.uint8)
            raise
        os.close(self._fd)


def create_pool(description: PoolDescription) -> Pool:
    """Make a zeroed pool with its header. The caller owns the returned pool.

    Raises:
        InvalidInput: it is larger than the machine's memory.
    """
    require(description.handle == "memfd", f"a {description.handle} pool in CPU memory")
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if description.total_bytes > memory_bytes:
        # The kernel would lend it, and take it back from whoever writes the last page.
        detail = f"{description.pages} pages are {description.total_bytes} bytes"
        raise InvalidInput(
            Reason.INVALID_REQUEST, f"pool_pages: {detail}, the machine has {memory_bytes}"
        )
    fd = os.memfd_create("duplet-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, description.total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(fd, description.total_bytes)
    except OSError:
        os.close(fd)
        raise
    HEADER.pack_into(mapping, description.header_offset, *_header_fields(description))
    return Pool(description, fd, mapping)


def map_pool(fd: int, description: PoolDescription, *, writable: bool = True) -> Pool:
    """Map a pool that another process made, after proving that `fd` is that pool.

    `fd` is borrowed: the pool keeps a duplicate, the caller still closes its own. A mapping
    that is only read from should be made with `writable=False`.

    Raises:
        InvalidInput: size, seals, magic, version, id or layout differ; the detail says which.
    """
    if description.handle != "memfd":
        raise InvalidInput(Reason.PEER_PROTOCOL, f"pool handle {description.handle}, not a memfd")
    _check_descriptor(fd, description)
    own_fd = os.dup(fd)
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    try:
        mapping = mmap.mmap(own_fd, description.total_bytes, access=access)
    except OSError:
        os.close(own_fd)
        raise
    try:
        start = description.header_offset
        check_header(mapping[start : start + HEADER.size], description)
    except InvalidInput:
        mapping.close()
        os.close(own_fd)
        raise
    return Pool(description, own_fd, mapping)


def _header_fields(description: PoolDescription) -> tuple[bytes, int, bytes, bytes]:
    pool_id = bytes.fromhex(description.pool_id)
    return MAGIC.encode(), VERSION, pool_id, description.layout_digest()


def _check_descriptor(fd: int, description: PoolDescription) -> None:
    size = os.fstat(fd).st_size
    if size != description.total_bytes:
        raise InvalidInput(
            Reason.PEER_PROTOCOL,
            f"pool {description.pool_id}: the descriptor has {size} bytes, "
            f"the description says {description.total_bytes}",
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidInput(
            Reason.PEER_PROTOCOL, f"pool {description.pool_id}: not a memfd ({error.strerror})"
        ) from error
    if seals & _SEALS != _SEALS:
        raise InvalidInput(
            Reason.PEER_PROTOCOL,
            f"pool {description.pool_id}: its size is not sealed (seals {seals:#x})",
        )


def pack_header(description: PoolDescription) -> bytes:
    """The header's first bytes, as they lie in the pool's memory."""
    return HEADER.pack(*_header_fields(description))


def check_header(header: bytes, description: PoolDescription) -> None:
    """Compare what was read back through a mapping, `HEADER.size` bytes, with the description.

    Raises:
        InvalidInput: magic, version, pool id or layout digest differ.
    """
    names = ("magic", "version", "pool id", "layout digest")
    found = HEADER.unpack(header)
    for name, have, want in zip(names, found, _header_fields(description), strict=True):
        if have != want:
            shown = [x.hex() if isinstance(x, bytes) else str(x) for x in (have, want)]
            raise InvalidInput(
                Reason.PEER_PROTOCOL,
                f"pool {description.pool_id}: {name} in memory is {shown[0]}, "
                f"the description says {shown[1]}",
            )
