"""kvproxy that tells an end before the transfer's copies are over: `python -m
tests.services.hasty_kvproxy WHICH`. What counts the bytes of both pools must notice each of them.
Its copies overlap, as in `unordered_kvproxy`.

    acknowledged    an ABORT is acknowledged while copies are outstanding
    landed          decode hears of the landing when the last copy is queued
    released        prefill hears of it then
    unknown         a copy whose end nobody knows counts as one that is over
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import patch

from duplet_core.effects import CopyDone
from duplet_core.ids import Role
from duplet_core.messages import AbortAck, Landed, Move, SourceReleased
from duplet_core.writer_state import Input, State, Transfer
from duplet_core.writer_transfers import Transfers
from tests.faults.unordered_kvproxy import main

_end = Transfers._end
_copy = Transfers._copy
_step_copy = Transfers.step_copy


def acknowledge(self: Transfers, t: Transfer, failed: str | None, now: int) -> None:
    _end(self, t, failed, now)
    if t.state is State.ENDING and t.owes_ack:
        self._out.send(Role.DECODE, AbortAck(t.transfer), only=t.dest)


def tell_decode(self: Transfers, t: Transfer, move: Move) -> None:
    _copy(self, t, move)
    if t.handoff is not None and t.next_row == t.rows:
        self._out.send(Role.DECODE, Landed(t.transfer, t.rows, t.handoff), only=t.dest)


def tell_prefill(self: Transfers, t: Transfer, move: Move) -> None:
    _copy(self, t, move)
    if t.handoff is not None and t.next_row == t.rows:
        self._out.send(Role.PREFILL, SourceReleased(t.transfer, landed=True), only=t.source)


def take_for_over(self: Transfers, done: CopyDone, what: Input, now: int) -> None:
    _step_copy(self, done, Input.COPY_REFUSED if what is Input.COPY_UNKNOWN else what, now)


HASTES: dict[str, tuple[str, Callable[..., None]]] = {
    "acknowledged": ("_end", acknowledge),
    "landed": ("_copy", tell_decode),
    "released": ("_copy", tell_prefill),
    "unknown": ("step_copy", take_for_over),
}


if __name__ == "__main__":
    place, hasty = HASTES[sys.argv[1]]
    with patch.object(Transfers, place, hasty):
        code = main()
    sys.exit(code)
