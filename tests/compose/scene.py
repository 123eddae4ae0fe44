"""What all steps of the compose test share: a unit that serves, and what right rows are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from duplet_client import AsyncClient
from duplet_pages.spec import ModelSpec
from tests.compose.composed_unit import ComposedUnit
from tests.e2e.streams import (
    Ask,
    Load,
    Stream,
    assert_prefix,
    assert_same,
    known_spec,
    read_all,
)

ASKS = [Ask(seed, max_rows=60) for seed in range(300, 308)]
SHORT_ASKS = [replace(ask, max_rows=2) for ask in ASKS]
"""Little else than transfers: with as many clients there is always one under way."""
LONG_TEXT = "The train from the other side of the river stops at every village, number"
LONG_ASKS = [
    [Ask(seed, LONG_TEXT, max_rows=250) for seed in range(k, k + 12)] for k in (400, 412, 424)
]
"""One batch after the other."""
LONG_ROWS = 100
LONG_AT_LEAST = 4
LONG_AT_MOST = 8
"""At once; half of decode's slots, so that nobody who asks again finds none."""


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Say what was done and how long it took."""
    began = time.monotonic()
    yield
    say(f"ok    {name}: {time.monotonic() - began:.1f} s")


@dataclass(frozen=True, slots=True)
class Scene:
    """A unit that serves, and what an undisturbed run gave."""

    unit: ComposedUnit
    spec: ModelSpec
    reference: list[Stream]
    """Of ASKS."""
    short: list[Stream]
    """Of SHORT_ASKS."""
    long: list[Stream]
    """Of those of LONG_ASKS that have many rows; LONG_AT_LEAST to LONG_AT_MOST of them."""


async def make_scene(unit: ComposedUnit) -> Scene:
    """Read every reference, while nobody else asks."""
    async with AsyncClient(unit.address) as client:
        spec = await known_spec(client)
        reference, short = [await read_all(client, spec, asks) for asks in (ASKS, SHORT_ASKS)]
        batches = [await read_all(client, spec, asks) for asks in LONG_ASKS]
    long = [s for batch in batches for s in batch if s.count >= LONG_ROWS]
    assert len(long) >= LONG_AT_LEAST, f"only {len(long)} streams are long"
    return Scene(unit, spec, reference, short, long[:LONG_AT_MOST])


async def check_rows(scene: Scene, unit: ComposedUnit) -> None:
    """The unit gives the reference's rows, without an error."""
    async with AsyncClient(unit.address) as client:
        for stream, right in zip(
            await read_all(client, scene.spec, ASKS), scene.reference, strict=True
        ):
            assert_same(stream, right)


def check_streams(references: list[Stream], load: Load) -> Counter[str]:
    """Every row is right, also those before an error; returns the errors' reasons."""
    errors: Counter[str] = Counter()
    for reference, done in zip(references, load.done, strict=True):
        for stream in done:
            if stream.error is None:
                assert_same(stream, reference)
            else:
                assert_prefix(stream, reference)
                errors[stream.error.reason or stream.error.code.name] += 1
    return errors
