"""What a full unit answers at its door: at once, always, and without a look at the request."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from duplet.speech.v1 import speech_pb2, speech_pb2_grpc
from duplet_client.errors import GenerateError, from_rpc_error
from duplet_core.errors import Reason
from duplet_lb import door
from duplet_lb.door import GENERATE, Door
from duplet_runtime.health import Health
from duplet_runtime.server import create_server, public_server_options, running_server
from tests.e2e.live_unit import until

LONG_PROMPT_BYTES = 1_500_000
AT_ONCE = 200


@dataclass
class Lb:
    """What a door sees of lb: a machine that is full or not, a counter, a log."""

    full: bool = True
    ended: list[str] = field(default_factory=list)
    lines: list[tuple[str, int]] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def machine(self) -> Lb:
        return self

    @property
    def service(self) -> Lb:
        return self

    @property
    def log(self) -> Lb:
        return self

    def count_end(self, outcome: str) -> None:
        self.ended.append(outcome)

    def fail(self, error: BaseException) -> None:
        raise AssertionError("lb failed") from error

    def info(self, event: str, *, count: int, detail: str) -> None:
        assert detail
        self.lines.append((event, count))
        self.told.set()


class Inside(speech_pb2_grpc.SpeechServicer):
    """Behind the door; keeps the prompts that came through."""

    def __init__(self) -> None:
        self.prompts: list[bytes] = []

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.prompts.append(request.prompt)
        finished = speech_pb2.Finished(reason=speech_pb2.FINISH_REASON_STOP)
        await context.write(speech_pb2.GenerateResponse(finished=finished))

    async def GetUnit(self, request: Any, context: Any) -> Any:
        return speech_pb2.GetUnitResponse()

    async def Drain(self, request: Any, context: Any) -> Any:
        return speech_pb2.DrainResponse()


@dataclass
class Place:
    lb: Lb
    door: Door
    inside: Inside
    channel: grpc.aio.Channel

    @property
    def receiving(self) -> dict[Any, None]:
        return self.door._receiving

    async def until_receiving(self, count: int) -> None:
        async def received() -> bool:
            return len(self.receiving) == count

        await until(received, f"{count} requests are half-sent")

    async def until_ended(self, *reasons: Reason) -> None:
        """A refusal is counted when it is out."""

        async def ended() -> bool:
            return self.lb.ended == [*reasons]

        await until(ended, f"{reasons} are counted")

    async def call(self, message: bytes) -> list[bytes]:
        """Generate with these bytes for a request.

        Raises:
            GenerateError: what the client library makes of the refusal.
        """
        calling: Any = self.channel.unary_stream(GENERATE)(message, timeout=20)  # type: ignore[arg-type, unused-ignore]
        try:
            return [response async for response in calling]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@asynccontextmanager
async def standing(run_dir: Path) -> AsyncIterator[Place]:
    lb, inside = Lb(), Inside()
    as_executor: Any = lb
    made = Door(as_executor)
    health = Health([])
    fatal: list[BaseException] = []
    server = create_server(public_server_options(), health, fatal.append, [made])
    speech_pb2_grpc.add_SpeechServicer_to_server(inside, server)
    address = f"unix:{run_dir}/lb.sock"
    options = [("grpc.default_authority", "localhost")]
    async with (
        running_server(server, [address], health, ["duplet.speech.v1.Speech"], 5),
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        yield Place(lb, made, inside, channel)
    made.close()
    assert fatal == []


def request(prompt_bytes: int = 12) -> bytes:
    return speech_pb2.GenerateRequest(prompt=bytes(prompt_bytes)).SerializeToString()


@pytest.mark.parametrize(
    "message",
    [request(), request(LONG_PROMPT_BYTES), b"", b"\xff no message"],
    ids=["short", "long", "empty", "junk"],
)
async def test_a_full_unit_says_so_whatever_was_sent(message: bytes, run_dir: Path) -> None:
    async with standing(run_dir) as place:
        with pytest.raises(GenerateError) as caught:
            await place.call(message)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.reason == Reason.OVERLOADED
        assert caught.value.retry_after_s
        assert place.inside.prompts == []
        assert place.lb.ended == [Reason.OVERLOADED]


async def test_who_has_not_sent_its_prompt_yet_is_refused_as_well(run_dir: Path) -> None:
    """Nothing of a request is waited for, however long its prompt is and slow its client."""
    async with standing(run_dir) as place:
        call: Any = place.channel.stream_stream(GENERATE)()
        async with asyncio.timeout(3):
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert place.lb.ended == [Reason.OVERLOADED]


async def test_who_asks_for_something_else_or_later_comes_in(run_dir: Path) -> None:
    async with standing(run_dir) as place:
        stub = speech_pb2_grpc.SpeechStub(place.channel)
        await stub.GetUnit(speech_pb2.GetUnitRequest(), timeout=20)
        with pytest.raises(GenerateError):
            await place.call(request())
        place.lb.full = False
        assert len(await place.call(request(LONG_PROMPT_BYTES))) == 1
        assert place.inside.prompts == [bytes(LONG_PROMPT_BYTES)]


async def test_long_prompts_that_nobody_reads_do_not_stop_their_connection(run_dir: Path) -> None:
    """A connection has room for so many unread bytes; those of refused calls must not count."""
    async with standing(run_dir) as place:
        calls = [place.call(request(LONG_PROMPT_BYTES // 10)) for _ in range(AT_ONCE)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [getattr(end, "reason", end) for end in ends] == [Reason.OVERLOADED] * AT_ONCE
        place.lb.full = False
        assert len(await place.call(request(LONG_PROMPT_BYTES))) == 1


async def begin_sending(place: Place) -> Any:
    """A call with its first half on the way: nobody has the whole of it."""
    before = len(place.receiving)
    call: Any = place.channel.stream_stream(GENERATE)()
    await place.until_receiving(before + 1)
    return call


def half_request() -> bytes:
    """A connection's first bytes (RFC 9113), and those of a call that says it has more to send."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return (
            struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
        )

    def literal(name: str, value: str) -> bytes:
        return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))

    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", GENERATE),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
    settings = frame(4, 0, 0, b"")
    call = frame(1, 4, 1, b"".join(literal(*header) for header in headers))
    message = frame(0, 0, 1, b"\0" + struct.pack(">I", 1_000_000) + bytes(1000))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + call + message


async def test_who_does_not_send_its_whole_prompt_in_time_is_let_go(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "RECEIVE_S", 0.05)
    async with standing(run_dir) as place:
        place.lb.full = False
        call: Any = place.channel.stream_stream(GENERATE)()
        async with asyncio.timeout(20):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "not here whole: it has 0.05 s" in await call.details()
        await place.until_ended(Reason.DEADLINE)


async def test_who_leaves_half_way_is_no_error_and_no_bad_request(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with standing(run_dir) as place:
        place.lb.full = False
        cancelled = await begin_sending(place)
        cancelled.cancel()
        await place.until_receiving(0)
        _, connection = await asyncio.open_unix_connection(run_dir / "lb.sock")
        connection.write(half_request())
        await place.until_receiving(1)
        connection.close()
        await connection.wait_closed()
        await place.until_receiving(0)
        assert len(await place.call(request())) == 1
        assert place.lb.ended == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_who_sends_nothing_is_told_so(run_dir: Path) -> None:
    async with standing(run_dir) as place:
        place.lb.full = False
        call: Any = place.channel.stream_stream(GENERATE)()
        await call.done_writing()
        async with asyncio.timeout(20):
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "no request was sent" in await call.details()
        await place.until_ended(Reason.INVALID_REQUEST)


async def test_of_too_many_that_are_half_sent_the_oldest_is_let_go(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sends at once comes in however many do not."""
    monkeypatch.setattr(door, "MOST_RECEIVING", 2)
    async with standing(run_dir) as place:
        place.lb.full = False
        oldest, newer = [await begin_sending(place) for _ in range(2)]
        assert len(await place.call(request())) == 1
        async with asyncio.timeout(20):
            assert await oldest.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not newer.done()
        await place.until_ended(Reason.DEADLINE)


async def test_refusals_share_a_line_of_log(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "TELL_AFTER_S", 3600.0)
    async with standing(run_dir) as place:
        calls = [place.call(request()) for _ in range(7)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert place.lb.lines == []
        place.door.close()
        assert place.lb.lines == [("requests refused", 7)]
        place.lb.told.clear()
        monkeypatch.setattr(door, "TELL_AFTER_S", 0.0)
        with pytest.raises(GenerateError):
            await place.call(request())
        await asyncio.wait_for(place.lb.told.wait(), 20)
    assert place.lb.lines[1:] == [("requests refused", 1)], "closing twice tells nothing twice"
