"""A client process of the admission server: sends prompts in one form, so many at once.

`python -m bench.admission_client SOCKET ROWS` obeys lines `FORM COUNT AT_ONCE` on stdin and
answers each with one JSON line: for every request [ns from its bytes in lb to the checked prompt,
ns from sending to the checked prompt].
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import grpc.aio

from bench.admission_forms import encode_forms, make_prompt
from bench.admission_server import SERVICE, STAMPS, UNREAD
from duplet_client.options import channel_options

TIMEOUT_S = 120.0


async def send_all(
    channel: grpc.aio.Channel, form: str, data: bytes, count: int, at_once: int
) -> list[tuple[int, int]]:
    """Send `count` requests, `at_once` at a time, each as soon as one was answered."""
    method: Any = channel.unary_unary(f"/{SERVICE}/{form}")
    left = iter(range(count))
    times: list[tuple[int, int]] = []

    async def send_some() -> None:
        for _ in left:
            sent_ns = time.monotonic_ns()
            taken_ns, ready_ns = STAMPS.unpack(await method(data, timeout=TIMEOUT_S))
            times.append((ready_ns - taken_ns, ready_ns - sent_ns))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(send_some())
    return times


async def obey(address: str, rows: int) -> None:
    """Carry out stdin's lines until it ends."""
    forms = encode_forms(make_prompt(rows))
    forms[UNREAD] = forms["packed"]
    async with grpc.aio.insecure_channel(address, options=channel_options(address)) as channel:
        await channel.channel_ready()
        while line := await asyncio.to_thread(sys.stdin.readline):
            form, count, at_once = line.split()
            times = await send_all(channel, form, forms[form], int(count), int(at_once))
            print(json.dumps(times), flush=True)


if __name__ == "__main__":
    asyncio.run(obey(f"unix:{sys.argv[1]}", int(sys.argv[2])))
