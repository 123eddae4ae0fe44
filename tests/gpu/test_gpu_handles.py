"""GPU pools pass between processes that see different GPUs, and are proven before use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.kv_move_unit import OwnerProcess
from duplet_core.errors import DupletError, InvalidInput
from duplet_memory.cuda_driver import CudaError, open_devices
from duplet_memory.cuda_pool import map_cuda_pool
from duplet_memory.layout import HandleKind

PAGES = 64
OFFSETS = {"cumem-fd": 4096, "cuda-ipc": (6 << 20) + 4096}
"""A pool may start anywhere inside the allocation that its handle names."""


@pytest.fixture(params=["cumem-fd", "cuda-ipc"])
def owner(request: pytest.FixtureRequest) -> Iterator[OwnerProcess]:
    """An owner on the last GPU: its ordinal there is 0, and not 0 here."""
    kind: HandleKind = request.param
    layout = {"arrangement": "page-major", "page_rows": 16, "pages": PAGES}
    owner = OwnerProcess(open_devices()[-1].uuid, kind, offset=OFFSETS[kind], **layout)
    owner.wait_ready()
    yield owner
    owner.close()


def test_a_pool_is_mapped_for_every_gpu_and_comes_back(owner: OwnerProcess) -> None:
    devices = open_devices()
    for _ in range(3):
        mapped = map_cuda_pool(owner.pool_fd, owner.description, devices)
        assert mapped.device is devices[-1]
        assert all(mapped.address(device) for device in devices)
        mapped.close()


def test_what_is_not_that_pool_is_refused(owner: OwnerProcess) -> None:
    good, devices = owner.description, open_devices()

    def refused(description: object, match: str) -> None:
        with pytest.raises(DupletError, match=match):
            map_cuda_pool(owner.pool_fd, description, devices)  # type: ignore[arg-type]

    refused(replace(good, pool_id="0" * 32), "pool id in memory")
    refused(replace(good, layers=18, pages=2 * PAGES), "layout digest in memory")
    elsewhere = "the memory lies on device|layout digest in memory"
    refused(replace(good, device=devices[0].uuid), elsewhere)
    refused(replace(good, device="GPU-0"), "is not visible here")
    shifted = replace(good, offset=good.offset + 4096, total_bytes=good.total_bytes + 4096)
    refused(shifted, "magic in memory|the handle names")
    huge = replace(good, pages=40 * PAGES, total_bytes=good.offset + 40 * PAGES * good.page_bytes)
    with pytest.raises((CudaError, InvalidInput)):
        map_cuda_pool(owner.pool_fd, huge, devices)
    # None of this leaves anything mapped, or harms the pool.
    map_cuda_pool(owner.pool_fd, good, devices).close()
