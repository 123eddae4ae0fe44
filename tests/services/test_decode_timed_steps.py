"""decode's service between its settings, its engine and its machine: steps are timed where every
stream is to keep a floor, and what they took is what the machine admits by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from duplet_core.decode import DecodeMachine
from duplet_core.engine import Ready, StepTime
from duplet_core.step_guard import longest_step_ns
from duplet_decode import __main__ as decode
from duplet_pages.engine_config import EngineConfig
from tests.core.samples import DECODE1
from tests.services.plain_spec import SPEC

TIMES = tuple(StepTime(n, 100 * n, 5_000_000 + 20_000 * n) for n in (1, 8, 32))


class Host:
    """In the place of the service that would start an engine."""

    config: EngineConfig
    machine: DecodeMachine

    def __init__(self, service: Any, method: Any) -> None: ...

    async def run(self, config: EngineConfig, make_machine: Any, *_: Any) -> None:
        Host.config = config
        Host.machine = make_machine(Ready(SPEC.to_json(), "", 64, 16, 48, TIMES))


@pytest.mark.parametrize("floor", [0.0, 42.0])
async def test_timed_steps_go_from_the_engine_to_the_guard(
    monkeypatch: pytest.MonkeyPatch, floor: float
) -> None:
    monkeypatch.setattr(decode, "EngineService", Host)
    settings = decode.DecodeSettings(floor_rows_per_s=floor)
    health = SimpleNamespace(set=lambda *_: None)
    service: Any = SimpleNamespace(settings=settings, instance=DECODE1, health=health)
    await decode.serve(service)
    guard = Host.machine.guard
    if not floor:
        assert Host.config.longest_step_ns == 0 and guard is None
        return
    assert Host.config.longest_step_ns == longest_step_ns(floor)
    assert guard is not None and guard.streams_believed() == 32
    assert guard.predict_ns(8, 800) == pytest.approx(5_160_000, rel=0.01)
