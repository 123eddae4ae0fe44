from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from duplet_core.engine import (
    ChunkDone,
    EngineMessage,
    FromEngine,
    Ready,
    SeqFailed,
    Shutdown,
    Start,
    StepDone,
    Stop,
    Stopped,
    ToEngine,
    Verified,
    Verify,
)
from duplet_core.ids import TransferId
from duplet_core.messages import Sampling
from duplet_runtime import async_link
from duplet_runtime.async_link import AsyncLink, LinkOverflow
from duplet_runtime.engine_link import (
    BlockingLink,
    LinkBroken,
    LinkClosed,
    encode_frame,
    read_from_engine,
)
from tests.descriptors import open_fds

TRANSFER = TransferId("ab" * 16)
SAMPLING = Sampling(seed=2**63, temperature=0.7, top_p=0.9, top_k=30, repetition_window=16)
LONG_START = Start(7, tuple(range(2000)), os.urandom(1_000_000), 32, 0, SAMPLING)
DIGESTS = tuple(os.urandom(16) for _ in range(5000))
SAMPLES: tuple[EngineMessage, ...] = (
    LONG_START,
    Verify(7, TRANSFER, (1, 2), 30, DIGESTS),
    Stop(7),
    Shutdown(),
    Ready("{}", "{}", 10, 16, 8),
    ChunkDone(7, 256, DIGESTS, None, False, 1, 2),
    Verified(7, TRANSFER, True, ""),
    StepDone(3, (7, 8), b"\x00" * 88, ((7, True),), 1, 2),
    Stopped(7, None),
    SeqFailed(7, "no"),
)
TO_ENGINE = [message for message in SAMPLES if isinstance(message, ToEngine)]
FROM_ENGINE = [message for message in SAMPLES if isinstance(message, FromEngine)]


class Ends(typing.NamedTuple):
    near: socket.socket
    engine: BlockingLink


@pytest.fixture
def ends() -> Iterator[Ends]:
    near, far = socket.socketpair()
    engine = BlockingLink(far)
    yield Ends(near, engine)
    engine.close()
    near.close()


def raise_it() -> None:
    raise AssertionError("closed")


def test_samples_cover_the_closed_list() -> None:
    assert {type(message) for message in SAMPLES} == set(typing.get_args(EngineMessage))


async def test_every_message_arrives_as_it_was(ends: Ends, record: Callable[[], Any]) -> None:
    arrived = record()
    link = AsyncLink(ends.near, arrived.take, raise_it)
    for message in TO_ENGINE:
        link.send(message)
    got: list[ToEngine] = []

    def engine() -> None:
        while len(got) < len(TO_ENGINE):
            got.extend(ends.engine.wait())
        for message in FROM_ENGINE:
            ends.engine.send(message)

    thread = threading.Thread(target=engine)
    thread.start()
    await arrived.until(lambda r: len(r) == len(FROM_ENGINE))
    thread.join()
    assert got == TO_ENGINE
    assert list(arrived) == [(message, ()) for message in FROM_ENGINE]
    link.close()


async def test_descriptors_stay_with_their_message(ends: Ends, record: Callable[[], Any]) -> None:
    before = open_fds()
    arrived = record()
    link = AsyncLink(ends.near, arrived.take, raise_it)
    read_end, write_end = os.pipe()
    ends.engine.send(SeqFailed(1, "x" * 1000))
    ends.engine.send(Ready("{}", "{}", 1, 16, 1), [write_end])
    ends.engine.send(Stopped(1, None))
    ends.engine.send(Ready("{}", "{}", 2, 16, 1), [read_end, write_end])
    await arrived.until(lambda r: len(r) == 4)
    assert [len(fds) for _, fds in arrived] == [0, 1, 0, 2]
    received = [fd for _, fds in arrived for fd in fds]
    assert not any(os.get_inheritable(fd) for fd in received)
    os.write(received[0], b"through")
    assert os.read(received[1], 100) == b"through"
    for fd in (*received, read_end, write_end):
        os.close(fd)
    link.close()
    assert open_fds() < before  # the link owns and closes its socket


def test_poll_never_blocks_and_end_comes_last(ends: Ends) -> None:
    assert ends.engine.poll() == []
    ends.near.sendall(encode_frame(Stop(1)) + encode_frame(Stop(2))[:5])
    assert ends.engine.poll() == [Stop(1)]
    ends.near.sendall(encode_frame(Stop(2))[5:] + encode_frame(Stop(3)))
    ends.near.close()
    assert ends.engine.wait() == [Stop(2), Stop(3)]
    with pytest.raises(LinkClosed):
        ends.engine.poll()
    with pytest.raises(LinkClosed):
        ends.engine.wait()
    with pytest.raises(LinkClosed):
        ends.engine.send(Stopped(1, None))


async def test_end_of_the_engine_is_told_once(ends: Ends, record: Callable[[], Any]) -> None:
    told = record()
    link = AsyncLink(ends.near, told.take, lambda: told.take("closed"))
    ends.engine.send(Stopped(1, None))
    ends.engine.close()
    await told.until(lambda r: len(r) == 2)
    assert list(told) == [(Stopped(1, None), ()), "closed"]
    link.send(Stop(1))
    link.close()
    assert len(told) == 2


def send_many(link: AsyncLink) -> None:
    for _ in range(10):
        link.send(LONG_START)


async def test_send_does_not_wait_and_is_bounded(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_link, "OUTBOX_BYTES", 3_000_000)
    link = AsyncLink(ends.near, lambda *_: None, raise_it)
    for _ in range(2):
        link.send(LONG_START)
    with pytest.raises(LinkOverflow):
        send_many(link)
    link.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff" * 6,
        encode_frame(Stopped(1, None)),
        encode_frame(Stop(1))[:-1] + b"\xc1",
        encode_frame(Stop(1), fd_count=1),
    ],
)
def test_junk_is_broken(ends: Ends, junk: bytes) -> None:
    ends.near.sendall(junk)
    with pytest.raises(LinkBroken):
        ends.engine.poll()


def test_engine_takes_no_descriptors(ends: Ends) -> None:
    before = open_fds()
    socket.send_fds(ends.near, [encode_frame(Stop(1))[:3]], [0])
    assert ends.engine.poll() == []
    ends.engine.close()
    assert open_fds() < before


def test_message_beyond_the_limit() -> None:
    with pytest.raises(LinkBroken, match="too long"):
        encode_frame(SeqFailed(1, "x" * (9 << 20)))
    header = encode_frame(Stopped(1, None))[:6]
    with pytest.raises(LinkBroken):
        read_from_engine().feed(b"\xff\xff\xff\x7f" + header[4:], [])


def test_engine_process_stays_light() -> None:
    code = (
        "import sys, duplet_runtime.engine_link, duplet_runtime.fate\n"
        "assert not {'asyncio', 'grpc', 'structlog'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
