"""The profile `observability` on a unit of containers that runs, with a load on it.

Prometheus with our configuration must reach every service, evaluate every alert rule and have an
answer for every panel of the dashboard; a trace must arrive with the spans of all four services.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from duplet_unit.unit import free_local_address
from tests.compose.composed_unit import ALL_PROFILES, UNIT_FILES, ComposedUnit
from tests.compose.debian_prometheus import find_program
from tests.compose.images import ROOT, SERVICES, image_of
from tests.e2e.live_unit import until
from tests.e2e.streams import Ask, Load

FILES = (*UNIT_FILES, "tests/compose/observability.yaml")
STARTED = ("prometheus", "traces")
"""Of the profile; Grafana has no stand-in."""
ENDPOINT = "http://traces:4317"
"""As docs/operations.md says."""

RULES = ROOT / "docker/prometheus/alerts.yml"
DASHBOARD = ROOT / "docker/grafana/dashboards/duplet.json"
RATE_INTERVAL = "1m"
"""Grafana's own is at least this: four times the interval that it takes for the scrapes'."""
NAME = re.compile(r"duplet_[a-z_]+")

LIMIT_S = 90.0
POLL_S = 0.5
"""Between two rounds of a hundred queries."""


def panel_queries() -> list[str]:
    """What the dashboard's panels ask, as Grafana would send it."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    told = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [expression.replace("$__rate_interval", RATE_INTERVAL) for expression in told]


def alert_names() -> set[str]:
    return set(re.findall(r"^ *- alert: (\w+)$", RULES.read_text(), re.MULTILINE))


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Its HTTP API, through the published port."""

    address: str

    async def get(self, path: str, **query: str) -> Any:
        """The answer's data; None while nobody answers.

        Raises:
            AssertionError: it refused; an expression that does not parse, for one.
        """
        return await asyncio.to_thread(self._get, path, query)

    def _get(self, path: str, query: dict[str, str]) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise AssertionError(f"{path} {query}: {error.read().decode()}") from error
            return None  # it starts
        except OSError:
            return None

    async def unreached(self) -> dict[str, str]:
        """By target, why it is not up; everyone until Prometheus answers."""
        wanted = {f"{service}:9100" for service in SERVICES}
        told = await self.get("targets")
        if not told or not told["activeTargets"]:
            return dict.fromkeys(wanted, "Prometheus does not know it yet")
        found = {t["labels"]["instance"]: t for t in told["activeTargets"]}
        assert set(found) == wanted, f"targets {set(found)}"
        return {n: t["lastError"] or t["health"] for n, t in found.items() if t["health"] != "up"}

    async def unwell_rules(self) -> dict[str, str]:
        """By alert, what is wrong with its rule, or that it fires although nothing is wrong."""
        told = await self.get("rules")
        if told is None:
            return dict.fromkeys(alert_names(), "Prometheus does not answer")
        rules = {rule["name"]: rule for group in told["groups"] for rule in group["rules"]}
        assert set(rules) == alert_names(), f"rules {set(rules)}"
        firing = [name for name, rule in rules.items() if rule["state"] == "firing"]
        assert not firing, f"firing on a healthy unit: {firing}"
        return {
            name: rule.get("lastError") or rule["health"]
            for name, rule in rules.items()
            if rule["health"] != "ok"
        }

    async def unanswered(self) -> list[str]:
        """What of the dashboard has no number: metrics, and panels' expressions."""
        queries = panel_queries()
        names = sorted({name for query in queries for name in NAME.findall(query)})
        missing = []
        for query in (*names, *queries):
            told = await self.get("query", query=query)
            if told is None or all(series["value"][1] == "NaN" for series in told["result"]):
                missing.append(query)
        return missing


async def complete_traces(unit: ComposedUnit) -> int:
    """Traces that hold a request and spans of all four services."""
    said = await unit.compose(*ALL_PROFILES, "logs", "--no-color", "traces", files=FILES)
    told = [json.loads(line[line.index("{") :]) for line in said.splitlines() if "{" in line]
    services: dict[str, set[str]] = defaultdict(set)
    for span in told:
        services[span["trace"]].add(span["service"])
    whole = {span["trace"] for span in told if span["name"] == "generate"}
    return sum(services[trace] == {f"duplet-{s}" for s in SERVICES} for trace in whole)


@asynccontextmanager
async def observed(unit: ComposedUnit) -> AsyncIterator[tuple[ComposedUnit, Prometheus]]:
    """The unit with the profile on it while the context lasts; lb is restarted for it, and to
    be rid of it."""
    with tempfile.TemporaryDirectory(prefix="duplet-prometheus-") as folder:
        prometheus = Prometheus(free_local_address())
        told = {
            "DEBIAN_PROMETHEUS": str(find_program("prometheus", Path(folder))),
            "DUPLET_LB_OTLP_ENDPOINT": ENDPOINT,
            "LB_IMAGE": image_of(Role.LB),
            "PUBLISH_PROMETHEUS": prometheus.address,
            "PUBLISH_TRACES": free_local_address(),
        }
        engine = replace(unit.engine, environment={**unit.engine.environment, **told})
        watched = replace(unit, engine=engine)
        up = ("up", "-d", "--no-build")
        try:
            await watched.compose(*ALL_PROFILES, *up, *STARTED, str(Role.LB), files=FILES)
            await watched.wait_serving()
            yield watched, prometheus
        finally:
            await watched.compose(*ALL_PROFILES, "rm", "-s", "-f", *STARTED, files=FILES)
            await unit.compose(*up, str(Role.LB))
            await unit.wait_serving()


async def watch_unit(unit: ComposedUnit, spec: ModelSpec, asks: list[Ask]) -> str:
    """Start the profile, serve a load and look at all of it. Returns what was seen, in words.

    Raises:
        AssertionError: names the target, rule or expression that is not as it has to be.
        NoPrometheus: it is neither installed nor to be had.
    """
    async with observed(unit) as (watched, prometheus):
        await until_none(prometheus.unreached, "targets are not up")
        await until_none(prometheus.unwell_rules, "rules are not well")
        async with Load(watched.address, spec, asks) as load:
            await until_none(prometheus.unanswered, "no number")
        errors = [stream.error for done in load.done for stream in done if stream.error]
        assert not errors, errors[0]
        traces = await until(lambda: complete_traces(watched), "whole traces", LIMIT_S)
        version = (await prometheus.get("status/buildinfo"))["version"]
    return (
        f"Prometheus {version}: {len(SERVICES)} targets up, {len(alert_names())} rules ok, "
        f"{len(panel_queries())} panel queries answered; {traces} whole traces"
    )


async def until_none(ask: Callable[[], Awaitable[Sized]], what: str) -> None:
    """Ask until nothing is named any more.

    Raises:
        AssertionError: something still is; the text has what.
    """
    last: Sized = ()
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                last = await ask()
                if not last:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"{what}: {last}") from None
