"""`duplet doctor`: shows what kvproxy's probe, a process of its own, has found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

PROBE = (sys.executable, "-m", "duplet_kvproxy.doctor")
FAILED = 1


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Try every way to pass and move KV on this machine; exit code 0 when a unit can run."""
    found = _probe()
    if not found:
        print("duplet: the probe died; its last words are above", file=sys.stderr)
        raise typer.Exit(FAILED)
    report = json.loads(found)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        Console().print(findings(report))
    if not report["ok"]:
        raise typer.Exit(FAILED)


def _probe() -> str:
    """What the probe prints. It and its children are a group that a terminal's Ctrl-C does not
    reach; it ends us, and we end them."""
    with subprocess.Popen(PROBE, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            return process.communicate()[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def findings(report: dict[str, Any]) -> Group:
    """A report as tables, the verdict and the advice last."""
    parts: list[Table | Text] = []
    if report["gpus"]:
        parts += [_gpus(report), _handles(report), _moves(report)]
    parts += [Text(line) for line in report["verdict"]]
    parts += [Text(f"To do: {line}", style="bold") for line in report["advice"]]
    return Group(*parts)


def _gpus(report: dict[str, Any]) -> Table:
    table = Table("GPU", "name", "capability", "free", "links")
    for gpu in report["gpus"]:
        links = [
            f"{link['link']} to {link['dest'][:12]}{'' if link['peer_access'] else ', no P2P'}"
            for link in report["links"]
            if link["source"] == gpu["uuid"]
        ]
        free = f"{gpu['free_gib']:g} GiB"
        capability = str(gpu["capability"])
        table.add_row(gpu["uuid"], gpu["name"], capability, free, "\n".join(links) or "none")
    return table


def _handles(report: dict[str, Any]) -> Table:
    table = Table("handle", "of", "works", "mapped in")
    for trial in report["handles"]:
        works = "yes" if trial["ok"] else trial["detail"]
        mapped = f"{trial['map_ms']:g} ms" if trial["ok"] else ""
        table.add_row(trial["kind"], trial["device"][:12], works, mapped)
    return table


def _moves(report: dict[str, Any]) -> Table:
    table = Table("move", "pools", "from", "to", "works", "GB/s, idle")
    for trial in report["trials"]:
        works = "yes" if trial["ok"] else trial["detail"]
        rate = f"{trial['gb_s']:g}" if trial["ok"] else ""
        ends = (trial["source"][:12], trial["dest"][:12])
        table.add_row(trial["transport"], trial["arrangement"], *ends, works, rate)
    return table
