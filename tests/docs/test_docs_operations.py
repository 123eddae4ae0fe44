"""docs/operations.md speaks of what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from duplet_core.ids import Role
from duplet_core.timeline import BESIDE_SPANS, CUT, NETWORK, SEGMENTS, SERVICES
from duplet_decode.__main__ import CONDITIONS as OF_DECODE
from duplet_kvproxy import verdict
from duplet_kvproxy.__main__ import CONDITIONS as OF_KVPROXY
from duplet_lb.__main__ import CONDITIONS as OF_LB
from duplet_memory.handles import GPU_HANDLES
from duplet_prefill.__main__ import CONDITIONS as OF_PREFILL
from duplet_runtime.health import LIVE, READY
from duplet_runtime.service import OPEN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")


def first_cells(heading: str) -> list[str]:
    """The first column of the table whose first heading this is."""
    table = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


def quoted(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_health_name_is_explained() -> None:
    accepted = {f"protocol.{peer}" for peer in (Role.PREFILL, Role.DECODE, Role.LB)}
    conditions = {*OF_LB, *OF_PREFILL, *OF_DECODE, *OF_KVPROXY, *accepted}
    assert set(quoted(first_cells("name"))) == {LIVE, READY, OPEN, *conditions}


def test_every_segment_of_a_timeline_is_explained() -> None:
    text = PAGE.split("| segment | of |", 1)[1].split("###", 1)[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    assert [(name.strip(" `"), of.strip()) for name, of in rows] == list(
        zip(SEGMENTS, SERVICES, strict=True)
    )
    for name in (*(span[0] for span in BESIDE_SPANS), CUT, NETWORK):
        assert f"`{name}`" in text


def test_metrics_are_those_of_dashboard_and_alerts() -> None:
    """Which are checked against a unit that runs."""
    shown = (ROOT / "docker/grafana/dashboards/duplet.json").read_text()
    shown += (ROOT / "docker/prometheus/alerts.yml").read_text()
    names = quoted(first_cells("metric"))
    assert len(names) > 10
    assert [name for name in names if name not in shown] == []


GOOD_NEWS = {
    "CPU pools pass between processes and move at {cpu['gb_s']:g} GB/s (shm)",
    *(f"{kind} handles work (mapped in {{slowest:g}} ms)" for kind in GPU_HANDLES),
    "{name}: {_tell_way(best)}",
}


def doctors_words() -> set[str]:
    """All that the doctor may say, verdict and advice, with {expressions} as the code has them."""
    tree = ast.parse(Path(verdict.__file__).read_text("utf-8"))
    told = set()
    for call in ast.walk(tree):
        match call:
            case ast.Call(
                func=ast.Attribute(ast.Name("verdict" | "advice"), "append" | "insert"),
                args=[*_, said],
            ):
                told.add(ast.unparse(said))
    words = {getattr(verdict, one, None) or one.lstrip("f").strip("'\"") for one in told}
    return {word.replace("{kind}", kind) for word in words for kind in GPU_HANDLES}


def test_whatever_the_doctor_refuses_is_explained() -> None:
    rows = [phrase for cell in first_cells("it says") for phrase in cell.split(" / ")]
    assert len(rows) > 10
    told = doctors_words()
    assert told >= GOOD_NEWS
    assert {word for word in told if not any(row in word for row in rows)} == GOOD_NEWS
    assert [row for row in rows if not any(row in word for word in told)] == []


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\]\((\S+?)\)", PAGE))))
def test_a_link_leads_somewhere(name: str) -> None:
    path, _, heading = name.partition("#")
    assert (ROOT / "docs" / path).exists()
    if heading:
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / path).read_text("utf-8"), re.MULTILINE)
        assert heading in {h.lower().replace(" ", "-") for h in headings}
