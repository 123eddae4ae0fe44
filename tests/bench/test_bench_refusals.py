"""Calls that are written as bytes: gRPC takes them for calls, and who was refused is told apart."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from bench.refusals import floor_server, report_bursts
from bench.results import Report
from bench.written_calls import MOST_BYTES, call_frames, refusal_times

METHOD = "/t.T/Generate"


def test_each_call_of_the_floor_is_refused_and_has_its_time() -> None:
    with floor_server() as address:
        times_s = refusal_times(address, METHOD, [[b"x" * 100] * 20, [b""] * 3])
    assert len(times_s) == 23
    assert 0 < min(times_s) <= max(times_s)


async def test_who_was_answered_was_not_refused() -> None:
    got = []

    async def answer(request: bytes, context: Any) -> None:
        got.append(request)
        if request == b"taken":
            await context.write(b"a row")
        else:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    server = grpc.aio.server()
    handlers: Any = {"Generate": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        calls = [[b"taken", b"refused"], [b"refused"]]
        times_s = await asyncio.to_thread(refusal_times, address, METHOD, calls)
    finally:
        await server.stop(0)
    assert sorted(got) == [b"refused", b"refused", b"taken"]
    assert len(times_s) == 2


async def test_a_server_that_leaves_is_an_error_and_no_figure() -> None:
    async def leave(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(leave, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(refusal_times, f"127.0.0.1:{port}", METHOD, [[b"x"]])


def test_more_than_a_connection_takes_at_once_is_refused_here() -> None:
    with pytest.raises(ValueError, match="65535 bytes"):
        call_frames(METHOD, [bytes(MOST_BYTES)])


def test_the_best_burst_counts() -> None:
    report = Report("refusals")
    report_bursts(report, [[0.2] * 9, [0.06, 0.04, 0.06]], [[0.03], [0.05]])
    values = {result.case: result.value for result in report.results}
    assert values["lb refuses after, p99"] == pytest.approx(60)
    assert values["gRPC alone refuses after, p99"] == pytest.approx(30)
    assert values["lb over gRPC alone, p99"] == pytest.approx(2)
