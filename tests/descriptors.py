"""Which descriptors a process has open, for tests that look for one left behind."""

from __future__ import annotations

import gc
import os


def open_fds() -> set[tuple[int, str]]:
    """Number and target of every descriptor of this process.

    Tests compare sets, not counts: a thread of grpc, or what the collector finds, may close a
    descriptor of an earlier test at any time.
    """
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # that of the listing itself
        # Of an earlier test's file, which may lose its name meanwhile.
        found.add((int(name), target.removesuffix(" (deleted)")))
    return found
