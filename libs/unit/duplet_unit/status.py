"""How a unit does: its health conditions, its parts, its counters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from duplet_client import AsyncClient, GenerateError, ServiceInfo, Unit

SERVING = "SERVING"
WATCH_S = 1.0


def warnings_of(unit: Unit) -> list[str]:
    """What works and must not go unnoticed."""
    if not unit.damaged_pages:
        return []
    return [
        "KV IS DAMAGED ON PURPOSE: listeners hear the wrong thing. Setting damage_pages of decode "
        f"is {unit.damaged_pages}, for a drill; start the unit again without it"
    ]


async def ask_health(client: AsyncClient) -> dict[str, Any]:
    """`ready`, `live` and every condition of the unit, each with ok and detail; warnings.

    Raises:
        GenerateError: the unit does not answer.
    """
    unit = await client.unit()
    conditions = {
        name: {"ok": await client.health(name) == SERVING, "detail": ""}
        for name in ("ready", "live")
    }
    conditions |= {c.name: {"ok": c.ok, "detail": c.detail} for c in unit.conditions}
    ready = conditions["ready"]["ok"]
    return {"ready": ready, "conditions": conditions, "warnings": warnings_of(unit)}


def health_table(health: dict[str, Any]) -> Group:
    """Warnings, then one row a condition."""
    table = _table("condition", "", "detail")
    for name, condition in health["conditions"].items():
        mark = Text("ok", style="green") if condition["ok"] else Text("not met", style="red")
        table.add_row(Text(name), mark, Text(condition["detail"]))
    return Group(*_loud(health["warnings"]), table)


def unit_fields(unit: Unit) -> dict[str, Any]:
    """The unit as JSON has it."""
    fields = asdict(unit)
    fields["requests"] = dict(unit.requests)
    fields["pages"] = dict(unit.pages)
    fields["warnings"] = warnings_of(unit)
    return fields


def unit_tables(unit: Unit) -> Group:
    """Warnings, services, and what the unit counts."""
    services = _table("service", "connected", "instance", "protocol")
    for names, service in _processes(unit):
        services.add_row(
            names,
            "yes" if service.connected else "no",
            service.instance or "-",
            str(service.protocol_version or "-"),
        )
    facts = _table("fact", "value")
    for name, value in _facts(unit):
        facts.add_row(name, Text(value))
    return Group(*_loud(warnings_of(unit)), services, Text(), facts)


async def watch_unit(client: AsyncClient, console: Console, *, as_json: bool) -> None:
    """Show the unit anew every second, also over times at which it does not answer; ends by
    being cancelled. `as_json`: a line on stdout each time."""
    if as_json:
        async for seen in _watched(client):
            print(json.dumps(_seen_fields(seen)), flush=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        async for seen in _watched(client):
            live.update(_seen_tables(seen), refresh=True)


async def _watched(client: AsyncClient) -> AsyncIterator[Unit | GenerateError]:
    while True:
        try:
            yield await client.unit()
        except GenerateError as error:
            yield error
        await asyncio.sleep(WATCH_S)


def _seen_fields(seen: Unit | GenerateError) -> dict[str, Any]:
    if isinstance(seen, Unit):
        return unit_fields(seen)
    return {"error": {"reason": seen.reason or seen.code.name, "detail": seen.detail}}


def _seen_tables(seen: Unit | GenerateError) -> RenderableType:
    return unit_tables(seen) if isinstance(seen, Unit) else Text(f"no answer: {seen}", style="red")


def _loud(warnings: Iterable[str]) -> list[Text]:
    return [Text(warning, style="bold red") for warning in warnings]


def _processes(unit: Unit) -> list[tuple[str, ServiceInfo]]:
    """Services with their names, a line a name; those of one process, as in a monolith, are one."""
    found: dict[str, tuple[str, ServiceInfo]] = {}
    for service in unit.services:
        key = service.instance or service.name
        names = f"{found[key][0]}\n{service.name}" if key in found else service.name
        found[key] = (names, service)
    return list(found.values())


def _facts(unit: Unit) -> list[tuple[str, str]]:
    spec, credit = unit.spec, unit.credit
    # lb, which answers, knows its own alone; a unit is upgraded as a whole.
    version = next((s.version for s in unit.services if s.version), "not known")
    return [
        ("version of lb", version),
        ("model", f"{spec.name} ({spec.fingerprint})" if spec else "not known"),
        *([("transport", unit.transport)] if unit.transport else []),
        ("live streams", str(unit.live_streams)),
        ("free pages, streams", f"{credit.free_pages}, {credit.free_slots}" if credit else "-"),
        ("refusing", (credit.refusing or "nothing") if credit else "-"),
        ("pages", _counts(unit.pages)),
        ("aborts pending, resent", f"{unit.pending_aborts}, {unit.aborts_resent}"),
        ("writers alive, ends withheld", f"{unit.writers}, {unit.ends_withheld}"),
        ("ended requests", _counts(unit.requests)),
        ("kv checks, mismatches", f"{unit.kv_checks}, {unit.kv_mismatches}"),
        ("not met", ", ".join(c.name for c in unit.conditions if not c.ok) or "nothing"),
    ]


def _counts(counts: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "-"


def _table(*headings: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    return table
