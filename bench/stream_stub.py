"""Prefill and decode without an engine: they speak to lb as the real ones do.

`python -m bench.stream_stub RUN_DIR STREAMS ROWS STEPS_PER_S COUNTERS`: prefill takes every prompt
in silence; decode waits for STREAMS Admits and for a line on stdin, accepts them all, and sends
ROWS rows of each, a row of every stream a step: at the pace given, or with 0 as fast as it may.
No more than WINDOW_ROWS a stream leave beyond what the clients have read; COUNTERS is their file:
one int64 a client process. With `-` for it, rows leave on time whoever reads. A row begins with
the ns at which its step was sent.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from bench.admission_forms import COLUMNS, SPEC
from duplet.decode.v1 import decode_pb2_grpc
from duplet.prefill.v1 import prefill_pb2_grpc
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_core.messages import Accepted, Admit, Credit, Finished, Hello, StepRows
from duplet_core.timeline import STAMPED
from duplet_runtime.server import peer_server_options
from duplet_wire.streams import CODECS

WINDOW_ROWS = 32
PAUSE_S = 0.0005
STAMP_BYTES = 8
STAMPS = (1,) * len(STAMPED)
"""Prefill's, kvproxy's and decode's."""


class Peer:
    """Our end of one stream with lb."""

    def __init__(self, role: Role, context: Any, streams: int) -> None:
        self._role = role
        self._codec = CODECS[role, Role.LB]
        self._context = context
        self._streams = streams

    async def greet(self) -> None:
        """Answer lb's Hello."""
        hello = await self.read()
        assert isinstance(hello, Hello)
        pages = SPEC.pages_for(SPEC.longest_sequence) * self._streams
        await self.write(
            Hello(
                self._role,
                InstanceId(secrets.token_hex(16)),
                PROTOCOL_VERSION,
                hello.number,
                hello.instance,
                spec=SPEC.to_json(),
                credit=Credit(pages, pages, self._streams, 0),
            )
        )

    async def read(self) -> Any:
        """lb's next message; None at the end."""
        proto = await self._context.read()
        return None if proto is grpc.aio.EOF else self._codec.decode(proto)

    async def write(self, message: Any) -> None:
        await self._context.write(self._codec.encode(message))


class StubPrefill(prefill_pb2_grpc.PrefillPeerServicer):
    """Takes prompts; decode has their rows already."""

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        peer = Peer(Role.PREFILL, context, 0)
        await peer.greet()
        while await peer.read() is not None:
            pass


class StubDecode(decode_pb2_grpc.DecodePeerServicer):
    """Makes rows out of nothing."""

    def __init__(self, streams: int, rows: int, steps_per_s: float, counters: Path | None) -> None:
        self._streams = streams
        self._rows = rows
        self._step_s = 1 / steps_per_s if steps_per_s else 0.0
        self._read_rows = np.memmap(counters, dtype=np.int64, mode="r") if counters else None

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        peer = Peer(Role.DECODE, context, self._streams)
        await peer.greet()
        admits: list[Admit] = []
        while len(admits) < self._streams:
            message = await peer.read()
            assert isinstance(message, Admit)
            admits.append(message)
        await asyncio.to_thread(sys.stdin.readline)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_rows(peer, admits))
            while await peer.read() is not None:
                pass

    async def _send_rows(self, peer: Peer, admits: list[Admit]) -> None:
        keys = [(admit.request_id, admit.transfer) for admit in admits]
        for number, key in enumerate(keys):
            await peer.write(Accepted(*key, number, make_row()))
        numbers = tuple(range(len(keys)))
        began_s = time.monotonic()
        for step in range(1, self._rows):
            await asyncio.sleep(max(0.0, began_s + step * self._step_s - time.monotonic()))
            await self._wait_readers((step - WINDOW_ROWS) * len(keys))
            await peer.write(StepRows(step, numbers, make_row() * len(keys)))
        for key in keys:
            await peer.write(Finished(*key, False, self._rows, 1, STAMPS))

    async def _wait_readers(self, rows: int) -> None:
        """Wait until the clients have read so many rows."""
        if self._read_rows is None:
            return
        while True:
            if self._read_rows.sum() >= rows:
                return
            await asyncio.sleep(PAUSE_S)


def make_row() -> bytes:
    """A row that says when it was made."""
    return time.monotonic_ns().to_bytes(STAMP_BYTES, "little").ljust(4 * COLUMNS, b"\0")


async def serve(run_dir: Path, decode: StubDecode) -> None:
    """Serve lb until it, and with it stdin, is gone; a line on stdout says that it begins."""
    server = grpc.aio.server(options=peer_server_options())
    prefill_pb2_grpc.add_PrefillPeerServicer_to_server(StubPrefill(), server)
    decode_pb2_grpc.add_DecodePeerServicer_to_server(decode, server)
    for role in (Role.PREFILL, Role.DECODE):
        server.add_insecure_port(f"unix:{run_dir}/{role}.sock")
    await server.start()
    print("serving", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    folder, stream_count, row_count, pace, counter_file = sys.argv[1:]
    counts = None if counter_file == "-" else Path(counter_file)
    stub = StubDecode(int(stream_count), int(row_count), float(pace), counts)
    asyncio.run(serve(Path(folder), stub))
