"""lb on the event loop that is named: `python -m bench.stream_lb asyncio|uvloop`.

The product has one loop, fixed in `duplet_runtime.service`, and always measures its streams;
only these comparisons turn the one and, with UNMETERED in the environment, the other off.
"""

from __future__ import annotations

import os
import sys

import duplet_runtime.service
from bench.unmetered import switch_off
from duplet_lb.__main__ import main

LOOPS = ("asyncio", "uvloop")
UNMETERED = "BENCH_UNMETERED"

if __name__ == "__main__":
    duplet_runtime.service.USE_UVLOOP = LOOPS.index(sys.argv[1]) == 1
    if UNMETERED in os.environ:
        switch_off()
    sys.exit(main())
