"""lb on the event loop that is named: `python -m bench.stream_lb asyncio|uvloop`.

The product has one loop, fixed in `duplet_runtime.service`; only this comparison turns it.
"""

from __future__ import annotations

import sys

import duplet_runtime.service
from duplet_lb.__main__ import main

LOOPS = ("asyncio", "uvloop")

if __name__ == "__main__":
    duplet_runtime.service.USE_UVLOOP = LOOPS.index(sys.argv[1]) == 1
    sys.exit(main())
