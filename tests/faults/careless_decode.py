"""decode with one rule switched off: `python -m tests.faults.careless_decode`.

A page whose transfer is given up is free at once, without proof. Its ABORT is sent as always.
"""

from __future__ import annotations

import sys

from duplet_core.decode_state import Transfer
from duplet_core.decode_transfers import Transfers
from duplet_decode.__main__ import main

_quarantine = Transfers._quarantine


def free_at_once(self: Transfers, t: Transfer, now: int) -> None:
    _quarantine(self, t, now)
    self._free_proven(t)


if __name__ == "__main__":
    Transfers._quarantine = free_at_once  # type: ignore[method-assign]
    sys.exit(main())
