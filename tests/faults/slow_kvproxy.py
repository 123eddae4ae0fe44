"""kvproxy with copies that take their time, so that faults meet them in flight: `python -m
tests.faults.slow_kvproxy`. On a CPU a copy stops half-way. `SLOW_COPY_S` says for how long.

No other module of the tests is imported here: in a container this file stands alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from unittest.mock import patch

from duplet_kvproxy import __main__ as kvproxy
from duplet_kvproxy import mover
from duplet_kvproxy.mover import Mover
from duplet_memory.plan import CopyPlan, RowCopy, execute, plan_ranges
from duplet_memory.pool import Pool

SLOW_COPY_S = float(os.environ.get("SLOW_COPY_S", "0"))


class Pace(threading.local):
    """How many times as long the copies of this thread take."""

    times = 1


pace = Pace()


def copy_slowly(copy: RowCopy, source: Pool, dest: Pool) -> None:
    """In the place of `copy_shared_memory`."""
    plan = plan_ranges(copy)
    middle = len(plan.ranges) // 2
    for ranges in (plan.ranges[:middle], plan.ranges[middle:]):
        part = CopyPlan(ranges, plan.source_bytes, plan.dest_bytes)
        execute(part, source.memory, dest.memory)
        time.sleep(SLOW_COPY_S * pace.times / 2)


class SlowMover(Mover):
    """Waits before it looks for the end of a copy between GPUs."""

    def _land(self) -> None:
        time.sleep(SLOW_COPY_S)
        super()._land()


def main(kind: type[Mover] = SlowMover) -> int:
    """Runs kvproxy with such a mover."""
    with (
        patch.object(kvproxy, "Mover", kind),
        patch.object(mover, "copy_shared_memory", copy_slowly),
    ):
        return kvproxy.main()


if __name__ == "__main__":
    sys.exit(main())
