"""Tells a run in lines that can be read: who, what, with which fields that say something."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

from duplet_core.effects import (
    Effect,
    FromEngineEvent,
    Log,
    Received,
    Send,
    StreamClosed,
    StreamOpened,
    ToEngineEffect,
)
from duplet_sim import content
from duplet_sim.content import ROW_BYTES
from duplet_sim.parts import Process
from duplet_sim.simulator import Simulator
from duplet_sim.violation import Violation

_UNTOLD = {"sampling", "digests", "stamps", "census", "spec", "trace", "voice", "detail"}
"""Fields that no machine decides by, or that are long."""


def tell(seed: int) -> list[str]:
    """The story of a seed, a line an event (<-), an effect (->) or what no machine sees (**);
    it ends with the violation, if there is one."""
    lines: list[str] = []
    simulator = Simulator(seed)

    def event(process: Process, what: Any) -> None:
        lines.append(f"{simulator.now:6} {process.instance:9} <- {describe(what)}")

    def effect(process: Process, what: Effect) -> None:
        if not isinstance(what, Log):
            lines.append(f"{simulator.now:6} {process.instance:9} -> {describe(what)}")

    def note(subject: str, what: str) -> None:
        lines.append(f"{simulator.now:6} {subject:9} ** {what}")

    simulator.on_event, simulator.on_effect, simulator.on_note = event, effect, note
    try:
        simulator.run()
    except Violation as violation:
        lines.append(f"{simulator.now:6} VIOLATION {violation}")
    return lines


def describe(value: Any) -> str:
    """An event, an effect, a message or a part of one."""
    if isinstance(value, Received | Send):
        return f"{value.peer}/{value.stream}: {describe(value.message)}"
    if isinstance(value, FromEngineEvent | ToEngineEffect):
        return f"engine: {describe(value.message)}"
    if isinstance(value, StreamOpened | StreamClosed):
        return f"{value.peer}/{value.stream}: {type(value).__name__}"
    if isinstance(value, bytes):
        return _bytes(value)
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return "(" + " ".join(map(describe, value)) + ")"
    if is_dataclass(value) and not isinstance(value, type):
        told = [_field(f, getattr(value, f.name)) for f in fields(value)]
        return " ".join([type(value).__name__, *filter(None, told)])
    return type(value).__name__ if type(value).__module__ == "duplet_sim.nodes" else str(value)


def _field(field: Field[Any], value: Any) -> str:
    """`name=value`; nothing for what is as always."""
    if value is None or value is field.default or field.name in _UNTOLD:
        return ""
    if field.default is not MISSING and value == field.default:
        return ""
    if field.name in ("transfer", "request_id"):
        return str(value)
    text = describe(value)
    return f"{field.name}=[{text}]" if is_dataclass(value) else f"{field.name}={text}"


def _bytes(value: bytes) -> str:
    """A prompt as its runs of rows (content:first-last), or output rows (content#index)."""
    whole_rows = value and len(value) % (content.COLUMNS * 4) == 0
    if whole_rows and (len(value) % ROW_BYTES or not any(value[:4])):
        return "+".join(_runs(content.unpack_prompt(value)[0]))
    rows = [value[at : at + ROW_BYTES] for at in range(0, len(value), ROW_BYTES)]
    return " ".join("{}#{}".format(*content.unpack_row(row)) for row in rows)


def _runs(tags: content.Rows) -> list[str]:
    runs: list[list[int]] = []
    for tag in tags:
        number, row = tag >> 16, tag & 0xFFFF
        if runs and runs[-1][0] == number:
            runs[-1][2] = row
        else:
            runs.append([number, row, row])
    return [f"{number}:{first}-{last}" for number, first, last in runs]
