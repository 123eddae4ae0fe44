"""The search for the most streams, the choice among chunks, and a whole small run."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from bench import capacity
from bench.capacity import (
    MONOLITH,
    UNIT,
    Limits,
    Mix,
    Point,
    System,
    best,
    chunked,
    find_all,
    pick_chunk,
)
from duplet_load.synth import Synth
from tests.bench.test_bench_runs import run_small

MIX = Mix("any", Synth())


def point(streams: int, carried: bool, ttfa_s: float = 0.1) -> Point:
    return Point(streams, carried, {"ttfa_s": {"p95": ttfa_s}})


@pytest.mark.parametrize("first", [1, 8, 20])
@pytest.mark.parametrize(("limit", "found"), [(0, None), (1, 1), (5, 5), (13, 13), (32, 32)])
async def test_the_search_ends_at_what_is_carried(
    monkeypatch: pytest.MonkeyPatch, limit: int, found: int | None, first: int
) -> None:
    asked: list[int] = []

    async def measure(name: str, address: str, mix: Mix, streams: int, limits: Limits) -> Point:
        asked.append(streams)
        return point(streams, streams <= limit)

    monkeypatch.setattr(capacity, "measure", measure)
    points = await capacity.search("any", "nowhere", MIX, Limits(0.5, 32, 1, 1, first))
    assert [p.streams for p in points] == sorted({p.streams for p in points})
    most = best(points)
    assert (None if most is None else most.streams) == found
    assert len(asked) <= 12
    assert max(asked) <= 32


async def test_each_monolith_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[str] = []
    told: dict[str, tuple[list[str], int]] = {}

    async def find(system: System, *others: object) -> dict[str, list[Point]]:
        at_once.append(system.name)
        await asyncio.sleep(0)  # whoever runs beside it begins
        gpus = others[-1]
        assert isinstance(gpus, list)
        told[system.name] = (gpus, len(at_once))
        at_once.remove(system.name)
        return {}

    monkeypatch.setattr(capacity, "find", find)
    systems = [UNIT, MONOLITH, chunked(32), chunked(64)]
    limits = Limits(0.5, 32, 1, 1)
    found = await find_all(systems, [MIX], limits, argparse.Namespace(gpu="0,1"))
    assert list(found) == systems
    assert told[UNIT.name] == (["0", "1"], 1)
    assert told[MONOLITH.name] == (["0"], 2)
    assert told[chunked(32).name][0] == ["1"]
    assert told[chunked(64).name] == (["0"], 1)
    told.clear()
    await find_all(systems, [MIX], limits, argparse.Namespace(gpu=""))
    assert all(who == ([], 1) for who in told.values())


def test_what_is_carried_above_a_failure_does_not_count() -> None:
    points = [point(1, True), point(2, False), point(4, True)]
    most = best(points)
    assert most is not None
    assert most.streams == 1
    assert best([point(1, False)]) is None


def test_the_tuned_chunk_carries_most_and_then_speaks_first() -> None:
    tried = {
        chunked(64): {"any": [point(8, True, 0.3)]},
        chunked(128): {"any": [point(9, True, 0.4)]},
        chunked(256): {"any": [point(9, True, 0.2)]},
        chunked(512): {"any": [point(1, False)]},
    }
    assert pick_chunk(tried, "any") == chunked(256)


def test_a_small_run_tells_every_system(tmp_path: Path) -> None:
    values = run_small("capacity", tmp_path)
    for system in (UNIT.name, MONOLITH.name, chunked(32).name):
        assert f"warm, smooth: {system}: streams carried" in values
    assert (tmp_path / "capacity.svg").stat().st_size > 5_000
