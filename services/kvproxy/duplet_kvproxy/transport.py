"""Ways to carry out a copy. Each is one class in one file; the mover picks one a copy.

| name | file | for |
|---|---|---|
| `shm` | here | CPU pools |
| `pages` | `move_pages` | page-major pools: whole pages by the copy engine |
| `push`, `pull` | `move_direct` | any arrangement: one kernel on the source's or dest's GPU |
| `staged` | `move_staged` | any arrangement: gather, one copy a chunk, scatter |
| `host` | `move_host` | page-major pools on GPUs without peer access: through host memory |
"""

from __future__ import annotations

from typing import Literal, Protocol

from duplet_memory.cuda_driver import Device
from duplet_memory.layout import PoolDescription
from duplet_memory.plan import RowCopy, execute, plan_ranges
from duplet_memory.pool import Pool

TransportName = Literal["shm", "pages", "push", "pull", "staged", "host"]
GPU_TRANSPORTS: tuple[TransportName, ...] = ("pages", "push", "pull", "staged", "host")
WHOLE_PAGES: tuple[TransportName, ...] = ("pages", "host")
"""These move whole pages of page-major pools and nothing else."""
BY_ONE_KERNEL: tuple[TransportName, ...] = ("push", "pull")
"""These launch one kernel for any rows of a copy."""

MAX_IN_FLIGHT = 8
"""Copies that a GPU transport has queued at once; each owns tables until it is quiet, two of
them where its head was started first."""


class GpuPool(Protocol):
    """A pool that work on either GPU can address."""

    description: PoolDescription

    def address(self, device: Device) -> int:
        """Of the allocation's first byte."""
        ...


class FlightLike(Protocol):
    """A copy that was started."""

    def wait(self) -> None:
        """Block until it has completed successfully.

        Raises:
            CudaError: it failed, or nobody knows.
        """
        ...


class GpuTransport(Protocol):
    """One way between two GPUs. Used by the mover's thread alone."""

    name: TransportName

    def start(self, copy: RowCopy, source: GpuPool, dest: GpuPool) -> FlightLike:
        """Queue the copy behind all earlier ones of this transport. The source's rows are
        complete: their event was waited for before anyone asked for the copy.

        Raises:
            InvalidInput: refused; nothing was queued.
            CudaError: a call failed; part of the copy may have been queued.
        """
        ...


def copy_shared_memory(copy: RowCopy, source: Pool, dest: Pool) -> None:
    """The `shm` transport: copies on the CPU and returns when all is done."""
    execute(plan_ranges(copy), source.memory, dest.memory)
