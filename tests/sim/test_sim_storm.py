"""A storm of cancels, and who comes again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from duplet_core.ids import Role
from duplet_sim.faults import storm


@pytest.mark.parametrize("lives", [True, False])
def test_nobody_comes_again_to_an_lb_that_is_gone(lives: bool) -> None:
    came: list[str] = []
    clients: dict[str, Any] = {
        "t1": SimpleNamespace(submit=SimpleNamespace(request_id="r1")),
    }
    sim: Any = SimpleNamespace(
        clients=clients,
        _do_cancel=clients.pop,
        plan=SimpleNamespace(random=lambda: 0.0),
        primary=lambda role: object() if role is Role.LB and lives else None,
        workload=SimpleNamespace(draw=lambda number: None),
        submitted=1,
        swarm=SimpleNamespace(deadline=100),
        request=lambda order, deadline, request_id: came.append(request_id),
    )
    storm(sim)
    assert came == (["r1"] if lives else [])
