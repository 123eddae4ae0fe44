"""The monolith of real processes on one GPU, as `duplet up --monolith --gpu 0` runs it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from duplet_client import AsyncClient
from duplet_unit.gpus import model_settings
from tests.e2e.streams import known_spec
from tests.equality.asks import Ask, assert_same, cancel_some, read, read_all
from tests.equality.live_monolith import live_monolith
from tests.gpu_engine.row_asks import RowAsk

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(200),
]

SETTINGS = {
    "DUPLET_LB_QUEUE_WAIT_MS": "60000",
    "DUPLET_LB_QUEUE_LIMIT": "64",
    "DUPLET_MONOLITH_POOL_PAGES": "8192",
    **model_settings("random:s2-pro"),
}
ASKS: list[Ask] = [RowAsk(number) for number in range(1, 25)]
CANCELLED: list[Ask] = [RowAsk(number) for number in range(100, 110)]


async def test_s2_pro_on_one_gpu() -> None:
    """Alone the same rows twice; in company, with some that leave, every request ends well, and
    afterwards the rows alone are still the same, now behind cached voices."""
    async with live_monolith(SETTINGS, ("0",)) as listen, AsyncClient(listen) as client:
        spec = await known_spec(client)
        assert (spec.name, spec.dtype) == ("random:s2-pro", "bfloat16")
        cold = {ask.number: await read(client, spec, ask) for ask in ASKS[:4]}
        alone = {ask.number: await read(client, spec, ask) for ask in ASKS[:4]}
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_all(client, spec, ASKS, 16))
            group.create_task(cancel_some(client, spec, CANCELLED))
        assert len(reading.result()) == len(ASKS)
        again = {ask.number: await read(client, spec, ask) for ask in ASKS[:4]}
    assert not any(answer.cached_rows for answer in cold.values())
    assert all(answer.cached_rows for answer in alone.values())
    assert_same(alone, again)


async def test_a_pool_that_does_not_fit_stops_the_start() -> None:
    settings = {**SETTINGS, "DUPLET_MONOLITH_POOL_PAGES": "1000000"}
    with pytest.raises(AssertionError, match=r"pool_pages: .* fit"):
        async with live_monolith(settings, ("0",)):
            pass
