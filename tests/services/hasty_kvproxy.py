"""kvproxy that tells an end before the transfer's copies are over: `python -m
tests.services.hasty_kvproxy WHICH`. What counts the bytes of both pools must notice each of them.
Its copies overlap, as in `unordered_kvproxy`.

    acknowledged    an ABORT is acknowledged while copies are outstanding
    landed          decode hears of the landing when the last copy is queued
    released        prefill hears of it then
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest.mock import patch

from duplet_core.ids import Role
from duplet_core.messages import AbortAck, Landed, Move, SourceReleased
from duplet_core.writer_state import State, Transfer
from duplet_core.writer_transfers import Transfers
from tests.faults.unordered_kvproxy import main

_end = Transfers._end
_copy = Transfers._copy


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


HASTES: dict[str, tuple[str, Callable[..., None]]] = {
    "acknowledged": ("_end", acknowledge),
    "landed": ("_copy", tell_decode),
    "released": ("_copy", tell_prefill),
}


if __name__ == "__main__":
    place, hasty = HASTES[sys.argv[1]]
    with patch.object(Transfers, place, hasty):
        code = main()
    sys.exit(code)
