"""Units of real processes on two GPUs, and the monolith on one, as `duplet up --gpu` runs them."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_unit.gpus import TRANSPORTS, model_settings
from tests.e2e.live_unit import LiveUnit, live_unit
from tests.e2e.streams import known_spec
from tests.equality.asks import Answer, Ask, assert_same, cancel_some, read, read_all
from tests.equality.live_monolith import live_monolith
from tests.gpu_engine.row_asks import RowAsk

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs"),
    pytest.mark.timeout(400),
]

PAIR = ("0", "1")
PATIENT = {"DUPLET_LB_QUEUE_WAIT_MS": "60000", "DUPLET_LB_QUEUE_LIMIT": "64"}
S2_PRO = {
    **PATIENT,
    **model_settings("random:s2-pro"),
    # A pass of other rows has other last bits, and a draw between equals then goes elsewhere.
    "DUPLET_PREFILL_CHUNK_ROWS": "2048",
    "DUPLET_MONOLITH_CHUNK_ROWS": "2048",
}
ASKS: list[Ask] = [RowAsk(number) for number in range(1, 33)]
FEW = ASKS[:6]
CANCELLED: list[Ask] = [RowAsk(number) for number in range(100, 116)]
TINY = {
    **PATIENT,
    **{f"DUPLET_{name}_DTYPE": "float32" for name in ("PREFILL", "DECODE", "MONOLITH")},
    "DUPLET_PREFILL_POOL_PAGES": "2048",
    "DUPLET_DECODE_POOL_PAGES": "2048",
    "DUPLET_MONOLITH_POOL_PAGES": "2048",
}
TINY_ASKS = [Ask(number) for number in range(208)]
SAME_SHARE = 0.95
"""Of float32 streams in different company: two scores within rounding of each other end the
others' equality."""


async def assert_unharmed(unit: LiveUnit, checks: int) -> None:
    """Every page is back, all KV was right, and every copy went one way."""
    await unit.wait_idle()
    told = await unit.wait_pages_free()
    assert told.kv_checks >= checks
    assert told.kv_mismatches == 0
    log = [line for line in unit.log(Role.KVPROXY).splitlines() if '"event": "transport"' in line]
    paths = {json.loads(line)["path"].split(":")[0] for line in log}
    assert len(paths) == 1
    assert paths <= set(TRANSPORTS.split(","))


async def test_s2_pro_on_a_pair_gives_the_monoliths_rows() -> None:
    """Alone, where both make the same passes and steps, bit for bit; with company and cancels
    every request ends well and every page is back."""
    async with live_unit(S2_PRO, gpus=PAIR) as unit, AsyncClient(unit.listen) as client:
        spec = await known_spec(client)
        assert (spec.name, spec.dtype, spec.kv_hash) == (
            "random:s2-pro",
            "bfloat16",
            "duplet-mix128-v1",
        )
        alone = {ask.number: await read(client, spec, ask) for ask in FEW}
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_all(client, spec, ASKS, 16))
            group.create_task(cancel_some(client, spec, CANCELLED))
        answers = reading.result()
        assert len(answers) == len(ASKS)
        assert any(answer.cached_rows for answer in answers.values())
        await assert_unharmed(unit, len(FEW) + len(ASKS))
    async with live_monolith(S2_PRO, ("0",)) as listen, AsyncClient(listen) as client:
        spec = await known_spec(client)
        same = {ask.number: await read(client, spec, ask) for ask in FEW}
    assert_same(alone, same)


def share_same(answers: dict[int, Answer], reference: dict[int, Answer]) -> float:
    same = [
        (answer.rows, answer.reason) == (reference[n].rows, reference[n].reason)
        for n, answer in answers.items()
    ]
    return sum(same) / len(same)


async def test_tiny_in_float32_is_the_same_on_every_device_and_in_every_company() -> None:
    found: list[dict[int, Answer]] = []
    for overlap in ("true", "false"):
        settings = {
            **TINY,
            "DUPLET_PREFILL_OVERLAP": overlap,
            "DUPLET_DECODE_OVERLAP": overlap,
        }
        async with live_unit(settings, gpus=PAIR) as unit, AsyncClient(unit.listen) as client:
            found.append(await read_all(client, await known_spec(client), TINY_ASKS, 16))
            await assert_unharmed(unit, len(TINY_ASKS) - 40)
    async with live_monolith(TINY, ("0",)) as listen, AsyncClient(listen) as client:
        found.append(await read_all(client, await known_spec(client), TINY_ASKS, 16))
    async with live_monolith(PATIENT) as listen, AsyncClient(listen) as client:
        on_cpu = await read_all(client, await known_spec(client), TINY_ASKS, 16)
    shares = [share_same(answers, on_cpu) for answers in found]
    assert min(shares) >= SAME_SHARE, shares
