"""What commands share towards the terminal: consoles, and how errors end the process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from grpc import StatusCode
from rich.console import Console

from duplet_client import GenerateError, SamplingOptions
from duplet_core.errors import DupletError, InvalidInput
from duplet_pages.prompt import MOST_SEED, check_sampling
from duplet_pages.spec import SamplingDefaults
from duplet_runtime.addresses import check_listen
from duplet_runtime.settings import SettingsError
from duplet_unit.unit import LISTEN_VARIABLE, UnitError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
"""By Ctrl-C, as a shell counts it."""

Result = TypeVar("Result")


def check_address(value: str | None) -> str | None:
    """What an option names as an address; None where it is not given.

    Raises:
        typer.BadParameter: it is none.
    """
    try:
        return None if value is None else check_listen(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar=LISTEN_VARIABLE,
        callback=check_address,
        help="Where lb listens: HOST:PORT or unix:PATH.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, max=MOST_SEED, help="The same seed and prompt, the same answer."),
]


def sampling_options(
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    repetition_window: int | None = None,
    seed: int | None = None,
) -> SamplingOptions:
    """What options say about sampling; None: the model's own value.

    Raises:
        typer.BadParameter: no unit would take it.
    """
    try:
        check_sampling(
            defaults=SamplingDefaults(),
            seed=seed or 0,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_window=repetition_window,
        )
    except InvalidInput as error:
        raise typer.BadParameter(error.detail) from error
    return SamplingOptions(temperature, top_p, top_k, repetition_window, seed)


shown = Console()
told = Console(stderr=True)


@contextmanager
def with_pictures() -> Iterator[None]:
    """Around the import of what draws: without matplotlib, say how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        hint = "pictures need matplotlib: pip install 'duplet-load[plots]'"
        raise typer.BadParameter(hint) from error


def run(work: Coroutine[Any, Any, Result], *, as_json: bool = False) -> Result:
    """Run a command's work; errors are those of `ending`."""
    with ending(as_json=as_json):
        return asyncio.run(work)


@contextmanager
def ending(*, as_json: bool = False) -> Iterator[None]:
    """Around a command's work: errors end the process with their exit code.

    Errors go to stderr, and with `as_json` to stdout as JSON too.
    """
    try:
        yield
        return
    except asyncio.CancelledError as error:  # by a signal: the command has ended in order
        raise typer.Exit(INTERRUPTED) from error
    except (InvalidInput, SettingsError, UnitError) as error:
        code, reason, detail = WRONG_USAGE, getattr(error, "reason", "USAGE"), str(error)
    except GenerateError as error:
        code, reason, detail = FAILED, error.reason or error.code.name, error.detail
        if not error.reason and error.code is StatusCode.UNAVAILABLE:
            detail = f"no unit answers there (`duplet up` starts one, --address names it): {detail}"
        if error.retry_after_s is not None:
            detail += f" (try again in {error.retry_after_s:g} s)"
    except DupletError as error:
        code, reason, detail = FAILED, error.reason, error.detail
    if as_json:
        print(json.dumps({"error": {"reason": str(reason), "detail": detail}}))
    print(f"duplet: {reason}: {detail}", file=sys.stderr)
    raise typer.Exit(code)
