"""A child that does not outlive its parent: a service's processes share one fate."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits; also while it is stopped.

    Called first thing in a child process. The parent must have started the child from its main
    thread, for the kernel takes the death of that thread.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def describe_exit(code: int) -> str:
    """Say how a process ended; `code` is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
