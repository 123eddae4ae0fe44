"""lb's machine when it is full: who waits, who is told at once, and what the door goes by."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplet_core.effects import Drain
from duplet_core.errors import Reason
from duplet_core.front_state import FrontConfig
from duplet_core.ids import Role, TransferId
from duplet_core.messages import Credit
from tests.core.drivers import FrontDriver
from tests.core.samples import T1, T2, T3, T4, admitted, ended, submit

REFUSING = (Reason.DRAINING, Reason.QUARANTINE, Reason.WRITER_LOST)


def test_after_a_wait_in_vain_nobody_waits_until_somebody_was_admitted() -> None:
    front = FrontDriver(FrontConfig(queue_wait_ns=500))
    front.hear(Role.DECODE, Credit(16, 16, 0, 0))
    front.feed(submit("a", T1))
    assert not front.machine.full
    front.tick(500)
    assert front.machine.full
    assert ended(front.feed(submit("b", T2))) == [(T2, Reason.OVERLOADED)]
    front.hear(Role.DECODE, Credit(16, 16, 1, 0))
    assert not front.machine.full
    assert admitted(front.feed(submit("c", T3))) == [T3]
    assert ended(front.feed(submit("d", T4))) == [], "it waits again"
    assert front.machine.queued == 1


@pytest.mark.parametrize("why", REFUSING)
def test_who_waited_while_decode_refused_waited_for_something_else(why: Reason) -> None:
    """Decode may take requests again at any moment, however many waits it has outlasted."""
    front = FrontDriver(FrontConfig(queue_wait_ns=500))
    front.hear(Role.DECODE, Credit(16, 16, 4, 0, why))
    front.feed(submit("a", T1))
    front.tick(500)
    assert not front.machine.full
    assert ended(front.feed(submit("b", T2))) == []


@given(
    queue_limit=st.integers(0, 2),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 6)),
            st.tuples(st.just("credit"), st.integers(0, 6), st.integers(0, 2)),
            st.tuples(st.just("refusing"), st.sampled_from([None, *REFUSING])),
            st.tuples(st.just("tick"), st.sampled_from([1, 250, 500])),
            st.tuples(st.just("drain")),
        ),
        max_size=14,
    ),
)
def test_full_is_what_the_smallest_request_would_hear(
    queue_limit: int, events: list[tuple[Any, ...]]
) -> None:
    """lb refuses by it before it looks at a request: one that is not full must say nothing."""
    front = FrontDriver(FrontConfig(queue_limit=queue_limit, queue_wait_ns=500))
    pages, slots, refusing, admits = 16, 4, None, 0
    for number, (kind, *values) in enumerate(events):
        if kind == "submit":
            effects = front.feed(submit(f"r{number}", TransferId(f"t{number}"), pages=values[0]))
            admits += len(admitted(effects))
        elif kind == "tick":
            admits += len(admitted(front.tick(values[0])))
        elif kind == "drain":
            front.feed(Drain())
        else:
            pages, slots = values if kind == "credit" else (pages, slots)
            refusing = values[0] if kind == "refusing" else refusing
            told = Credit(16, pages, slots, admits, refusing)
            admits += len(admitted(front.hear(Role.DECODE, told)))
    was_full = front.machine.full
    told_ends = ended(front.feed(submit("probe", T1, pages=1)))
    assert was_full == (told_ends == [(T1, Reason.OVERLOADED)])
