"""Every transport, arrangement and page size moves exactly the rows that it was asked to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bench.kv_move_unit import OwnerProcess, start_pair
from duplet_core.errors import InvalidInput
from duplet_kvproxy.head_start import HeadAndRest, start_checked
from duplet_kvproxy.transport import (
    BY_ONE_KERNEL,
    GPU_TRANSPORTS,
    WHOLE_PAGES,
    GpuTransport,
    TransportName,
)
from duplet_kvproxy.trial import build_transport
from duplet_memory.cuda_driver import open_devices
from duplet_memory.plan import check_copy

ROWS_IN_POOL = 2048
RANGES = [(0, 700), (5, 333), (63, 2), (0, 1)]
"""First row and count: ragged at both ends, and a single row."""

Pair = tuple[OwnerProcess, OwnerProcess]


@pytest.fixture(scope="module")
def transports() -> dict[TransportName, GpuTransport]:
    """Of both GPUs, kept for the process's life as kvproxy keeps them."""
    devices = open_devices()
    return {name: build_transport(name, devices[0], devices[-1]) for name in GPU_TRANSPORTS}


@pytest.fixture(
    scope="module",
    params=[
        ("page-major", 1, "cumem-fd"),
        ("page-major", 16, "cumem-fd"),
        ("page-major", 64, "cuda-ipc"),
        ("layer-major", 1, "cumem-fd"),
        ("layer-major", 16, "cuda-ipc"),
        ("layer-major", 64, "cumem-fd"),
    ],
    ids=str,
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    arrangement, page_rows, handle = request.param
    owners = start_pair(handle, arrangement, page_rows, ROWS_IN_POOL // page_rows)
    yield owners
    for owner in owners:
        owner.close()


@pytest.mark.parametrize("name", GPU_TRANSPORTS)
@pytest.mark.parametrize(("first", "count"), RANGES)
def test_rows_arrive_and_nothing_else_changes(
    transports: dict[TransportName, GpuTransport],
    pair: Pair,
    name: TransportName,
    first: int,
    count: int,
) -> None:
    source, dest = pair
    copy, pages = make_copy(pair, first, count)
    dest.ask(do="fill", poison=True)
    if name in WHOLE_PAGES and source.description.arrangement != "page-major":
        with pytest.raises(InvalidInput, match="whole pages of a layer-major source"):
            start(transports[name], copy, pair)
        return
    start(transports[name], copy, pair).wait()
    d = source.description
    if name in WHOLE_PAGES:
        # Whole pages: what lies beside the range comes along.
        first, count = 0, len(pages[0]) * d.page_rows
    else:
        first %= d.page_rows
    checked = {"pages": pages[1], "source_pages": pages[0], "first": first, "count": count}
    assert dest.ask(do="check", **checked) == 0
    checked["count"] = count + 1 if name not in WHOLE_PAGES else count
    checked["source_pages"] = pages[0][::-1] if len(pages[0]) > 1 else [pages[0][0] + 1]
    assert dest.ask(do="check", **checked) > 0, "the check itself can fail"


@pytest.mark.parametrize("name", GPU_TRANSPORTS)
def test_many_copies_in_flight_land_in_order(
    transports: dict[TransportName, GpuTransport], pair: Pair, name: TransportName
) -> None:
    """A prompt in parts that meet inside pages, all queued before the first is waited for."""
    source, dest = pair
    if name in WHOLE_PAGES and source.description.arrangement != "page-major":
        pytest.skip("whole pages are for page-major pools")
    dest.ask(do="fill", poison=True)
    page_rows = source.description.page_rows
    _, pages = make_copy(pair, 0, 700)
    flights = []
    for first in range(0, 700, 100):
        count = min(100, 700 - first)
        part = slice(first // page_rows, -(-(first + count) // page_rows))
        lists = (pages[0][part], pages[1][part])
        copy = check_copy(source.description, lists[0], dest.description, lists[1], first, count)
        flights.append(start(transports[name], copy, pair))
    for flight in flights:
        flight.wait()
    count = len(pages[0]) * page_rows if name in WHOLE_PAGES else 700
    checked = {"pages": pages[1], "source_pages": pages[0], "first": 0, "count": count}
    assert dest.ask(do="check", **checked) == 0


@pytest.mark.parametrize("name", BY_ONE_KERNEL)
def test_a_head_and_its_rest_are_the_copy(
    transports: dict[TransportName, GpuTransport], pair: Pair, name: TransportName
) -> None:
    source, dest = pair
    dest.ask(do="fill", poison=True)
    first, count = 5 % source.description.page_rows, 700
    _, (from_pages, to_pages) = make_copy(pair, first, count)
    pools: Any = source.pool, dest.pool
    flight, _ = start_checked(
        transports[name], pools[0], from_pages, pools[1], to_pages, first, count, head_pages=2
    )
    assert isinstance(flight, HeadAndRest)
    flight.wait()
    checked = {"pages": to_pages, "source_pages": from_pages, "first": first, "count": count}
    assert dest.ask(do="check", **checked) == 0


def test_digests_taken_and_verified_agree(
    transports: dict[TransportName, GpuTransport], pair: Pair
) -> None:
    source, dest = pair
    copy, pages = make_copy(pair, 0, 700)
    start(transports["push"], copy, pair).wait()
    taken = source.ask(do="digest", pages=pages[0], rows=700, repeats=1)["digests"]
    verified = dest.ask(do="digest", pages=pages[1], rows=700, repeats=1)["digests"]
    assert taken == verified
    assert len(set(taken)) == len(pages[0])


def start(transport: GpuTransport, copy: Any, pair: Pair) -> Any:
    source, dest = pair[0].pool, pair[1].pool
    assert source is not None
    assert dest is not None
    return transport.start(copy, source, dest)


def make_copy(pair: Pair, first: int, count: int) -> tuple[Any, tuple[list[int], list[int]]]:
    source, dest = pair[0].description, pair[1].description
    wanted = -(-(first % source.page_rows + count) // source.page_rows)
    chance = np.random.default_rng(first + count)
    lists = tuple(chance.permutation(d.pages)[:wanted].tolist() for d in (source, dest))
    pages: tuple[list[int], list[int]] = (lists[0], lists[1])
    return check_copy(source, pages[0], dest, pages[1], first, count), pages
