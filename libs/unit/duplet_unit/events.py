"""What a supervisor says about its services: the lines of `duplet up --json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

EventKind = Literal[
    "started",  # a process runs; pid
    "ready",  # the service serves; address
    "exited",  # a process ended while it should run; how
    "restarting",  # it starts again after delay_s; restarts counts its fast deaths in a row
    "stopping",  # the service was told to finish
    "stopped",  # the process ended as told; how
    "unit_ready",  # every service is ready; addresses
    "gave_up",  # a service never became ready; the unit stops; how, detail
    "unit_stopped",  # nothing runs any more; detail says whether anything had to be killed
]


@dataclass(frozen=True, slots=True)
class Event:
    """One fact. Fields that the kind does not use are None and left out of the JSON."""

    kind: EventKind
    service: str | None = None
    pid: int | None = None
    how: str | None = None
    """How a process ended: see `duplet_runtime.fate.describe_exit`."""
    restarts: int | None = None
    delay_s: float | None = None
    detail: str | None = None
    address: str | None = None
    addresses: dict[str, str] | None = None

    def to_json(self) -> str:
        """One line: `event` and the fields that are set."""
        fields = {k: v for k, v in asdict(self).items() if v is not None and k != "kind"}
        return json.dumps({"event": self.kind, **fields})


OnEvent = Callable[[Event], None]
