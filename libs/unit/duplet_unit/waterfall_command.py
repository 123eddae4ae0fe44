"""`duplet waterfall`: where the time of one request went, or of many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from duplet_client import AsyncClient, SamplingOptions, Timeline
from duplet_unit.ask import Ask, known_spec, prompt_from_file, prompt_from_text, run_request
from duplet_unit.chrome_trace import chrome_trace
from duplet_unit.terminal import with_pictures
from duplet_unit.unit import dial_address
from duplet_unit.waterfall import spread_table, timelines_from_json, waterfall_table

PICTURES = (".svg", ".png")
TRACE = ".json"


def read_timelines(file: typer.FileText) -> list[Timeline]:
    """The timelines of a file.

    Raises:
        typer.BadParameter: it has none.
    """
    try:
        return timelines_from_json(file.read())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


async def send_request(
    address: str, text: str, rows: Path | None, voice: str, max_rows: int
) -> Timeline:
    """Send one request and return its timeline.

    Raises:
        GenerateError, InvalidInput, Unavailable: it cannot be sent, or it failed.
    """
    async with AsyncClient(dial_address(address)) as client:
        spec = await known_spec(client)
        if rows is None:
            prompt, _ = prompt_from_text(spec, text, voice)
        else:
            prompt = prompt_from_file(spec, rows)
        ask = Ask(prompt, voice, SamplingOptions(), max_rows, 120.0)
        answer = await run_request(client, ask, lambda _: None)
        return answer.finished.timeline


def check_kind(out: Path | None) -> None:
    """
    Raises:
        typer.BadParameter: a suffix that is none of ours.
    """
    if out is not None and out.suffix not in (*PICTURES, TRACE):
        raise typer.BadParameter(f"-o: {out} is none of .svg, .png, .json (Chrome trace)")


def show_timelines(timelines: Sequence[Timeline], out: Path | None, shown: Console) -> None:
    """To the terminal, or to a file: a picture, or a trace for Perfetto.

    Raises:
        typer.BadParameter: many requests and none is whole, or matplotlib is not installed.
    """
    try:
        if out is None:
            one = len(timelines) == 1
            shown.print(waterfall_table(timelines[0]) if one else spread_table(timelines))
        elif out.suffix in PICTURES:
            _plot(timelines, out)
        else:
            out.write_text(json.dumps(chrome_trace(timelines)), "utf-8")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _plot(timelines: Sequence[Timeline], out: Path) -> None:
    with with_pictures():
        from duplet_unit.waterfall_plot import plot_waterfall
    plot_waterfall(timelines, out)


Out = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        dir_okay=False,
        help="Write a picture (.svg, .png) or a trace for Perfetto (.json) instead.",
    ),
]
