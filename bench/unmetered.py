"""A service that measures nothing: `python -m bench.unmetered lb|prefill|decode|kvproxy`.

The product always measures; only comparisons of what that costs switch it off. The stamps of
requests' timelines stay: they are part of the messages between the services.
"""

from __future__ import annotations

import runpy
import sys

from duplet_lb.meter import Meters
from duplet_runtime.engine_meter import EngineMeter
from duplet_runtime.metrics import Counter, Histogram, Metrics

COUNTING = (
    *((Counter, "add"), (Histogram, "observe"), (Metrics, "count"), (EngineMeter, "note")),
    *((Meters, name) for name in ("note_row", "note_end", "note_stream", "note_timeline")),
)


def switch_off() -> None:
    """From now on this process counts nothing."""
    for kind, name in COUNTING:
        assert hasattr(kind, name), name
        setattr(kind, name, lambda *_: None)


if __name__ == "__main__":
    service = sys.argv.pop(1)
    switch_off()
    runpy.run_module(f"duplet_{service}", run_name="__main__", alter_sys=True)
