from __future__ import annotations

import asyncio

import pytest

from duplet_core.errors import InvariantError
from duplet_runtime.machine import MachineDriver


class Echo:
    """Answers an event of n with effects n and n + 1, up to 3; a timer when told."""

    def __init__(self) -> None:
        self.due: int | None = None

    def receive(self, event: int, now_ns: int) -> list[str]:
        if event < 0:
            raise InvariantError("negative")
        return [f"{event}a", f"{event}b"]

    def handle_timer(self, now_ns: int) -> list[str]:
        if self.due is None or now_ns < self.due:
            return []
        self.due = None
        return ["timer"]

    def next_timer(self) -> int | None:
        return self.due


async def test_effects_of_one_event_come_before_the_next_event() -> None:
    done: list[str] = []

    def execute(effect: str) -> None:
        done.append(effect)
        if effect in ("0a", "1a"):
            driver.feed(int(effect[0]) + 1)

    driver: MachineDriver[int, str] = MachineDriver(Echo(), execute)
    driver.feed(0)
    assert done == ["0a", "0b", "1a", "1b", "2a", "2b"]


async def test_timer_fires_and_is_rearmed() -> None:
    machine = Echo()
    fired = asyncio.Event()
    now = 0

    def execute(effect: str) -> None:
        if effect == "timer":
            fired.set()

    driver: MachineDriver[int, str] = MachineDriver(machine, execute, clock=lambda: now)
    machine.due = 10**15
    driver.feed(0)
    now = machine.due = 5
    driver.feed(0)
    await fired.wait()
    assert machine.due is None


async def test_early_timer_is_armed_again() -> None:
    machine = Echo()
    fired = asyncio.Event()
    times = iter([0, 0, 9_000_000, 9_000_000])
    driver: MachineDriver[int, str] = MachineDriver(
        machine, lambda effect: fired.set(), clock=lambda: next(times, 10_000_000)
    )
    driver.close()
    driver.feed(0)
    fired.clear()

    driver = MachineDriver(machine, lambda _: fired.set(), clock=lambda: next(times, 10_000_000))
    machine.due = 10_000_000
    driver._run(timer=True)
    assert not fired.is_set()
    await fired.wait()


async def test_closed_driver_does_not_wake() -> None:
    machine = Echo()
    driver: MachineDriver[int, str] = MachineDriver(machine, lambda _: None)
    machine.due = 0
    driver.feed(0)
    driver.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert machine.due == 0


async def test_machine_that_raised_is_never_called_again() -> None:
    done: list[str] = []
    driver: MachineDriver[int, str] = MachineDriver(Echo(), done.append)
    with pytest.raises(InvariantError, match="negative"):
        driver.feed(-1)
    with pytest.raises(InvariantError, match="unknown"):
        driver.feed(1)
    assert done == []


async def test_events_without_end_are_a_bug() -> None:
    def execute(effect: str) -> None:
        for _ in range(2):
            driver.feed(0)

    driver: MachineDriver[int, str] = MachineDriver(Echo(), execute)
    with pytest.raises(InvariantError, match="without end"):
        driver.feed(0)
