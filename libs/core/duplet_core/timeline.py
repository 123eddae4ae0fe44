"""Fixed points of a request's timeline, in order, on the machine's monotonic clock.

Every point is an absolute time in ns. Neighbouring points bound a segment, so the segments
of a request meet and their sum is the time from the first point to the last.
"""

from __future__ import annotations

POINTS = (
    "client_sent",  # client: the call left
    "lb_received",  # lb: request parsed and checked
    "lb_admitted",  # lb: Admit and Prefill sent
    "prefill_received",  # prefill: Prefill taken from the stream
    "prefill_started",  # prefill's engine: first chunk launched
    "prefill_computed",  # prefill's engine: last chunk done, first row drawn
    "moved",  # kvproxy: last copy completed
    "landed",  # decode: Landed taken from the stream
    "verified",  # decode: KV verified, stream queued for the next step
    "first_step",  # decode's engine: first step of the stream done
    "last_step",  # decode's engine: last step done
    "lb_finished",  # lb: Finished handed to the client's stream
    "client_finished",  # client: Finished read
)

SEGMENTS = (
    "to lb",
    "lb admission",
    "to prefill",
    "prefill queue",
    "prefill compute",
    "move",
    "to decode",
    "verify",
    "first step",
    "decode steps",
    "back to lb",
    "to client",
)
"""Names of the segments between neighbouring points; `SEGMENTS[i]` ends at `POINTS[i + 1]`."""

PREFILL_POINTS = 3
"""`prefill_received`, `prefill_started`, `prefill_computed`: the stamps of a Handoff; kvproxy
appends `moved`, decode `landed`, `verified`, `first_step`, `last_step`."""
