"""How KV goes reaches everyone who is asked for it, whatever the order in which pools come."""

from __future__ import annotations

import pytest

from duplet_core.effects import LifelineUp, SetHealth
from duplet_core.ids import InstanceId, Role
from duplet_core.messages import Hello, Route
from tests.core.drivers import DecodeDriver, WriterDriver
from tests.core.samples import DECODE1, PREFILL1, credits_sent, pick, sent

PATH = "shm: CPU pools"


def test_a_writer_tells_decode_a_route_that_its_hello_could_not_know() -> None:
    writer = WriterDriver(connected=False)
    writer.machine.transport = "allowed: shm"
    (said,) = sent(writer.connect(Role.DECODE), Role.DECODE)
    assert isinstance(said, Hello) and said.transport == "allowed: shm"
    up = LifelineUp(Role.PREFILL, PREFILL1, 16, 4, PATH)
    assert sent(writer.feed(up), Role.DECODE) == [Route(PATH)]
    again = LifelineUp(Role.PREFILL, InstanceId("e" * 32), 16, 4, PATH)
    assert sent(writer.feed(again), Role.DECODE) == [], "nothing has changed"


def test_a_route_that_is_known_before_decode_comes_stands_in_its_hello() -> None:
    writer = WriterDriver(connected=False)
    writer.connect(Role.PREFILL)
    assert sent(writer.feed(LifelineUp(Role.DECODE, DECODE1, 16, 4, PATH)), Role.DECODE) == []
    (said,) = sent(writer.connect(Role.DECODE), Role.DECODE)
    assert isinstance(said, Hello) and said.transport == PATH


@pytest.mark.parametrize("route", ["", PATH])
def test_decode_passes_the_route_on_until_the_writer_is_lost(route: str) -> None:
    decode = DecodeDriver()
    effects = decode.hear(Role.KVPROXY, Route(route))
    told = credits_sent(effects)
    assert [credit.census.transport for credit in told] == ([route] if route else [])
    (health,) = pick(effects, SetHealth)
    assert health.name == "peer.kvproxy" and health.ok
    assert health.detail.endswith(route)
    (said,) = [m for m in sent(decode.connect(Role.LB), Role.LB) if isinstance(m, Hello)]
    assert said.credit is not None and said.credit.census.transport == route
    effects = decode.lose(Role.KVPROXY)
    told = credits_sent(effects)
    assert told[-1].census.transport == ""
