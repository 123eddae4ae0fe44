"""What one client may not do to the others: limits that all requests share."""

from __future__ import annotations

from duplet_core import engine
from duplet_core.effects import Ended, ToEngineEffect
from duplet_core.errors import Reason
from duplet_core.front_state import FrontConfig
from duplet_core.ids import RequestKey, Role, TransferId
from duplet_core.messages import End
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_state import PrefillConfig
from duplet_core.prefix import Match
from duplet_pages.prefix import RadixIndex
from tests.core.drivers import FrontDriver, PrefillDriver
from tests.core.samples import LB1, PREFILL1, T1, last_chunk, pick, prefill, submit


def test_what_the_engine_has_at_once_is_bounded_and_the_rest_ends_for_nothing() -> None:
    driver = PrefillDriver(PrefillConfig(pages=64, page_rows=4, spec="spec", open_limit=2))
    transfers = [TransferId(f"{n:032x}") for n in range(5)]
    effects = []
    for n, transfer in enumerate(transfers):
        effects += driver.hear(Role.LB, prefill(f"r{n}", transfer))
    assert [type(e.message) for e in pick(effects, ToEngineEffect)] == [engine.Start] * 2
    assert (
        pick(driver.hear(Role.LB, End("r2", transfers[2], Reason.CANCELLED)), ToEngineEffect) == []
    )
    (start,) = pick(driver.say(last_chunk(1)), ToEngineEffect)
    assert isinstance(start.message, engine.Start)
    assert RequestKey(LB1, "r3") in driver.machine.jobs.by_key


def test_a_mismatch_forgets_what_is_cached() -> None:
    index = RadixIndex(page_rows=4, columns=1)
    machine = PrefillMachine(PREFILL1, PrefillConfig(pages=8, page_rows=4, spec="spec"), index)
    pages = machine.jobs.pages
    prompt = bytes(16) + b"1234" * 4
    held = pages.hold(T1, 2)
    assert held is not None
    index.begin(T1, prompt, held)
    for page in index.computed(T1, (b"a" * 16, b"b" * 16)):
        pages.retain(page)
    pages.release(T1)
    assert index.match(prompt, 2).pages == held
    machine.jobs.forget_prefixes()
    assert index.match(prompt, 2) == Match()
    assert pages.free == 8
    pages.check()


def test_a_unit_without_a_queue_still_takes_what_fits() -> None:
    lb = FrontDriver(FrontConfig(queue_limit=0))
    assert pick(lb.feed(submit()), Ended) == []
