"""A unit that has served nobody yet knows what its steps take, and takes at once what fits."""

from __future__ import annotations

from duplet_client import AsyncClient
from duplet_core.step_guard import FIRST_STREAMS
from tests.e2e.live_unit import live_unit
from tests.e2e.streams import Ask, known_spec, read_all

LISTENERS = 3 * FIRST_STREAMS
SETTINGS = {
    "DUPLET_DECODE_SLOTS": str(LISTENERS),
    # Steps of so many streams keep it on any machine, and the guard watches them.
    "DUPLET_DECODE_FLOOR_ROWS_PER_S": "0.5",
    # Who is not admitted at once is refused, before a step could have said anything.
    "DUPLET_LB_QUEUE_WAIT_MS": "0",
}


async def test_its_first_listeners_come_all_at_once_and_none_is_refused() -> None:
    async with live_unit(SETTINGS) as unit, AsyncClient(unit.listen) as client:
        spec = await known_spec(client)
        streams = await read_all(
            client, spec, [Ask(seed, max_rows=40) for seed in range(LISTENERS)]
        )
        assert [stream.error for stream in streams] == [None] * LISTENERS
        assert all(stream.count for stream in streams)
