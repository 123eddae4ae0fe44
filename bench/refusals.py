"""How fast a full unit refuses 500 calls written at once: `python -m bench.refusals`.

`bench.overload` measures what clients see, with what their own side costs. Here the client costs
nothing (`bench.written_calls`), and beside lb stands the least that gRPC for Python can do: a
server whose handler refuses at once. The two take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from bench.overload import REFUSED_WITHIN_MS
from bench.results import MEASUREMENTS, QUANTILES, Report
from bench.systems import UNIT, running
from bench.written_calls import refusal_times
from duplet.speech.v1 import speech_pb2
from duplet_client import AsyncClient
from duplet_lb.door import GENERATE
from duplet_load.summary import quantile

SLOTS = 2
CONNECTIONS = 8
PROMPT_ROWS = 4
OUTPUT_ROWS = 40
PAUSE_S = 1.5
"""From burst to burst: those who were admitted have ended."""


async def serve_floor() -> None:
    """Refuse every call, until this process is ended; its first line is the port."""

    async def refuse(_unread: Any, context: Any) -> None:
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
        def service(self, _details: Any) -> Any:
            return handler

    handler: Any = grpc.stream_stream_rpc_method_handler(refuse)
    server = grpc.aio.server(handlers=[Handlers()])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextmanager
def floor_server() -> Iterator[str]:
    """The address of a server that refuses at once; it ends with the context."""
    command = (sys.executable, "-m", "bench.refusals", "--floor")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def report_bursts(report: Report, lb_s: list[list[float]], floor_s: list[list[float]]) -> None:
    """The quantiles of the best burst of each: what else runs on the machine only adds."""
    for label, share in QUANTILES.items():
        best = []
        for whose, bursts, budget in (
            ("lb refuses", lb_s, f"<= {REFUSED_WITHIN_MS}"),
            ("gRPC alone refuses", floor_s, ""),
        ):
            found = [quantile(times_s, share) for times_s in bursts]
            best.append(1e3 * min(found_s for found_s in found if found_s is not None))
            report.add(f"{whose} after, {label}", best[-1], "ms", budget if label == "p99" else "")
        report.add(f"lb over gRPC alone, {label}", best[0] / best[1], "ratio")


async def run(options: argparse.Namespace) -> Report:
    """Let both refuse by turns; the quantiles."""
    report = Report("refusals", f"{options.burst} calls at once on {CONNECTIONS} connections")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("DUPLET_")},
        "DUPLET_DECODE_SLOTS": str(SLOTS),
        "DUPLET_LOG_LEVEL": "warning",
    }
    lb_s: list[list[float]] = []
    floor_s: list[list[float]] = []
    async with running(UNIT, environment, (), PROMPT_ROWS) as address:
        async with AsyncClient(address) as client:
            spec = (await client.unit()).spec
        assert spec is not None
        prompt = bytes(4 * spec.columns * PROMPT_ROWS)
        wish = speech_pb2.GenerateRequest(prompt=prompt, columns=spec.columns, max_rows=OUTPUT_ROWS)
        wish.sampling.seed = 1
        calls = [wish.SerializeToString()] * options.burst
        connections = [calls[index::CONNECTIONS] for index in range(CONNECTIONS)]
        with floor_server() as floor:
            for _ in range(options.bursts):
                for bursts, at in ((lb_s, address), (floor_s, floor)):
                    await asyncio.sleep(PAUSE_S)
                    bursts.append(await asyncio.to_thread(refusal_times, at, GENERATE, connections))
    report_bursts(report, lb_s, floor_s)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--burst", type=int, default=500)
    parser.add_argument("--bursts", type=int, default=5)
    parser.add_argument("--floor", action="store_true", help="be the server that refuses at once")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    if options.floor:
        uvloop.run(serve_floor())
        return
    report = asyncio.run(run(options))
    report.save(options.out)
    print(report.table(), flush=True)


if __name__ == "__main__":
    main()
