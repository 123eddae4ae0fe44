"""Entry point of the `duplet` command."""

from __future__ import annotations

import signal
import sys

TERMINATED = 143
"""Exit code after SIGTERM, as a shell counts it."""


def main() -> None:
    """Run the command that the arguments name.

    Until it is loaded, which takes a second where the disk is slow, Ctrl-C ends the process
    without a traceback. After that both signals end it in order: drafts of files are removed.
    """
    interrupts = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from duplet_unit.commands import app

    signal.signal(signal.SIGINT, interrupts)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(TERMINATED))
    app()
