"""A client process that reads streams as fast as they come.

`python -m bench.stream_client ADDRESS STREAMS ROWS ROWS_PER_MESSAGE COUNTERS INDEX` prints a line
when lb has admitted all its streams and, at their end, one with the ns of the end and, for every
message, the ns from the step of its newest row to its reading.
COUNTERS is a file of int64; it counts the rows it has read in the one at INDEX.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import grpc.aio
import numpy as np

from bench.admission_forms import COLUMNS, make_prompt
from bench.stream_stub import STAMP_BYTES
from duplet.speech.v1 import speech_pb2, speech_pb2_grpc
from duplet_client.options import channel_options

TIMEOUT_S = 120.0
PROMPT_ROWS = 64
ROW_BYTES = 4 * COLUMNS


class Reader:
    """Reads all streams of this process and counts."""

    def __init__(self, address: str, wanted: speech_pb2.GenerateRequest, counts: str) -> None:
        channel = grpc.aio.insecure_channel(address, options=channel_options(address))
        self._stub = speech_pb2_grpc.SpeechStub(channel)
        self._wanted = wanted
        path, index = counts.rsplit(":", 1)
        self._counters = np.memmap(path, dtype=np.int64, mode="r+")
        self._index = int(index)
        self.delays_ns: list[int] = []

    async def read(self, started: asyncio.Semaphore) -> None:
        """One stream to its end; `started` is released when lb has admitted it."""
        rows = 0
        async for response in self._stub.Generate(self._wanted, timeout=TIMEOUT_S):
            kind = response.WhichOneof("event")
            if kind == "started":
                started.release()
            elif kind == "rows":
                data = response.rows.rows
                stamp = data[-ROW_BYTES:][:STAMP_BYTES]
                self.delays_ns.append(time.monotonic_ns() - int.from_bytes(stamp, "little"))
                count = len(data) // ROW_BYTES
                rows += count
                self._counters[self._index] += count
        if rows != self._wanted.max_rows:
            raise RuntimeError(f"{rows} rows came, not {self._wanted.max_rows}")


async def read_streams(
    address: str, streams: int, rows: int, rows_per_message: int, counts: str
) -> None:
    """Read all of them at once and say what came."""
    request = speech_pb2.GenerateRequest(
        prompt=make_prompt(PROMPT_ROWS).tobytes(),
        columns=COLUMNS,
        max_rows=rows,
        rows_per_message=rows_per_message,
    )
    reader = Reader(address, request, counts)
    started = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(reader.read(started))
        for _ in range(streams):
            await started.acquire()
        print("started", flush=True)
    answer = {"ended_ns": time.monotonic_ns(), "delays_ns": reader.delays_ns}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    where, stream_count, row_count, row_size, counter_file, own_index = sys.argv[1:]
    counting = f"{counter_file}:{own_index}"
    work = read_streams(where, int(stream_count), int(row_count), int(row_size), counting)
    asyncio.run(work)
