"""Entry point of the `duplet` command."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command that the arguments name.

    Until it is loaded, which takes a second where the disk is slow, Ctrl-C ends the process
    without a traceback.
    """
    interrupts = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from duplet_unit.commands import app

    signal.signal(signal.SIGINT, interrupts)
    app()
