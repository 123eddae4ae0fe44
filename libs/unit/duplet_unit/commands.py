"""The commands of `duplet`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from duplet_client import AsyncClient, StreamTiming, Unit
from duplet_pages.engine_config import RANDOM
from duplet_unit.ask import (
    Answer,
    Ask,
    describe_progress,
    known_spec,
    prompt_from_file,
    prompt_from_text,
    run_request,
)
from duplet_unit.doctor import doctor
from duplet_unit.gpus import model_settings, parse_gpus
from duplet_unit.load_commands import bench, replay, trace_app
from duplet_unit.output_files import replacing
from duplet_unit.speaking import add_speaking_commands
from duplet_unit.status import ask_health, health_table, unit_fields, unit_tables, watch_unit
from duplet_unit.terminal import (
    FAILED,
    Address,
    Seed,
    ending,
    run,
    sampling_options,
    shown,
    told,
)
from duplet_unit.unit import (
    DEFAULT_LISTEN,
    LISTEN_VARIABLE,
    RUN_DIR_VARIABLE,
    dial_address,
)
from duplet_unit.up import run_unit
from duplet_unit.waterfall_command import (
    Out,
    check_kind,
    read_timelines,
    send_request,
    show_timelines,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Duplet: speech models on two GPUs of one machine, prefill beside decode.",
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Rows = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Prompt rows instead of text: int32 \\[rows, columns], .npy or raw little-endian.",
    ),
]
Voice = Annotated[str, typer.Option(help="Name of the voice.")]


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"duplet {version('duplet-unit')}")
        raise typer.Exit


@app.callback()
def duplet(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def up(
    listen: Annotated[
        str, typer.Option(envvar=LISTEN_VARIABLE, help="HOST:PORT on which lb takes clients.")
    ] = DEFAULT_LISTEN,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            envvar=RUN_DIR_VARIABLE,
            help="Folder of sockets, locks and logs, mode 0700. Default: a new one, removed after.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Services' logs to stderr.")] = False,
    monolith: Annotated[
        bool,
        typer.Option("--monolith", help="Prefill and decode in one process, for comparison."),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPUs of prefill and decode, as 0,1; of the monolith, as 0."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint's directory, or a built-in model's name.")
    ] = None,
    random: Annotated[
        str | None, typer.Option(help="Random weights of a known shape, as s2-pro.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a unit of local processes. Ctrl-C drains it, a second Ctrl-C kills it."""
    if model is not None and random is not None:
        raise typer.BadParameter("give either --model or --random")

    async def work() -> bool:
        settings: Mapping[str, str] = {}
        if random is not None:
            settings = model_settings(f"{RANDOM}{random}", "--random")
        elif model is not None:
            settings = model_settings(model)
        return await run_unit(
            run_dir,
            listen,
            json_lines=as_json,
            verbose=verbose,
            monolith=monolith,
            gpus=() if gpu is None else parse_gpus(gpu, monolith=monolith),
            settings=settings,
        )

    if not run(work()):
        raise typer.Exit(FAILED)


@app.command()
def generate(
    text: Annotated[str | None, typer.Argument(help="What to say.")] = None,
    rows: Rows = None,
    voice: Voice = "amber",
    seed: Seed = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Most output rows.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 to 5; 0 takes the most probable. Default: the model's.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Above 0, to 1. Default: the model's.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="At least 1. Default: the model's.")] = None,
    repetition_window: Annotated[
        int | None,
        typer.Option(help="Draw again what is among the last so many rows; 0 to 128, 0: never."),
    ] = None,
    request_id: Annotated[str, typer.Option(help="Default: the unit mints one.")] = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, max=86_400, help="Seconds.")
    ] = 120.0,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the rows here, as .npy.")
    ] = None,
    address: Address = DEFAULT_LISTEN,
    as_json: Json = False,
) -> None:
    """Send one request and show its progress."""
    if (text is None) == (rows is None):
        raise typer.BadParameter("give either TEXT or --rows FILE")
    sampling = sampling_options(temperature, top_p, top_k, repetition_window, seed)

    async def work() -> Answer:
        with nullcontext() if out is None else replacing(out) as draft:
            answer = await ask()
            if draft is not None:
                with draft.open("wb") as file:
                    np.save(file, answer.rows)
            return answer

    async def ask() -> Answer:
        async with AsyncClient(dial_address(address)) as client:
            spec = await known_spec(client)
            if text is not None:
                prompt, notice = prompt_from_text(spec, text, voice)
                if notice:
                    told.print(notice, highlight=False, markup=False, soft_wrap=True)
            else:
                assert rows is not None
                prompt = prompt_from_file(spec, rows)
            return await watched_request(
                client, Ask(prompt, voice, sampling, max_rows, timeout_s, request_id)
            )

    answer = run(work(), as_json=as_json)
    print(json.dumps(answer.to_fields()) if as_json else answer.summary())


async def watched_request(client: AsyncClient, ask: Ask) -> Answer:
    """Run a request with a live line on stderr, where that is a terminal."""
    if not told.is_terminal:
        return await run_request(client, ask, lambda _: None)
    with told.status("waiting for the first row") as status:

        def show(timing: StreamTiming) -> None:
            status.update(f"{timing.rows} rows, {describe_progress(timing)}")

        return await run_request(client, ask, show)


@app.command()
def health(address: Address = DEFAULT_LISTEN, as_json: Json = False) -> None:
    """Show every health condition; exit code 0 only when the unit is ready."""

    async def work() -> dict[str, Any]:
        async with AsyncClient(dial_address(address)) as client:
            return await ask_health(client)

    found = run(work(), as_json=as_json)
    if as_json:
        print(json.dumps(found))
    else:
        shown.print(health_table(found))
    if not found["ready"]:
        raise typer.Exit(FAILED)


@app.command()
def unit(
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it anew every second, until Ctrl-C.")
    ] = False,
    address: Address = DEFAULT_LISTEN,
    as_json: Json = False,
) -> None:
    """Show the unit: services, credit, pages, counters."""

    async def follow() -> None:
        async with AsyncClient(dial_address(address)) as client:
            await watch_unit(client, shown, as_json=as_json)

    if watch:
        run(follow())  # until Ctrl-C, whose exit code it has

    async def work() -> Unit:
        async with AsyncClient(dial_address(address)) as client:
            return await client.unit()

    found = run(work(), as_json=as_json)
    if as_json:
        print(json.dumps(unit_fields(found)))
    else:
        shown.print(unit_tables(found))


@app.command()
def waterfall(
    file: Annotated[
        typer.FileText | None,
        typer.Argument(
            help="Lines of JSON: of `duplet generate --json`, or requests.jsonl of `duplet bench "
            "--out`; - is stdin. Default: send one."
        ),
    ] = None,
    text: Annotated[str, typer.Option(help="What the request says.")] = "Good morning.",
    rows: Rows = None,
    voice: Voice = "amber",
    max_rows: Annotated[int, typer.Option(min=1, help="Most output rows.")] = 64,
    out: Out = None,
    address: Address = DEFAULT_LISTEN,
) -> None:
    """Show where the time went, segment by segment: of one request, or percentiles of many."""
    check_kind(out)
    with ending(), nullcontext() if out is None else replacing(out) as draft:
        if file is not None:
            timelines = read_timelines(file)
        else:
            timelines = [run(send_request(address, text, rows, voice, max_rows))]
        show_timelines(timelines, draft, shown)
    if out is not None:
        print(f"written to {out}")


@app.command()
def drain(address: Address = DEFAULT_LISTEN, as_json: Json = False) -> None:
    """Tell the unit to take nothing new; what runs goes on to its end."""

    async def work() -> int:
        async with AsyncClient(dial_address(address)) as client:
            return await client.drain()

    live = run(work(), as_json=as_json)
    print(
        json.dumps({"live_streams": live})
        if as_json
        else f"draining; {live} streams run; lb takes nothing until it is started again"
    )


add_speaking_commands(app)
app.command()(doctor)
app.command()(bench)
app.command()(replay)
app.add_typer(trace_app, name="trace")
