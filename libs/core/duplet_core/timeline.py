"""Fixed points of a request's timeline, in order, on the machine's monotonic clock.

Every point is an absolute time in ns. Neighbouring points bound a segment, so the segments
of a request meet and their sum is the time from the first point to the last. Some points lie
beside this chain, for what happens at the same time: decode's part of an admission, the row
that leaves while the first step runs.
"""

from __future__ import annotations

POINTS = (
    "client_sent",  # client: the call left
    "lb_received",  # lb: request parsed
    "lb_checked",  # lb: prompt and sampling checked
    "lb_admitted",  # lb: credit found; Admit and Prefill sent
    "prefill_received",  # prefill: Prefill taken from the stream
    "prefill_handed",  # prefill: pages found, prompt handed to the engine
    "prefill_started",  # prefill's engine: first chunk launched
    "prefill_computed",  # prefill's engine: last chunk computed
    "prefill_drawn",  # prefill's engine: first row drawn
    "prefill_digested",  # prefill's engine: digests of the last chunk's pages taken
    "move_received",  # kvproxy: last Move taken from the stream
    "move_started",  # kvproxy: its copy began
    "moved",  # kvproxy: last copy completed
    "landed",  # decode: Landed taken from the stream
    "verified",  # decode: digests checked, stream queued for the next step
    "first_step",  # decode's engine: first step of the stream done
    "last_step",  # decode's engine: last step done
    "lb_finished",  # lb: Finished handed to the client's stream, or the error
    "client_finished",  # client: Finished or the error read
)

SEGMENTS = (
    "to lb",
    "lb check",
    "lb queue",
    "to prefill",
    "prefill pages",
    "prefill queue",
    "prefill chunks",
    "first row",
    "prefill digests",
    "to kvproxy",
    "move queue",
    "move",
    "to decode",
    "verify",
    "first step",
    "decode steps",
    "back to lb",
    "to client",
)
"""Names of the segments between neighbouring points; `SEGMENTS[i]` ends at `POINTS[i + 1]`."""

SERVICES = (
    *("lb", "lb", "lb"),
    *("prefill", "prefill", "prefill", "prefill", "prefill", "prefill"),
    *("kvproxy", "kvproxy", "kvproxy"),
    *("decode", "decode", "decode", "decode"),
    *("lb", "client"),
)
"""Whose time a segment is, in the order of SEGMENTS: a way between two is the receiver's."""

CUT = "until it ended"
"""The segment in which a request failed or was cancelled: what it was doing then is not known
where the end was told."""

NETWORK = "network"
"""What a client with another clock cannot tell apart."""

BESIDE = ("decode_admitted", "lb_first_row")
"""Points beside the chain: decode reserved pages and sent the grant; lb had the first row."""

BESIDE_SPANS = (
    ("decode admission", "lb_admitted", "decode_admitted", "decode"),
    ("wait for KV", "decode_admitted", "landed", "decode"),
    ("first row to lb", "verified", "lb_first_row", "lb"),
)
"""(name, from, to, whose): spans that overlap the chain and are not part of its sum."""

STAMPED = POINTS[POINTS.index("prefill_received") : POINTS.index("lb_finished")]
"""What travels to lb as `stamps`, in order: prefill's, then kvproxy's and decode's. A request
that stopped at once has prefill's alone."""
