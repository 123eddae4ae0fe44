"""Dashboard and alert rules speak of metrics that a unit has, from its start on."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from docs.metric_tables import find_all, shown_name
from duplet_canary.watch import observe
from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_runtime.counters import COUNTERS, EVERYWHERE
from duplet_runtime.metrics import Metrics
from tests.canary.canary_parts import ScriptedSpeaker, make_watch
from tests.e2e.live_unit import live_unit
from tests.e2e.streams import Ask, Stream, known_spec

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "duplet.json"
RULES = ROOT / "docker" / "prometheus" / "alerts.yml"
NAME = re.compile(r"duplet_[a-z_]+")
WITH_A_FLOOR = {"duplet_decode_step_predicted_seconds", "duplet_decode_step_longest_seconds"}


def named() -> dict[str, set[str]]:
    """By file, the metrics that its expressions name."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = " ".join(target["expr"] for p in panels for target in p.get("targets", ()))
    return {
        DASHBOARD.name: set(NAME.findall(shown)),
        RULES.name: set(NAME.findall(RULES.read_text())),
    }


def scrape(address: str) -> dict[str, float]:
    """Values of all samples by name; of several series the sum."""
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def of_a_canary() -> dict[str, float]:
    """The samples of a canary that has not begun."""
    metrics = Metrics("canary")
    observe(make_watch(ScriptedSpeaker()), metrics)
    return {s.name: s.value for family in metrics.registry.collect() for s in family.samples}


async def of_the_page() -> set[str]:
    """The samples that docs/metrics.md tells of a unit whose decode keeps no floor."""
    families = [family for role in Role for family in (await find_all())[role]]
    assert {shown_name(family) for family in families} >= WITH_A_FLOOR
    names = {sample.name for family in families for sample in family.samples}
    return names - WITH_A_FLOOR


async def test_every_metric_that_is_named_exists_and_moves() -> None:
    found = of_a_canary()
    async with live_unit() as unit:
        addresses = unit.metrics.values()
        for address in addresses:
            found |= await asyncio.to_thread(scrape, address)
        assert set(found) - set(of_a_canary()) == await of_the_page()
        wanted = named()
        assert all(len(names) > 8 for names in wanted.values())
        assert {f: names - set(found) for f, names in wanted.items()} == {f: set() for f in wanted}
        async with AsyncClient(unit.listen) as client:
            stream = await Stream(Ask(3, max_rows=30)).read(client, await known_spec(client))
        assert stream.count == 30
        await unit.wait_idle()
        after: dict[str, float] = {}
        for address in addresses:
            after |= await asyncio.to_thread(scrape, address)
    for name, more in {
        "duplet_lb_rows_total": 30,
        "duplet_lb_row_gap_seconds_count": 29,
        "duplet_lb_ttft_seconds_count": 1,
        "duplet_lb_ttfa_seconds_count": 1,
        "duplet_lb_stream_rate_rows_per_second_count": 1,
        "duplet_lb_requests_ended_total": 1,
        "duplet_lb_segment_seconds_count": 16,
        "duplet_decode_step_seconds_count": 29,
        "duplet_decode_step_streams_sum": 29,
        "duplet_prefill_prompt_seconds_count": 1,
        "duplet_kvproxy_transfers_landed_total": 1,
    }.items():
        assert after[name] - found[name] == more, name
    for name in ("duplet_kvproxy_copies_total", "duplet_kvproxy_copied_bytes_total"):
        assert after[name] > found[name], name


def test_every_counter_that_core_raises_is_declared() -> None:
    declared = {*EVERYWHERE}.union(*COUNTERS.values())
    core = (ROOT / "libs" / "core" / "duplet_core").glob("*.py")
    raised = {n for path in core for n in re.findall(r'Count\(\s*"(\w+)"', path.read_text())}
    assert len(raised) > 8
    assert raised == declared
