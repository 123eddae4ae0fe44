"""Two of the cases of `make faults` that nothing else covers, on one unit."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rich.console import Console

from tests.faults.fault_cases import ALL_CASES, Scene, run_case
from tests.faults.run_faults import ON_CPU, Report, scene_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLICE = ("three ends withheld", "decode's output stopped")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene() -> AsyncIterator[Scene]:
    report = Report(Console(quiet=True))
    async with scene_of(ON_CPU, report) as started:
        yield started
    assert report.kv_checks > 0
    assert report.mismatches == 0


@pytest.mark.parametrize("name", SLICE)
async def test_clients_pages_and_kv_are_unharmed(scene: Scene, name: str) -> None:
    (case,) = [case for case in ALL_CASES if case.name == name]
    outcome = await run_case(scene, case)
    assert outcome.good > 0
    assert outcome.errors, "the fault met nobody"
    assert outcome.times.unexplained == ()
