"""What a request held is given back once, whenever its client leaves: its place, its id, and what
prefill and decode have of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from duplet.speech.v1 import speech_pb2
from duplet_core.effects import Received, StreamOpened
from duplet_core.errors import Reason
from duplet_core.front import FrontMachine
from duplet_core.front_state import FrontConfig
from duplet_core.ids import Role
from duplet_core.messages import Accepted, Admit, Credit, End, Finished, Message
from duplet_lb.speech import LbExecutor, Speech
from duplet_runtime.health import Health
from tests.core.samples import LB1, NAMES, hello
from tests.services.plain_spec import SPEC

ROW = np.full(1, 7, "<i4").tobytes()
FREE, FULL = Credit(16, 16, 4, 0), Credit(16, 16, 0, 0)


class Peer:
    """lb's end of a stream; keeps what was said to the peer."""

    def __init__(self) -> None:
        self.said: list[Message] = []

    def send(self, stream: int, message: Message) -> None:
        self.said.append(message)


class Client:
    """A call's context: a client that reads everything, so nobody waits for it."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, metadata: Any) -> None: ...

    async def write(self, response: Any) -> None:
        self.got.append(response)


class Place:
    """lb from its handler to its machine, between a client and two peers."""

    def __init__(self, credit: Credit) -> None:
        service: Any = SimpleNamespace(
            settings=SimpleNamespace(role=Role.LB, longest_s=60.0, unread_rows=64),
            health=Health(["unit"]),
            log=SimpleNamespace(info=lambda *_, **__: None),
            fail=lambda error: pytest.fail(str(error)),
        )
        self.machine = FrontMachine(LB1, FrontConfig(queue_wait_ns=60 * 10**9))
        self.executor = LbExecutor(service, self.machine)
        self._speech = Speech(self.executor, service)
        self.peers = {role: Peer() for role in (Role.PREFILL, Role.DECODE)}
        self.executor._ends.update(self.peers)  # type: ignore[arg-type]
        self.client = Client()
        for role in self.peers:
            self.executor.feed(StreamOpened(role, 1))
            told = credit if role is Role.DECODE else None
            said = hello(role, NAMES[role], 1, to=LB1, spec=SPEC.to_json(), credit=told)
            self.executor.feed(Received(role, 1, said))

    def hear(self, message: Message) -> None:
        self.executor.feed(Received(Role.DECODE, 1, message))

    def call(self) -> asyncio.Task[None]:
        request = speech_pb2.GenerateRequest(request_id="a", prompt=3 * ROW, columns=1, max_rows=9)
        context: Any = self.client
        return asyncio.create_task(self._speech.Generate(request, context))

    async def settle(self) -> None:
        """Let the handler run until it waits."""
        for _ in range(10):
            await asyncio.sleep(0)

    def told(self, kind: type[Message]) -> dict[Role, list[Any]]:
        return {r: [m for m in p.said if isinstance(m, kind)] for r, p in self.peers.items()}


@pytest.mark.parametrize("when", ["queued", "admitted", "streaming", "finished"])
async def test_a_client_that_leaves_gives_back_what_it_held_once(when: str) -> None:
    place = Place(FULL if when == "queued" else FREE)
    handler = place.call()
    await place.settle()
    admits = place.told(Admit)[Role.DECODE]
    assert len(admits) == (when != "queued")
    if when in ("streaming", "finished"):
        place.hear(Accepted("a", admits[0].transfer, 5, ROW))
        await place.settle()
    if when == "finished":
        place.hear(Finished("a", admits[0].transfer, True, 1, 1, ()))
        await handler
    handler.cancel()
    await asyncio.gather(handler, return_exceptions=True)
    assert len(place.client.got) == {"streaming": 2, "finished": 3}.get(when, when == "admitted")
    machine, executor = place.machine, place.executor
    assert not machine.requests and not executor.calls
    assert machine.queued == machine.streaming == 0
    reason = None if when == "finished" else Reason.CANCELLED
    ends = [End("a", admit.transfer, reason) for admit in admits]
    assert place.told(End) == {Role.PREFILL: ends, Role.DECODE: ends}
    assert executor.outcomes == {"STOP" if when == "finished" else Reason.CANCELLED: 1}
    place.hear(Credit(16, 16, 4, len(admits)))
    again = place.call()
    await place.settle()
    assert len(place.told(Admit)[Role.DECODE]) == len(admits) + 1, "the id is free"
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    executor.driver.close()
