"""kvproxy on a machine whose two GPUs do not reach each other: `python -m
tests.services.no_peer_kvproxy`. The GPUs' memory is shared memory here, and `host` copies it;
trials, choice, service and mover are the product's."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from duplet_kvproxy import __main__ as kvproxy
from duplet_kvproxy import choice, trial
from duplet_kvproxy.transport import GpuPool
from duplet_memory.cuda_pool import MappedPool
from duplet_memory.layout import PoolDescription
from duplet_memory.plan import RowCopy, plan_pages

UUIDS = ("GPU-0000aaaa-0000", "GPU-0000bbbb-0000")


class Gpu:
    """Reaches its own memory alone."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    def reaches(self, other: Gpu) -> bool:
        return other is self

    def attribute(self, name: str) -> int:
        assert name == "MPS_ENABLED"
        return 0

    def use(self) -> None:
        pass


GPUS = tuple(Gpu(uuid) for uuid in UUIDS)


class Memory:
    """Some bytes. Owns them until `close`."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self._bytes: Any = np.frombuffer(content, np.uint8)

    def address(self, device: Any) -> int:
        return int(self._bytes.ctypes.data)

    def close(self) -> None:
        self._bytes = None
        if isinstance(self._content, mmap.mmap):
            self._content.close()


def allocate(device: Gpu, reach: Sequence[Gpu], size: int) -> Memory:
    assert list(reach) == [device], "nobody else reaches it"
    return Memory(bytearray(size))


def call(name: str, dest: int, source: int, size: int) -> None:
    assert name in ("cuMemcpyHtoD", "cuMemcpyDtoH")
    ctypes.memmove(dest, source, size)


class Landed:
    """A copy that is over."""

    def wait(self) -> None:
        pass


class HostMover:
    """Whole pages, as the product's."""

    name = "host"

    def __init__(self, source: Gpu, dest: Gpu) -> None:
        self._source, self._dest = source, dest

    def start(self, copy: RowCopy, source: GpuPool, dest: GpuPool) -> Landed:
        ends: Any = (self._source, self._dest)
        from_start, to_start = source.address(ends[0]), dest.address(ends[1])
        for from_place, to_place, size in plan_pages(copy).ranges.tolist():
            ctypes.memmove(to_start + to_place, from_start + from_place, size)
        return Landed()


def map_pool(fd: int, description: PoolDescription, devices: Sequence[Any]) -> MappedPool:
    device = next(d for d in devices if d.uuid == description.device)
    memory: Any = Memory(mmap.mmap(fd, description.total_bytes))
    return MappedPool(description, device, [d for d in devices if d.reaches(device)], memory)


@contextmanager
def no_peer_access() -> Iterator[None]:
    """The product with these GPUs."""
    with ExitStack() as stack:
        for where, name, what in (
            (choice, "open_devices", lambda: GPUS),
            (trial, "HostMover", HostMover),
            (trial, "allocate_shared", allocate),
            (trial, "call", call),
            (trial, "TRIAL_PAGES", 4),
            (trial, "MOVED_PAGES", 2),
            (kvproxy, "map_cuda_pool", map_pool),
        ):
            stack.enter_context(patch.object(where, name, what))
        yield


def main() -> int:
    with no_peer_access():
        return kvproxy.main()


if __name__ == "__main__":
    sys.exit(main())
