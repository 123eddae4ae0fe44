"""What it costs to take a prompt: `python -m bench.admission`.

Two parts. *Forms*: a prompt of 1,500 rows of 11 as packed bytes, JSON text and nested repeated
fields, from the request's bytes to a checked packed prompt, in a gRPC server with lb's options.
*Unit*: a real unit on the CPU, the same prompt size: time in lb, prefill and decode, idle and
while forward passes run.

Time *in lb* counts from the bytes in Python's hands; *since sending* adds the way there and
the wait for whoever is served before, which is what many clients at once feel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.admission_server import FORMS, UNREAD
from bench.admission_unit import measure_unit
from bench.processes import Child, running
from bench.results import MEASUREMENTS, QUANTILES, Report, quantile

AT_ONCE = (1, 16)
CLIENTS = 4
"""Processes that send when many requests go at once."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is sent."""

    rounds: int
    """Every form has its turn in each: a change of the machine's load meets all of them."""
    requests: int
    """Of one form in one round."""
    probes: int
    """Requests to the real unit at each number at once, idle and busy."""


FULL = Size(rounds=10, requests=64, probes=320)
SMALL = Size(rounds=1, requests=8, probes=4)
ROWS = 1500

Times = dict[tuple[str, str], list[int]]
"""(form, 'in lb' or 'since sending') to ns of every request."""


async def measure_forms(report: Report, size: Size) -> None:
    """Every form at 1 and at 16 requests at once."""
    with tempfile.TemporaryDirectory(prefix="duplet-bench-") as folder:
        socket = f"{folder}/lb.sock"
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(running("bench.admission_server", socket))
            await server.read()
            run_client = "bench.admission_client", socket, str(ROWS)
            clients = [
                await stack.enter_async_context(running(*run_client)) for _ in range(CLIENTS)
            ]
            for at_once in AT_ONCE:
                few = clients[: min(CLIENTS, at_once)]
                await send_round(few, 4, at_once)  # the first requests of a process are slower
                times: Times = defaultdict(list)
                for _ in range(size.rounds):
                    for key, values in (await send_round(few, size.requests, at_once)).items():
                        times[key] += values
                report_forms(report, times, at_once)


async def send_round(clients: Sequence[Child], requests: int, at_once: int) -> Times:
    """Each form in turn, from all clients at once."""
    times: Times = {}
    for form in FORMS:
        share = len(clients)
        for client in clients:
            client.tell(f"{form} {max(1, requests // share)} {at_once // share}")
        answers = await asyncio.gather(*(client.read() for client in clients))
        pairs = [pair for answer in answers for pair in json.loads(answer)]
        times[form, "in lb"] = [pair[0] for pair in pairs]
        times[form, "since sending"] = [pair[1] for pair in pairs]
    return times


def report_forms(report: Report, times: Times, at_once: int) -> None:
    """Times in ms, and packed against the others."""
    for name, share in QUANTILES.items():
        found = {key: quantile(values, share) for key, values in times.items()}
        for (form, what), ns in found.items():
            if (form, what) == (UNREAD, "in lb"):
                continue
            budget = "<= 1" if (form, what, name) == ("packed", "in lb", "p99") else ""
            report.add(f"{form} {what}, {at_once} at once, {name}", ns / 1e6, "ms", budget)
        for other in ("json", "msgspec", "repeated"):
            for what in ("in lb", "since sending"):
                ratio = found["packed", what] / found[other, what]
                case = f"admission_packed_over_{other}_ratio {what}, {at_once} at once, {name}"
                report.add(case, ratio, "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few requests: does it run at all?")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="folder of the results")
    options = parser.parse_args()
    size = SMALL if options.small else FULL
    report = Report("admission")
    asyncio.run(measure_forms(report, size))
    asyncio.run(measure_unit(report, ROWS, size.probes))
    report.save(options.out)
    print(report.table())


if __name__ == "__main__":
    main()
