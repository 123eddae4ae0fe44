"""Timelines in Chrome's trace format, which Perfetto and chrome://tracing open.

A service is a process of the trace, a request a thread of it; what lies beside the chain has
threads of its own, for spans of one thread may nest but not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from duplet_client import Timeline

SERVICES = ("client", "lb", "prefill", "kvproxy", "decode")


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace as JSON has it; times in it are µs since the first request was sent."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": service}}
        for pid, service in enumerate(SERVICES)
    ]
    zero_ns = min(timeline.client_sent_ns for timeline in timelines)
    for number, timeline in enumerate(timelines):
        events += _events(timeline, number, zero_ns)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(timeline: Timeline, number: int, zero_ns: int) -> list[dict[str, Any]]:
    def span(name: str, service: str, start_ns: int, end_ns: int, tid: int) -> dict[str, Any]:
        return {
            "name": name,
            "cat": service,
            "ph": "X",
            "ts": (start_ns - zero_ns) / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "pid": SERVICES.index(service),
            "tid": tid,
            "args": {"request": number},
        }

    tid, at_ns = 2 * number, timeline.client_sent_ns
    events = [span("request", "client", at_ns, timeline.client_finished_ns, tid)]
    for segment in timeline.segments():
        end_ns = at_ns + segment.duration_ns
        events.append(span(segment.name, segment.service, at_ns, end_ns, tid))
        at_ns = end_ns
    if not timeline.shares_clock:
        return events
    for beside in timeline.beside():
        events.append(span(beside.name, beside.service, beside.start_ns, beside.end_ns, tid + 1))
    first_ns = dict(timeline.points).get("first_step")
    if first_ns is not None:
        ends_ns = accumulate(timeline.step_gaps_ns, initial=first_ns)
        for start_ns, end_ns in pairwise(ends_ns):
            events.append(span("step", "decode", start_ns, end_ns, tid))
    return events
