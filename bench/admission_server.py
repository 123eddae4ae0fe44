"""A gRPC server with lb's options that takes prompts in every form and admits nothing.

`python -m bench.admission_server SOCKET` serves `/bench.Admission/FORM` until its stdin ends.
The answer is two little-endian int64, ns of the monotonic clock: when the request's bytes were
in Python's hands, and when its prompt was packed and checked. `unread` does nothing between.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from bench.admission_forms import PARSERS, admit
from duplet_runtime.health import Health
from duplet_runtime.server import create_server, public_server_options, running_server

SERVICE = "bench.Admission"
UNREAD = "unread"
STAMPS = struct.Struct("<qq")
FORMS = (*PARSERS, UNREAD)


def _make_handler(form: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def handle(data: bytes, context: Any) -> bytes:
        taken_ns = time.monotonic_ns()
        if form != UNREAD:
            admit(form, data)
        return STAMPS.pack(taken_ns, time.monotonic_ns())

    return handle


async def serve(address: str) -> None:
    """Serve until stdin ends; a line on stdout says that it begins."""
    health = Health([])
    failed = asyncio.get_running_loop().create_future()
    server = create_server(public_server_options(), health, failed.set_exception)
    handlers: dict[str, Any] = {
        form: grpc.unary_unary_rpc_method_handler(_make_handler(form)) for form in FORMS
    }
    generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
    server.add_generic_rpc_handlers((generic,))
    async with running_server(server, [address], health, [], grace_s=1.0):
        print("serving", flush=True)
        ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait({ended, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await failed


if __name__ == "__main__":
    asyncio.run(serve(f"unix:{sys.argv[1]}"))
