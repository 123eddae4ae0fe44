"""`duplet canary`: a monolith and a unit say the same, and somebody listens."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from duplet_canary.plan import Pair
from duplet_canary.recognisers import RecogniserName
from duplet_canary.report import describe, to_fields
from duplet_canary.run import HEARD_MODEL, Options, Result, open_canary
from duplet_canary.utterances import Length
from duplet_canary.verdict import Verdict
from duplet_canary.watch import Watch
from duplet_client.client import DEFAULT_TIMEOUT_S
from duplet_unit.both_units import both_units
from duplet_unit.gpus import model_settings
from duplet_unit.terminal import INTERRUPTED, check_address, run, told
from duplet_unit.unit import dial_address
from duplet_unit.up import signals_to

DIFFERENT = 3
NOT_ENOUGH = 4
EXIT_CODES = {
    Verdict.EQUIVALENT: 0,
    Verdict.DIFFERENT: DIFFERENT,
    Verdict.NOT_ENOUGH_PAIRS: NOT_ENOUGH,
}
PATIENCE_S = 600.0
"""Deadline of a request to what --start started: the cores do everything at once here."""
LINE_EVERY = 50
"""Pairs between two lines of progress where there is no terminal."""

DAMAGE_VARIABLE = "DUPLET_DECODE_DAMAGE_PAGES"


def canary(
    monolith: Annotated[
        str | None, typer.Option(callback=check_address, help="Address of the monolith's lb.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(callback=check_address, help="Address of the unit's lb.")
    ] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start both here, on the CPU, and stop them after.")
    ] = False,
    model: Annotated[str, typer.Option(help="What --start loads.")] = "wren",
    pairs: Annotated[
        int, typer.Option(min=0, help="In all, with those of the log; 0: until Ctrl-C.")
    ] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="End after so long; 0: no limit.")] = 0.0,
    enough_power: Annotated[
        float,
        typer.Option(
            min=0, max=0.999, help="From 1,000 pairs on, end at this power of the test; 0: do not."
        ),
    ] = 0.0,
    other_seeds: Annotated[
        bool,
        typer.Option("--other-seeds", help="Different draws on the two sides: ears alone judge."),
    ] = False,
    recogniser: Annotated[
        RecogniserName, typer.Option(help="Who listens; none: rows are compared.")
    ] = RecogniserName.PHONEMES,
    lengths: Annotated[str, typer.Option(help="Of utterances.")] = ",".join(Length),
    texts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Own utterances, one a line."),
    ] = None,
    voices: Annotated[str, typer.Option(help="Names, by commas; default: all.")] = "",
    margin: Annotated[
        float, typer.Option(min=0.01, max=50, help="Points that do not matter.")
    ] = 0.5,
    at_once: Annotated[int, typer.Option(min=1, max=1024, help="Pairs spoken at once.")] = 8,
    listeners: Annotated[int, typer.Option(min=1, max=256, help="Listening processes.")] = 1,
    first_seed: Annotated[
        int, typer.Option(min=0, max=1 << 40, help="Of the first pair; each has the next.")
    ] = 0,
    log: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A line a pair; a run goes on from it.")
    ] = None,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of Prometheus metrics; 0: none.")
    ] = 0,
    inject: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            help="With --start: damage so many KV pages of every prompt; the alarm must be raised.",
        ),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Compare a unit with a monolith by rows and by ear.

    Exit code 0: equivalent; 3: different, or an alarm; 4: not enough pairs to tell.
    """
    if start == (monolith is not None or unit is not None):
        raise typer.BadParameter("give either --start, or both --monolith and --unit")
    if not start and (monolith is None or unit is None):
        raise typer.BadParameter("--monolith and --unit go together")
    if monolith is not None and unit is not None and dial_address(monolith) == dial_address(unit):
        raise typer.BadParameter(f"{unit} is on both sides: whatever it says equals itself")
    if inject and not start:
        raise typer.BadParameter("--inject needs --start: nobody else's unit is damaged")
    if start and model != HEARD_MODEL and recogniser is not RecogniserName.NONE:
        raise typer.BadParameter(
            f"--model {model} has no voice to hear: --recogniser none compares its rows"
        )
    options = Options(
        pairs=pairs,
        minutes=minutes,
        enough_power=enough_power,
        at_once=at_once,
        lengths=_lengths(lengths),
        texts=texts,
        voices=tuple(voice.strip() for voice in voices.split(",") if voice.strip()),
        recogniser=recogniser,
        listeners=listeners,
        other_seeds=other_seeds,
        first_seed=first_seed,
        margin=margin / 100,
        log=log,
        metrics_port=metrics_port,
        damaged_pages=inject,
        timeout_s=PATIENCE_S if start else DEFAULT_TIMEOUT_S,
    )

    async def work() -> Result:
        async with _sides(monolith, unit, model, inject) as addresses:
            with _progress(options.pairs) as show:
                async with open_canary(options, *addresses, show) as opened:
                    with signals_to(opened.watch.stop, partial(sys.exit, INTERRUPTED)):
                        return await opened.run()

    result = run(work(), as_json=as_json)
    told_how = (result.tally, result.judgement, options.margin)
    if as_json:
        fields = to_fields(*told_how, rows_must_equal=result.rows_must_equal)
        print(json.dumps({**fields, "kv": result.kv}))
    else:
        print(result.kv)
        print(describe(*told_how, rows_must_equal=result.rows_must_equal))
    raise typer.Exit(EXIT_CODES[result.judgement.verdict])


def _lengths(text: str) -> tuple[Length, ...]:
    try:
        found = tuple(Length(name.strip()) for name in text.split(","))
    except ValueError as error:
        known = ", ".join(Length)
        raise typer.BadParameter(f"--lengths: {error}; there are {known}") from error
    if len(set(found)) != len(found):
        raise typer.BadParameter(f"--lengths: {text!r} names one twice")
    return found


@asynccontextmanager
async def _sides(
    monolith: str | None, unit: str | None, model: str, inject: int
) -> AsyncIterator[tuple[str, str]]:
    """Addresses of the monolith and of the unit."""
    if monolith is not None and unit is not None:
        yield dial_address(monolith), dial_address(unit)
        return
    loads = model_settings(model)
    damage = {DAMAGE_VARIABLE: str(inject)} if inject else {}
    async with both_units(loads, {**loads, **damage}) as addresses:
        yield addresses


@contextmanager
def _progress(pairs: int) -> Iterator[Callable[[Watch, Pair], None]]:
    """A live line on stderr; without a terminal a line now and then."""
    if not told.is_terminal:
        yield _print_progress
        return
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=told, transient=True) as progress:
        task = progress.add_task("waiting for the first pair", total=pairs or None)

        def show(watch: Watch, _pair: Pair) -> None:
            progress.update(task, description=_say(watch), completed=watch.tally.pairs)

        yield show


def _print_progress(watch: Watch, _pair: Pair) -> None:
    if watch.tally.pairs % LINE_EVERY == 0:
        print(_say(watch), file=sys.stderr)


def _say(watch: Watch) -> str:
    """The run in one line."""
    said = f"{watch.tally.pairs} pairs, {watch.tally.all.unequal} with unequal rows"
    if watch.difference is not None:
        low, high = (100 * end for end in watch.difference.interval())
        said += f", difference {100 * watch.difference.mean:+.2f} [{low:+.2f}, {high:+.2f}] points"
    return f"{said}; ALARM: {watch.alarm}" if watch.alarm else said
