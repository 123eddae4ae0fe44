"""The machines' tables in docs/safety.md, made from the code: `python -m docs.machine_tables`.

A block between `<!-- table: NAME -->` and `<!-- end -->` belongs to this script; a test keeps
the page equal to what it would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from duplet_core import decode_state, front_state, host_state, prefill_state, writer_state
from duplet_core.decode_transfers import Transfers as DecodeTransfers
from duplet_core.front import FrontMachine
from duplet_core.host_stays import Stays
from duplet_core.prefill_jobs import Jobs
from duplet_core.writer_transfers import Transfers as WriterTransfers

PAGE = Path(__file__).with_name("safety.md")

Table = Mapping[Any, Mapping[Any, Callable[..., None]]]

MACHINES: dict[str, tuple[type[Enum], type[Enum], Table]] = {
    "decode": (decode_state.State, decode_state.Input, DecodeTransfers.TABLE),
    "writer": (writer_state.State, writer_state.Input, WriterTransfers.TABLE),
    "prefill": (prefill_state.State, prefill_state.Input, Jobs.TABLE),
    "lb": (front_state.State, front_state.Input, FrontMachine.TABLE),
    "host": (host_state.State, host_state.Input, Stays.TABLE),
}
MARKS = {"ignore": "·", "impossible": "✗"}
"""Names of transitions that have a sign of their own."""

BLOCK = re.compile(r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)


def table(name: str) -> str:
    """Inputs by states; a cell is the name of the transition's method."""
    states, inputs, transitions = MACHINES[name]
    lines = [
        "| | " + " | ".join(state.name for state in states) + " |",
        "|---" * (len(list(states)) + 1) + "|",
    ]
    for what in inputs:
        cells = [_cell(transitions[state][what]) for state in states]
        lines.append(f"| **{what.name}** {what.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(transition: Callable[..., None]) -> str:
    name = transition.__name__.strip("_")
    return MARKS.get(name, name.replace("_", " "))


def rendered(page: str) -> str:
    """The page with every table as the code has it.

    Raises:
        KeyError: a block names no machine.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- table: {name} -->\n{table(name)}\n<!-- end -->"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text("utf-8")), "utf-8")
