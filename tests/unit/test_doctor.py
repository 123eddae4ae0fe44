"""`duplet doctor`: the real probe on this machine, and a report of one with GPUs."""

from __future__ import annotations

import json
from io import StringIO

from rich.console import Console
from typer.testing import CliRunner

from duplet_unit.commands import app
from duplet_unit.doctor import findings


def test_the_cpu_path_is_tried_for_real() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["cpu"]["ok"]
    assert report["cpu"]["gb_s"] > 0
    assert report["gpus"] or "No GPU here" in report["verdict"][0]


def test_gpus_handles_and_moves_are_shown_with_the_verdict() -> None:
    ends = {"source": "GPU-aaaaaaaa-1", "dest": "GPU-bbbbbbbb-2"}
    move = {**ends, "arrangement": "page-major", "time_ms": 0.2, "detail": ""}
    report = {
        "gpus": [{"uuid": "GPU-aaaaaaaa-1", "name": "H200", "capability": 90, "free_gib": 139.3}],
        "links": [{**ends, "peer_access": False, "link": "PCIe"}],
        "handles": [
            {"kind": "cumem-fabric", "device": "GPU-aaaaaaaa-1", "ok": False}
            | {"detail": "NOT_PERMITTED", "map_ms": 0.0}
        ],
        "trials": [{**move, "transport": "pages", "ok": True, "gb_s": 291.9}],
        "verdict": ["P2P by pages"],
        "advice": ["use a driver with P2P"],
    }
    out = StringIO()
    Console(file=out, width=120).print(findings(report))
    text = out.getvalue()
    for part in ("PCIe to GPU-bbbbbbbb, no P2P", "NOT_PERMITTED", "291.9", "P2P by pages"):
        assert part in text
    assert "To do: use a driver with P2P" in text
