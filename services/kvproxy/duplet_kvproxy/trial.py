"""Tries transports on this pair of GPUs, with scratch pools of its own, and times them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, require
from duplet_kvproxy.move_direct import DirectMover
from duplet_kvproxy.move_host import HostMover
from duplet_kvproxy.move_pages import PageMover
from duplet_kvproxy.move_staged import StagedMover
from duplet_kvproxy.transport import WHOLE_PAGES, GpuTransport, TransportName
from duplet_memory.cuda_driver import CudaError, Device, call
from duplet_memory.handle_cumem import allocate_shared
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.plan import RowCopy, check_copy
from duplet_pages.engine_config import Arrangement

ARRANGEMENTS: tuple[Arrangement, ...] = ("page-major", "layer-major")
TRIAL_PAGES = 64
MOVED_PAGES = 32
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one transport between two GPUs, for pools of one arrangement."""

    transport: TransportName
    source: str
    """UUID, as is `dest`."""
    dest: str
    arrangement: Arrangement
    ok: bool
    detail: str
    """Why not, where it did not work."""
    time_ms: float = 0.0
    """Median from the call to the event, GPUs idle."""
    gb_s: float = 0.0

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def describe_scratch(arrangement: Arrangement) -> PoolDescription:
    """The layout of a pool for trials."""
    return describe_pool(
        layers=36,
        page_rows=16,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        pages=TRIAL_PAGES,
        arrangement=arrangement,
    )


class ScratchPool:
    """A pool that exists for trials only, for work on every GPU of `reach`. Owns its memory."""

    def __init__(self, device: Device, reach: Sequence[Device], arrangement: Arrangement) -> None:
        described = describe_scratch(arrangement)
        self._device = device
        self.description: PoolDescription = replace(
            described, handle="cumem-fd", device=device.uuid
        )
        self._memory = allocate_shared(device, reach, described.total_bytes)

    def address(self, device: Device) -> int:
        """As `GpuPool.address`."""
        return self._memory.address(device)

    def fill(self, content: NDArray[np.uint8]) -> None:
        """Set the pool's bytes."""
        self._device.use()
        start = self.address(self._device) + self.description.offset
        call("cuMemcpyHtoD", start, content.ctypes.data, content.size)

    def read(self) -> NDArray[np.uint8]:
        """The pool's bytes."""
        d = self.description
        content = np.empty(d.pages * d.page_bytes, np.uint8)
        self._device.use()
        call(
            "cuMemcpyDtoH", content.ctypes.data, self.address(self._device) + d.offset, len(content)
        )
        return content

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def build_transport(name: TransportName, source: Device, dest: Device) -> GpuTransport:
    """A transport from `source` to `dest`; kept for the process's life.

    Raises:
        CudaError: what it needs was refused.
    """
    if name == "host":
        return HostMover(source, dest)
    if not (source.reaches(dest) and dest.reaches(source)):
        # Not left to a trial: a kernel that touches what it cannot reach ends the context.
        raise CudaError(name, "no peer access between these GPUs; `host` needs none")
    if name == "pages":
        return PageMover(source)
    if name == "staged":
        return StagedMover(source, dest)
    require(name in ("push", "pull"), f"{name} is no transport between GPUs")
    return DirectMover("push" if name == "push" else "pull", source, dest)


def run_trials(
    transports: dict[TransportName, GpuTransport], source: Device, dest: Device
) -> list[Trial]:
    """Move the same scattered pages by every transport in both arrangements, check every byte
    of the destination, and time it. Takes some hundred milliseconds and 300 MiB a GPU."""
    trials: list[Trial] = []
    both = list(dict.fromkeys((source, dest)))
    content = _random_pages()
    for arrangement in ARRANGEMENTS:
        names = [n for n in transports if arrangement == "page-major" or n not in WHOLE_PAGES]
        pools: list[ScratchPool] = []
        try:
            for device in (source, dest):
                reach = [d for d in both if d.reaches(device)]
                pools.append(ScratchPool(device, reach, arrangement))
            trials += [
                _try(transports[n], content, pools[0], pools[1], source, dest) for n in names
            ]
        except CudaError as error:
            trials += [
                Trial(n, source.uuid, dest.uuid, arrangement, False, error.detail) for n in names
            ]
        finally:
            for pool in pools:
                pool.close()
    return trials


def _random_pages() -> NDArray[np.uint8]:
    """A scratch pool's bytes; both arrangements have as many."""
    size = TRIAL_PAGES * describe_scratch("page-major").page_bytes
    return np.random.default_rng(7).integers(0, 2**64, size // 8, np.uint64).view(np.uint8)


def _try(
    transport: GpuTransport,
    content: NDArray[np.uint8],
    source: ScratchPool,
    dest: ScratchPool,
    at: Device,
    to: Device,
) -> Trial:
    arrangement = source.description.arrangement
    choose = np.random.default_rng(7)
    from_pages = choose.permutation(TRIAL_PAGES)[:MOVED_PAGES].tolist()
    to_pages = choose.permutation(TRIAL_PAGES)[:MOVED_PAGES].tolist()
    rows = MOVED_PAGES * source.description.page_rows
    copy = check_copy(source.description, from_pages, dest.description, to_pages, 0, rows)
    failed = Trial(transport.name, at.uuid, to.uuid, arrangement, False, "")
    try:
        source.fill(content)
        dest.fill(np.zeros_like(content))
        transport.start(copy, source, dest).wait()
        if not np.array_equal(dest.read(), expected_bytes(content, copy)):
            return replace(failed, detail="it reported success and moved wrong bytes")
        times_ms = [_time_ms(transport, copy, source, dest) for _ in range(REPEATS)]
    except (CudaError, InvalidInput) as error:
        return replace(failed, detail=error.detail)
    time_ms = statistics.median(times_ms)
    gb_s = copy.copied_bytes / time_ms / 1e6
    return replace(failed, ok=True, time_ms=round(time_ms, 4), gb_s=round(gb_s, 1))


def _time_ms(
    transport: GpuTransport, copy: RowCopy, source: ScratchPool, dest: ScratchPool
) -> float:
    start_ns = time.monotonic_ns()
    transport.start(copy, source, dest).wait()
    return (time.monotonic_ns() - start_ns) / 1e6


def expected_bytes(content: NDArray[np.uint8], copy: RowCopy) -> NDArray[np.uint8]:
    """A zeroed destination after the copy of whole pages, by plain indexing."""
    d = copy.source
    result = np.zeros_like(content)
    if d.arrangement == "page-major":
        shape: tuple[int, ...] = (d.pages, d.page_bytes)
        result.reshape(shape)[copy.dest_pages] = content.reshape(shape)[copy.source_pages]
    else:
        shape = (d.slabs, d.pages, d.slab_bytes)
        result.reshape(shape)[:, copy.dest_pages] = content.reshape(shape)[:, copy.source_pages]
    return result
