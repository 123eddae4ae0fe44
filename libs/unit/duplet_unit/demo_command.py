"""`duplet demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from duplet_unit.demo import run_demo
from duplet_unit.terminal import FAILED, run, shown


def demo(
    out: Annotated[Path, typer.Option(help="Folder for speech and rows.")] = Path("demo-out"),
) -> None:
    """Start a unit here, have it speak in every voice, show what came of it, stop it."""
    if not run(run_demo(out, shown)):
        raise typer.Exit(FAILED)
