"""`duplet bench`, `duplet replay`, `duplet trace synth`: load for a unit, and what it measured."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, TypedDict

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from duplet_load.generator import Load, Outcome, run_load
from duplet_load.record import Record
from duplet_load.summary import describe, save, summarize
from duplet_load.synth import Synth, make_trace
from duplet_load.trace import Arrival, Shape, TraceError, cut_trace, read_trace, write_trace
from duplet_unit.output_files import filling, replacing
from duplet_unit.terminal import INTERRUPTED, Address, ending, run, told, with_pictures
from duplet_unit.unit import DEFAULT_LISTEN, dial_address

NO_ROWS = (
    "duplet: no row came. Prompts are made up here, which suits models of random weights: "
    "`duplet up --model tiny` starts one"
)
STOPPING = (
    "duplet: nothing more is sent, the figures come when what runs has ended; Ctrl-C again ends "
    "at once, without any"
)
ALL = 1e12
"""Seconds; longer than any trace."""

Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
Processes = Annotated[int, typer.Option(min=1, help="Client processes.")]
Out = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="Folder for summary.json, requests.jsonl and .csv."),
]
Plots = Annotated[bool, typer.Option("--plots", help="Pictures in --out; needs matplotlib.")]
Seed = Annotated[int, typer.Option(min=0, help="Equal seeds make equal traces.")]
PromptRows = Annotated[tuple[int, int], typer.Option(help="Least and most prompt rows.")]
OutputRows = Annotated[tuple[int, int], typer.Option(help="Least and most output rows.")]
Voices = Annotated[int, typer.Option(min=1, help="Voices, of Zipf popularity.")]
Cold = Annotated[float, typer.Option(min=0, max=1, help="Share of voices never used before.")]
Burstiness = Annotated[
    float, typer.Option(min=0, help="Variation of arrivals: 0 even, 1 Poisson, more in bursts.")
]
RowsPerMessage = Annotated[int, typer.Option(min=1, help="Output rows in one message.")]

trace_app = typer.Typer(no_args_is_help=True, help="Traces for `duplet replay`.")


def bench(
    concurrency: Annotated[int, typer.Option(min=0, help="Closed loop: listeners at once.")] = 0,
    rate: Annotated[float, typer.Option(min=0, help="Open loop: arrivals a second.")] = 0.0,
    requests: Annotated[int, typer.Option(min=1, help="Most requests.")] = 100,
    seconds: Annotated[float, typer.Option(min=0, help="Send nothing later; 0: send all.")] = 0.0,
    prompt_rows: PromptRows = (1_000, 2_000),
    output_rows: OutputRows = (63, 420),
    voices: Voices = 50,
    cold: Cold = 0.0,
    burstiness: Burstiness = 1.0,
    rows_per_message: RowsPerMessage = 1,
    processes: Processes = 2,
    seed: Seed = 1,
    out: Out = None,
    plots: Plots = False,
    address: Address = DEFAULT_LISTEN,
    as_json: Json = False,
) -> None:
    """Send made-up requests: --concurrency for a closed loop, --rate for an open one.

    Prompts are random rows, for models of random weights such as tiny; wren stops at once.
    """
    if (concurrency == 0) == (rate == 0):
        raise typer.BadParameter("give either --concurrency or --rate")
    lengths = _lengths(prompt_rows, output_rows)
    synth = Synth(
        *(requests, rate or 1.0, burstiness),
        voices=voices,
        cold=cold,
        seed=seed,
        **lengths,
    )
    load = Load(
        *(dial_address(address), processes, concurrency, seconds),
        rows_per_message=rows_per_message,
        timelines=out is not None,
    )
    _send(load, make_trace(synth), out, plots=plots, as_json=as_json)


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="Mooncake JSONL, Azure CSV, or our own JSONL."
        ),
    ],
    from_s: Annotated[float, typer.Option("--from", min=0, help="Second to begin at.")] = 0.0,
    seconds: Annotated[float, typer.Option(min=0, help="How many of them; 0: all.")] = 0.0,
    speed: Annotated[float, typer.Option(min=0.001, help="So many times as fast.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="Most requests; 0: all.")] = 0,
    prompt_rows: PromptRows = (1_000, 2_000),
    output_rows: OutputRows = (21, 630),
    rows_per_token: Annotated[
        float, typer.Option(min=0.01, help="Output rows for a token of a text model.")
    ] = 6.0,
    rows_per_message: RowsPerMessage = 1,
    processes: Processes = 2,
    out: Out = None,
    plots: Plots = False,
    address: Address = DEFAULT_LISTEN,
    as_json: Json = False,
) -> None:
    """Send a trace, each request at its time.

    Lengths of traces of text models become rows: prompts are cut or filled up to --prompt-rows,
    output tokens become --rows-per-token rows.
    """
    shape = Shape(*prompt_rows, *output_rows, rows_per_token)
    try:
        arrivals = cut_trace(read_trace(trace, shape), from_s, seconds or ALL, speed)
    except TraceError as error:
        raise typer.BadParameter(str(error)) from error
    arrivals = arrivals[: requests or None]
    if not arrivals:
        raise typer.BadParameter(f"{trace} has no request in these seconds")
    load = Load(
        *(dial_address(address), processes),
        rows_per_message=rows_per_message,
        timelines=out is not None,
    )
    _send(load, arrivals, out, plots=plots, as_json=as_json)


@trace_app.command()
def synth(
    out: Annotated[Path, typer.Argument(dir_okay=False, help="File to write.")],
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 1_000,
    rate: Annotated[float, typer.Option(min=0.001, help="Arrivals a second.")] = 10.0,
    burstiness: Burstiness = 1.0,
    prompt_rows: PromptRows = (1_000, 2_000),
    output_rows: OutputRows = (63, 420),
    voices: Voices = 200,
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of popularity.")] = 1.1,
    cold: Cold = 0.0,
    seed: Seed = 1,
) -> None:
    """Make up a trace: voices of Zipf popularity, prompts of a voice and a sentence, bursts."""
    lengths = _lengths(prompt_rows, output_rows)
    made = make_trace(Synth(requests, rate, burstiness, voices, zipf, cold, seed=seed, **lengths))
    with ending(), replacing(out) as draft:
        write_trace(made, draft)
    print(f"{len(made)} requests over {made[-1].at_s:.0f} s in {out}")


class _Lengths(TypedDict):
    prompt_least: int
    prompt_most: int
    output_least: int
    output_most: int


def _lengths(prompt_rows: tuple[int, int], output_rows: tuple[int, int]) -> _Lengths:
    for name, (least, most) in (("--prompt-rows", prompt_rows), ("--output-rows", output_rows)):
        if not 1 <= least <= most:
            raise typer.BadParameter(f"{name}: {least} {most} is no range of rows")
    return {
        "prompt_least": prompt_rows[0],
        "prompt_most": prompt_rows[1],
        "output_least": output_rows[0],
        "output_most": output_rows[1],
    }


def _send(
    load: Load, arrivals: Sequence[Arrival], out: Path | None, *, plots: bool, as_json: bool
) -> None:
    """Run the load, say what it measured, and keep it in `out`."""
    if plots and out is None:
        raise typer.BadParameter("--plots needs --out")
    stop = asyncio.Event()
    with ending(as_json=as_json), nullcontext() if out is None else filling(out) as draft:
        with _progress(len(arrivals)) as show:
            outcome = run(_run_until_told(load, arrivals, show, stop), as_json=as_json)
        summary = summarize(outcome)
        print(json.dumps(summary) if as_json else describe(summary))
        if not summary["rows"] and not stop.is_set():
            print(NO_ROWS, file=sys.stderr)
        if draft is not None:
            save(outcome, draft)
            if plots:
                _plot(outcome.records, draft / "run.svg")
    if stop.is_set():
        raise typer.Exit(INTERRUPTED)


async def _run_until_told(
    load: Load, arrivals: Sequence[Arrival], show: Callable[[Record], None], stop: asyncio.Event
) -> Outcome:
    """The run to its end, or to Ctrl-C, which sets `stop`: nothing more is sent, and what runs
    is read to its end, so that the figures are whole. The second Ctrl-C cancels."""
    running = asyncio.current_task()
    assert running is not None

    def take_interrupt() -> None:
        if stop.is_set():
            running.cancel()
            return
        stop.set()
        print(STOPPING, file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
        return await run_load(load, arrivals, show, stop)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, take_interrupt)
    try:
        return await run_load(load, arrivals, show, stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _plot(records: Sequence[Record], path: Path) -> None:
    with with_pictures():
        from duplet_load.plots import plot_run
    plot_run(records, path)


class _Shown:
    """The live line: how many requests are over, and what went wrong."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._failed = self._stalled = self._rows = 0

    def __call__(self, record: Record) -> None:
        self._failed += not record.well
        self._stalled += record.stalls > 0
        self._rows += record.rows
        ttfa = "-" if record.ttfa_s is None else f"{record.ttfa_s * 1e3:.0f} ms"
        said = f"{self._rows} rows, {self._failed} failed, {self._stalled} stalled, TTFA {ttfa}"
        self._progress.update(self._task, advance=1, description=said)


@contextmanager
def _progress(total: int) -> Iterator[_Shown]:
    """Progress on stderr, where that is a terminal."""
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    text = TextColumn("{task.description}")
    disable = not told.is_terminal
    with Progress(*columns, text, console=told, transient=True, disable=disable) as progress:
        yield _Shown(progress, total)
