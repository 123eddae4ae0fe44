"""What every command has in common: its options are explained, and wrong ones are named."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from duplet_load.generator import Outcome
from duplet_unit.commands import app
from duplet_unit.terminal import WRONG_USAGE
from duplet_unit.unit import free_local_address

MODULE = "duplet_unit.load_commands"


def commands_of(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands_of(typer.main.get_command(app)))
TALKING = [
    path for path, command in COMMANDS.items() if "address" in {p.name for p in command.params}
]
"""Those that ask a unit which an option names."""
REQUIRED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("replay",): (__file__,),
    ("say",): ("Hello.", "--stream"),
    ("generate",): ("Hello.",),
}
"""Arguments without which a command is not called."""


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    unexplained = [p.name for p in COMMANDS[path].params if not getattr(p, "help", "")]
    assert unexplained == []
    assert COMMANDS[path].help


def test_commands_are_found() -> None:
    assert len(COMMANDS) >= 13
    assert len(TALKING) >= 8


@pytest.mark.parametrize("path", TALKING, ids=" ".join)
@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("nonsense", "'nonsense' is not HOST:PORT"),
        ("127.0.0.1:99999", "port 99999 is above 65535"),
        ("unix:", "names no path"),
    ],
)
def test_a_wrong_address_is_wrong_usage(path: tuple[str, ...], address: str, told: str) -> None:
    done = CliRunner().invoke(app, [*path, *REQUIRED.get(path, ()), "--address", address])
    assert done.exit_code == WRONG_USAGE
    assert told in " ".join(click.unstyle(done.stderr).replace("│", " ").split())


@pytest.mark.parametrize(
    ("command", "option", "value", "told"),
    [
        ("say", "--temperature", "-1", "sampling.temperature: -1.0 is not in [0, 5.0]"),
        ("generate", "--temperature", "9", "sampling.temperature: 9.0 is not in [0, 5.0]"),
        ("generate", "--temperature", "nan", "sampling.temperature: nan is not finite"),
        ("generate", "--top-p", "0", "sampling.top_p: 0.0 is not in (0, 1]"),
        ("generate", "--top-k", "0", "sampling.top_k: 0 is not in [1, "),
        ("generate", "--repetition-window", "129", "129 is not in [0, 128]"),
    ],
)
def test_sampling_that_no_unit_takes_is_wrong_usage(
    command: str, option: str, value: str, told: str
) -> None:
    address = ("--address", free_local_address())
    done = CliRunner().invoke(app, [command, *REQUIRED[command,], option, value, *address])
    assert done.exit_code == WRONG_USAGE
    assert told in " ".join(click.unstyle(done.stderr).replace("│", " ").split())


def test_load_without_a_single_row_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(work: Coroutine[Any, Any, Outcome], **_options: object) -> Outcome:
        work.close()
        return Outcome()

    monkeypatch.setattr(f"{MODULE}.run", run)
    arguments = ["bench", "--concurrency", "1", "--address", free_local_address()]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "duplet: no row came." in done.stderr
    assert "duplet up --model tiny" in done.stderr
