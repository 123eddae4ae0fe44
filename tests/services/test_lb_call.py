"""A client's call in lb: what is in each message, and what becomes of one that reads nothing."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplet_core.effects import Ended
from duplet_core.errors import Reason, Unavailable
from duplet_core.ids import TransferId
from duplet_core.messages import Finished
from duplet_lb.call import WRITE_MARGIN_NS, Call, Wish
from duplet_lb.meter import Meters, StreamMeter
from duplet_lb.times import CallTimes
from duplet_runtime.metrics import Metrics

T = TransferId("t")
ROW = 4
UNREAD = 8
WELL = Ended(T, None, "", Finished("r", T, True, 0, 0, ()))
SLOW = Ended(T, Reason.SLOW_READER)


def call(first_rows: int = 1, rows_per_message: int = 1, time_s: float = 60.0) -> Call:
    deadline_ns = time.monotonic_ns() + round(time_s * 1e9)
    wish = Wish(first_rows, rows_per_message)
    meter = StreamMeter(Meters(Metrics("lb")))
    made = Call(T, ROW, wish, UNREAD, deadline_ns, CallTimes(1), meter)
    made.started = True
    return made


def row(number: int) -> bytes:
    return number.to_bytes(ROW, "little")


class Context:
    """A gRPC context; `stuck`: its client reads nothing."""

    def __init__(self, *, stuck: bool = False) -> None:
        self.written: list[object] = []
        self.waiting = asyncio.Event()
        self._stuck = stuck

    async def write(self, response: object) -> None:
        if self._stuck:
            self.waiting.set()
            await asyncio.Event().wait()
        self.written.append(response)


@given(
    first=st.integers(1, 12),
    rest=st.integers(1, 12),
    arrivals=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12),
)
@settings(deadline=None)
def test_messages_have_exactly_the_rows_that_the_client_wants(
    first: int, rest: int, arrivals: list[tuple[int, bool]]
) -> None:
    """However rows arrive and however late the handler looks."""
    made = call(first, rest)
    count, sizes, got = 0, [], b""
    for rows, looks in [*arrivals, (0, True)]:
        for _ in range(rows):
            made.add_rows(row(count))
            count += 1
        if rows == 0:
            made.end(WELL)
        while looks and (taken := made.take_rows()) is not None:
            assert taken[0] == len(got) // ROW
            sizes.append(len(taken[1]) // ROW)
            got += taken[1]
    assert got == b"".join(row(n) for n in range(count))
    wanted = [first, *[rest] * len(sizes)][: len(sizes)]
    assert sizes[:-1] == wanted[:-1]
    assert not sizes or 1 <= sizes[-1] <= wanted[-1]


async def test_waiting_ends_with_the_first_whole_message() -> None:
    made = call(first_rows=2)
    waiting = asyncio.create_task(made.wait())
    made.add_rows(row(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    made.add_rows(row(1))
    await waiting
    assert made.take_rows() == (0, row(0) + row(1))


@pytest.mark.parametrize("first_rows", [1, 3, 500])
def test_unread_rows_count_beyond_the_next_message(first_rows: int) -> None:
    made = call(first_rows)
    for number in range(first_rows + UNREAD):
        assert made.add_rows(row(number)), "a client that wants many rows at once is not slow"
    assert not made.add_rows(row(0))


async def test_a_failure_cuts_a_stuck_write_short() -> None:
    made, context = call(), Context(stuck=True)
    writing = asyncio.create_task(made.write(context, "rows"))
    await context.waiting.wait()
    made.end(SLOW)
    await writing
    assert made.failed
    await made.write(context, "more")
    assert context.written == [], "nothing follows a failure but its status"


async def test_a_good_end_leaves_a_write_its_time_and_no_more() -> None:
    made, context = call(time_s=-WRITE_MARGIN_NS / 1e9), Context(stuck=True)
    made.end(WELL)
    with pytest.raises(Unavailable) as caught:
        await made.write(context, "rows")
    assert caught.value.reason is Reason.DEADLINE


async def test_a_client_that_reads_gets_its_message() -> None:
    made, context = call(), Context()
    await made.write(context, "rows")
    made.end(WELL)
    await made.write(context, "end")
    assert context.written == ["rows", "end"]


async def test_a_failure_while_the_write_expires_is_taken_without_harm() -> None:
    """The end comes after the write's timeout fired and before the writing task ran again."""
    one = call(time_s=-10.0)
    raised: list[BaseException] = []

    def end() -> None:
        try:
            one.end(SLOW)
        except RuntimeError as error:
            raised.append(error)

    class Expiring(Context):
        async def write(self, response: object) -> None:
            asyncio.get_running_loop().call_soon(end)  # right behind the timeout's own callback
            await super().write(response)

    await asyncio.gather(one.write(Expiring(stuck=True), "rows"), return_exceptions=True)
    assert one.failed
    assert raised == []
