"""What the GPU queues hand to the driver, read back from where the driver would read it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from duplet_kvproxy import gpu_queue, kernel_build
from duplet_kvproxy.gpu_queue import FIRST_GROUP_COPIES, queue_copies
from duplet_kvproxy.kernel_build import LaunchedRows, LaunchParameters, MoveRows

SOURCE, DEST = 0x7F00_0000_0000, 0x7E00_0000_0000


class Queue:
    """A stream that nobody runs."""

    handle = 77

    class device:
        @staticmethod
        def use() -> None: ...


def read_words(address: int, count: int) -> NDArray[np.uint64]:
    view = (ctypes.c_uint64 * count).from_address(address)
    return np.ctypeslib.as_array(view).copy()


@pytest.mark.parametrize("copies", [1, 3, 4, 5, 12, 13, 128, 1000])
def test_every_range_goes_out_once_in_small_groups_first(
    monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    sent: list[NDArray[np.uint64]] = []
    sizes: list[int] = []

    def take(name: str, *a: int) -> None:
        assert name == "cuMemcpyBatchAsync"
        dests, sources, lengths, count, attributes, first, attribute_count, stream = a
        assert (attribute_count, stream) == (1, 77)
        assert ctypes.c_int.from_address(attributes).value == 1, "sources in stream order"
        assert ctypes.c_size_t.from_address(first).value == 0
        columns = [read_words(address, count) for address in (sources, dests, lengths)]
        sent.append(np.stack(columns, axis=1))
        sizes.append(count)

    monkeypatch.setattr(gpu_queue, "call_quickly", take)
    ranges = np.random.default_rng(copies).integers(0, 2**40, (3, copies)).T
    queue: Any = Queue()
    queue_copies(queue, ranges, SOURCE, DEST)
    wanted = ranges + np.array([SOURCE, DEST, 0])
    assert np.array_equal(np.concatenate(sent), wanted.astype(np.uint64))
    assert sizes[0] == min(FIRST_GROUP_COPIES, copies)
    assert len(sizes) <= 6


def test_a_launch_carries_its_arguments_in_the_kernels_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, ...]] = []

    def take(name: str, *a: int) -> None:
        assert name == "cuLaunchKernel"
        function, grid, *_, shared, stream, table, extra = a
        places = read_words(table, 15).tolist()
        words = [ctypes.c_uint64.from_address(p).value for p in places[:4] + places[13:]]
        numbers = [ctypes.c_int32.from_address(p).value for p in places[4:13]]
        seen.append((function, grid, shared, stream, extra, *words, *numbers))

    monkeypatch.setattr(kernel_build, "call_quickly", take)
    kernel = MoveRows.__new__(MoveRows)
    kernel._shared, kernel._wanted_programs, kernel._block_rows = 0, 264, 8
    kernel._function = 0x1234_5678_9ABC
    kernel._parameters = LaunchParameters()
    device: Any = Queue.device
    kernel._device = device
    head = (0x1234_5678_9ABC, 3 * 72, 0, 77, 0)
    for rows, grid, walkers in (
        (17, 3 * 72, 3),
        (2048, 256, 256),
        (4096, 256, 256),
        (4000, 250, 250),
        (1000, 250, 125),
    ):
        numbers = (16, 3, rows, 72, 7, 8, -5, 6)
        kernel.launch(77, LaunchedRows(SOURCE, DEST, 2**40, 2**41, *numbers))
        head = (head[0], grid, *head[2:])
        assert seen.pop() == (*head, SOURCE, DEST, 2**40, 2**41, 0, 0, *numbers, walkers)
