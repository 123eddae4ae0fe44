from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from duplet_core.errors import (
    DupletError,
    InvalidInput,
    InvariantError,
    Reason,
    RemoteProtocolError,
    Unavailable,
)
from duplet_runtime.health import Health
from duplet_runtime.server import (
    create_server,
    peer_channel_options,
    public_server_options,
    running_server,
)
from duplet_runtime.status import RETRYABLE, STATUS_OF, status_proto


@pytest.mark.parametrize("reason", list(Reason))
def test_each_reason_has_one_status(reason: Reason) -> None:
    status = status_proto(DupletError(reason, "x" * 10_000))
    assert STATUS_OF[reason] is not grpc.StatusCode.OK
    assert (status.code, STATUS_OF[reason].value[1]) == STATUS_OF[reason].value
    infos = unpack(status, error_details_pb2.ErrorInfo)
    assert [(info.reason, info.domain) for info in infos] == [(reason.value, "duplet")]
    assert bool(unpack(status, error_details_pb2.RetryInfo)) == (reason in RETRYABLE)
    assert status.ByteSize() < 2048


def test_the_table_has_no_strangers() -> None:
    assert set(STATUS_OF) == set(Reason)


def test_field_at_fault() -> None:
    error = InvalidInput(Reason.INVALID_SAMPLING, "sampling.top_p: -1 is not in (0, 1]")
    (bad,) = unpack(status_proto(error), error_details_pb2.BadRequest)
    assert [(v.field, v.description) for v in bad.field_violations] == [
        ("sampling.top_p", "-1 is not in (0, 1]")
    ]
    plain = InvalidInput(Reason.INVALID_PROMPT, "Nothing here names a field")
    assert not unpack(status_proto(plain), error_details_pb2.BadRequest)


def unpack(status: status_pb2.Status, kind: Any) -> list[Any]:
    found = []
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


RAISED: dict[str, BaseException] = {
    "duplet": Unavailable(Reason.QUARANTINE, "pages are out"),
    "protocol": RemoteProtocolError("odd"),
    "cancelled": asyncio.CancelledError(),
    "bug": ValueError("secret inside"),
    "invariant": InvariantError("secret inside"),
}
EXPECTED = {
    "duplet": (grpc.StatusCode.UNAVAILABLE, "QUARANTINE"),
    "protocol": (grpc.StatusCode.INVALID_ARGUMENT, "PEER_PROTOCOL"),
    "cancelled": (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    "bug": (grpc.StatusCode.INTERNAL, None),
    "invariant": (grpc.StatusCode.INTERNAL, None),
}


async def unary(request: bytes, _context: Any) -> bytes:
    raise RAISED[request.decode()]


async def writer(request: bytes, context: Any) -> None:
    await context.write(b"one")
    raise RAISED[request.decode()]


async def generator(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    yield b"one"
    raise RAISED[request.decode()]


async def call_to_end(channel: Any, name: str, kind: str) -> None:
    path = f"/t.T/{name}"
    if name == "Unary":
        await channel.unary_unary(path)(kind.encode(), timeout=10)
    else:
        async for part in channel.unary_stream(path)(kind.encode(), timeout=10):
            assert part == b"one"


@pytest.mark.parametrize("kind", list(RAISED))
async def test_whatever_leaves_a_handler_is_a_status(kind: str, run_dir: Path) -> None:
    fatal: list[BaseException] = []
    health = Health([])
    server = create_server(public_server_options(), health, fatal.append)
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Writer": grpc.unary_stream_rpc_method_handler(writer),
        "Generator": grpc.unary_stream_rpc_method_handler(generator),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    address = f"unix:{run_dir}/t.sock"
    async with (
        running_server(server, [address], health, [], 5),
        grpc.aio.insecure_channel(address, options=peer_channel_options()) as channel,
    ):
        for name in handlers:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_to_end(channel, name, kind)
            code, reason = EXPECTED[kind]
            assert caught.value.code() == code
            assert "secret" not in str(caught.value)
            status = rpc_status.from_call(caught.value)
            infos = unpack(status, error_details_pb2.ErrorInfo) if status else []
            assert [info.reason for info in infos] == ([reason] if reason else [])
    assert len(fatal) == (3 if kind == "invariant" else 0)
