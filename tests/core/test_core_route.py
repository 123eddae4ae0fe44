"""How KV goes, and which ends kvproxy withholds, reaches everyone who is asked for it, whatever the
order in which pools come."""

from __future__ import annotations

import pytest

from duplet_core.effects import CopyResult, LifelineUp, SetHealth
from duplet_core.ids import InstanceId, Role
from duplet_core.messages import Abort, Hello, Route
from duplet_core.writer_state import WriterConfig
from tests.core.drivers import DecodeDriver, WriterDriver
from tests.core.samples import (
    DECODE1,
    PREFILL1,
    T1,
    T2,
    credits_sent,
    first_move,
    grant,
    pick,
    routes_sent,
    sent,
)

CONFIG = WriterConfig()
PATH = "shm: CPU pools"


def test_a_writer_tells_decode_a_route_that_its_hello_could_not_know() -> None:
    writer = WriterDriver(connected=False)
    writer.machine.transport = "allowed: shm"
    (said,) = sent(writer.connect(Role.DECODE), Role.DECODE)
    assert isinstance(said, Hello) and said.transport == "allowed: shm"
    up = LifelineUp(Role.PREFILL, PREFILL1, 16, 4, PATH)
    assert routes_sent(writer.feed(up)) == [Route(PATH)]
    again = LifelineUp(Role.PREFILL, InstanceId("e" * 32), 16, 4, PATH)
    assert routes_sent(writer.feed(again)) == [], "nothing has changed"


def test_a_route_that_is_known_before_decode_comes_stands_in_its_hello() -> None:
    writer = WriterDriver(connected=False)
    writer.connect(Role.PREFILL)
    assert routes_sent(writer.feed(LifelineUp(Role.DECODE, DECODE1, 16, 4, PATH))) == []
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


def test_a_writer_tells_decode_how_many_ends_it_withholds_also_on_a_new_stream() -> None:
    writer = WriterDriver()
    for transfer in (T1, T2):
        writer.hear(Role.DECODE, grant(transfer))
        writer.hear(Role.PREFILL, first_move(transfer))
        writer.hear(Role.DECODE, Abort(transfer))
    assert routes_sent(writer.end_copy(CopyResult.UNKNOWN)) == [Route("", 1)]
    late = writer.tick(CONFIG.withheld_after_ns)
    assert routes_sent(late) == [Route("", 2)], "a copy that takes too long withholds, too"
    writer.lose(Role.DECODE)
    assert routes_sent(writer.connect(Role.DECODE)) == [Route("", 2)]
    assert routes_sent(writer.end_copy()) == [Route("", 1)], "the late one came"


def test_decode_passes_on_what_is_withheld_until_the_writer_is_lost() -> None:
    decode = DecodeDriver()
    (credit,) = credits_sent(decode.hear(Role.KVPROXY, Route(PATH, 2)))
    assert (credit.census.transport, credit.census.ends_withheld) == (PATH, 2)
    (credit,) = credits_sent(decode.hear(Role.KVPROXY, Route(PATH, 1)))
    assert credit.census.ends_withheld == 1
    assert credits_sent(decode.lose(Role.KVPROXY))[-1].census.ends_withheld == 0
