"""The exclusive kernel lock that one instance of a role holds for life.

A second instance waits for it, also for a stopped first one: only the kernel's release, at the
exit of the holder, lets it go on. The lock file is never unlinked.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from duplet_core.errors import require

POLL_S = 0.05
"""A blocking flock could not be cancelled; a waiting instance looks this often."""

NAME_LOOKS = 40
"""Looks after which a holder without a name is told as unknown."""


@dataclass(slots=True)
class HeldLock:
    """Proof that this process holds the lock; owns the descriptor, which is close-on-exec."""

    path: Path
    fd: int

    def release(self) -> None:
        """Give the lock back; the process's exit does the same."""
        require(self.fd >= 0, "lock released twice")
        os.close(self.fd)
        self.fd = -1


async def hold_lock(path: Path, on_wait: Callable[[str], None]) -> HeldLock:
    """Take the lock, waiting for as long as another process has it; can be cancelled.

    `on_wait` is called once, with the holder's process id, when the lock is taken already.

    Raises:
        OSError: the file cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    held = False
    try:
        looks = 0
        while not (held := _try(fd)):
            looks += 1
            # A holder writes its name right after it took the lock: give it the time to.
            name = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
            if looks <= NAME_LOOKS and (name or looks == NAME_LOOKS):
                on_wait(name or "unknown")
                looks = NAME_LOOKS
            await asyncio.sleep(POLL_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return HeldLock(path, fd)
    finally:
        if not held:
            os.close(fd)


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
