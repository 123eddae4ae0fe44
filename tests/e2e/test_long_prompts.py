"""A real lb before stand-ins that speak a large model's spec: its longest prompt arrives whole."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from bench.admission_forms import COLUMNS, SPEC
from duplet.decode.v1 import decode_pb2_grpc
from duplet.prefill.v1 import prefill_pb2_grpc
from duplet_client import AsyncClient, Finished, GenerateError
from duplet_core.errors import InvalidInput, Reason
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_core.messages import Credit, Hello, Prefill, StoppedAtOnce
from duplet_pages.spec import MOST_REQUEST_BYTES
from duplet_runtime.server import peer_server_options
from duplet_unit.probe import is_serving
from duplet_unit.unit import free_local_address
from duplet_wire.streams import CODECS
from tests.e2e.live_unit import clean_environment, until
from tests.e2e.raw_calls import failure_of_bytes

LONGEST = SPEC.longest_sequence - 1
PAGES = 2 * SPEC.pages_for(SPEC.longest_sequence)


class StandIn:
    """One end of lb's stream: greets, and ends every prompt at once."""

    def __init__(self, role: Role, prompts: list[bytes]) -> None:
        self._codec = CODECS[role, Role.LB]
        self._role = role
        self._prompts = prompts

    async def Connect(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        while (proto := await context.read()) is not grpc.aio.EOF:
            message = self._codec.decode(proto)
            answer: Any = None
            if isinstance(message, Hello):
                answer = self._hello(message)
            elif isinstance(message, Prefill):
                self._prompts.append(message.prompt)
                answer = StoppedAtOnce(message.request_id, message.transfer, (1, 1, 1, 1, 1, 1))
            if answer is not None:
                await context.write(self._codec.encode(answer))

    def _hello(self, hello: Hello) -> Hello:
        name = InstanceId(secrets.token_hex(16))
        numbers = (PROTOCOL_VERSION, hello.number)
        credit = Credit(PAGES, PAGES, 2, 0)
        return Hello(self._role, name, *numbers, hello.instance, spec=SPEC.to_json(), credit=credit)


@pytest.fixture
async def lb(tmp_path: Path) -> AsyncIterator[tuple[str, list[bytes]]]:
    """lb's address, and the prompts that reached prefill."""
    tmp_path.chmod(0o700)
    prompts: list[bytes] = []
    server = grpc.aio.server(options=peer_server_options())
    prefill_pb2_grpc.add_PrefillPeerServicer_to_server(
        StandIn(Role.PREFILL, prompts),  # type: ignore[arg-type]
        server,
    )
    decode_pb2_grpc.add_DecodePeerServicer_to_server(
        StandIn(Role.DECODE, prompts),  # type: ignore[arg-type]
        server,
    )
    for role in (Role.PREFILL, Role.DECODE):
        server.add_insecure_port(f"unix:{tmp_path}/{role}.sock")
    await server.start()
    listen = free_local_address()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplet_lb"),
        env=clean_environment({"DUPLET_RUN_DIR": str(tmp_path), "DUPLET_LB_LISTEN": listen}),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await until(lambda: is_serving(listen, "ready"), "lb is ready")
        yield listen, prompts
    finally:
        process.terminate()
        await process.wait()
        await server.stop(None)


async def test_the_longest_prompt_arrives_and_a_row_more_does_not(
    lb: tuple[str, list[bytes]],
) -> None:
    listen, prompts = lb
    rows = np.zeros((LONGEST + 1, COLUMNS), dtype=np.int32)
    rows[:, 0] = np.arange(LONGEST + 1)
    async with AsyncClient(listen) as client:
        events = [event async for event in client.generate(rows[:-1])]
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.prompt_rows == LONGEST
        assert prompts == [rows[:-1].tobytes()]
        with pytest.raises(GenerateError) as caught:
            [event async for event in client.generate(rows)]
        assert caught.value.reason == Reason.PROMPT_TOO_LONG
        assert f"{LONGEST + 1} rows" in caught.value.detail
        with pytest.raises(InvalidInput, match="bytes, more than the"):
            client.generate(np.zeros((MOST_REQUEST_BYTES // 4, 1), dtype=np.int32))


async def test_a_message_without_bound_is_refused_by_grpc(lb: tuple[str, list[bytes]]) -> None:
    listen, prompts = lb
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(listen, options=options) as channel:
        failure = await failure_of_bytes(channel, bytes(MOST_REQUEST_BYTES + 1))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert prompts == []
