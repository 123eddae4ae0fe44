"""One condition and form of the KV movement bench: `python -m bench.kv_move_run idle|busy|mps
page-major|layer-major|launches`.

Three processes: two owners of pools, each seeing one GPU, and this one, which sees both and
moves. Every case is checked row for row, then timed in turns with one contiguous copy of the
same bytes and nothing else. A time is from the checked request to the event that synchronised.
Prints one JSON object a line: case, value, unit. `….ratio` is the case's median over that of the
contiguous copy in turns with it.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.kv_move_unit import OwnerProcess, start_pair
from duplet_kvproxy.gpu_queue import Flight, GpuEvent, GpuQueue, queue_copies, queue_copy
from duplet_kvproxy.head_start import HEAD_PAGES, start_checked
from duplet_kvproxy.move_direct import DirectMover
from duplet_kvproxy.transport import GPU_TRANSPORTS, WHOLE_PAGES, GpuTransport, TransportName
from duplet_kvproxy.trial import build_transport
from duplet_memory.cuda_driver import open_devices
from duplet_memory.plan import RowCopy, check_copy, plan_pages, plan_ranges

ROWS = 2048
TURNS = 40
WARM_TURNS = 10
VARIANTS = 8
"""Different random pages, in rotation."""
REQUESTS_PER_S = 20
REQUEST_ROWS = 1500
SLOWDOWN_S = 2.5

Move = Callable[[int], Any]
"""Starts turn n and returns what can be waited for."""


def say(case: str, value: float, unit: str) -> None:
    print(json.dumps({"case": case, "value": round(value, 5), "unit": unit}), flush=True)


class Bench:
    """A pair of owners and this process's queues."""

    def __init__(self, condition: str, arrangement: str, page_rows: int, pages: int) -> None:
        self.condition = condition
        self.source, self.dest = start_pair("cumem-fd", arrangement, page_rows, pages)
        devices = open_devices()
        self.at, self.to = devices[0], devices[-1]
        self._queue = GpuQueue(self.at)
        self._event = GpuEvent(self.at)
        self.random = np.random.default_rng(11)

    def load(self, on: bool) -> None:
        """Both engines' own work, where the condition has it."""
        busy = on and self.condition != "idle"
        self.source.ask(do="load", kind="matmul" if busy else "")
        self.dest.ask(do="load", kind="sum" if busy else "")

    def pages(self, owner: OwnerProcess, rows: int) -> tuple[int, ...]:
        """A tuple, as core gives them to the mover."""
        d = owner.description
        count = -(-rows // d.page_rows)
        return tuple(self.random.permutation(d.pages)[:count].tolist())

    def mover(
        self,
        transport: GpuTransport,
        rows: int,
        lists: Any = None,
        head_pages: int = HEAD_PAGES,
    ) -> Move:
        """Move random pages, or those of `lists`, by a transport, as kvproxy does."""
        a, b = self.source, self.dest
        source: Any = a.pool
        dest: Any = b.pool
        variants = lists or [(self.pages(a, rows), self.pages(b, rows)) for _ in range(VARIANTS)]

        def start(turn: int) -> Any:
            from_pages, to_pages = variants[turn % len(variants)]
            pages = (from_pages, dest, to_pages)
            return start_checked(transport, source, *pages, 0, rows, head_pages)[0]

        return start

    def raw(self, plan: Callable[[RowCopy], Any], rows: int, batched: bool) -> Move:
        """The same bytes by the driver alone: one batch of ranges, or a copy a range."""
        a, b = self.source, self.dest
        pages = self.pages(a, rows), self.pages(b, rows)
        copy = check_copy(a.description, pages[0], b.description, pages[1], 0, rows)
        ranges = plan(copy).ranges
        assert a.pool is not None
        assert b.pool is not None
        from_address, to_address = a.pool.address(self.at), b.pool.address(self.at)

        def start(turn: int) -> Flight:
            if batched:
                queue_copies(self._queue, ranges, from_address, to_address)
            else:
                for source, dest, size in ranges.tolist():
                    queue_copy(self._queue, to_address + dest, from_address + source, size)
            return self._landed()

        return start

    def contiguous(self, rows: int) -> Move:
        """One copy of as many bytes, page-aligned at random places."""
        a, b = self.source.description, self.dest.description
        size = rows * a.slabs * a.row_bytes
        assert self.source.pool is not None
        assert self.dest.pool is not None
        source = self.source.pool.address(self.at) + a.offset
        dest = self.dest.pool.address(self.at) + b.offset
        room = a.pages * a.page_bytes - size
        places = (self.random.integers(0, room, (VARIANTS, 2)) // 4096 * 4096).tolist()

        def start(turn: int) -> Flight:
            from_place, to_place = places[turn % VARIANTS]
            queue_copy(self._queue, dest + to_place, source + from_place, size)
            return self._landed()

        return start

    def _landed(self) -> Flight:
        self._queue.record(self._event)
        return Flight(self._event, lambda: None)

    def check(
        self,
        name: str,
        transport: GpuTransport,
        rows: int,
        first: int = 0,
        head_pages: int = HEAD_PAGES,
    ) -> None:
        """Move once from and to random pages, and compare every row of the pool."""
        a, b = self.source, self.dest
        b.ask(do="fill", poison=True)
        from_pages, to_pages = self.pages(a, first + rows), self.pages(b, first + rows)
        source: Any = a.pool
        dest: Any = b.pool
        pages = (from_pages, dest, to_pages)
        start_checked(transport, source, *pages, first, rows, head_pages)[0].wait()
        wrong = b.ask(do="check", pages=to_pages, source_pages=from_pages, first=first, count=rows)
        if wrong:
            raise SystemExit(f"{name}: {wrong} rows are wrong")

    def close(self) -> None:
        self.source.close()
        self.dest.close()


def time_in_turns(moves: dict[str, Move], turns: int = TURNS) -> dict[str, list[float]]:
    """Milliseconds of every case, one of each a turn, so that all meet the same conditions."""
    times: dict[str, list[float]] = {name: [] for name in moves}
    for turn in range(WARM_TURNS + turns):
        for name, move in moves.items():
            start_ns = time.monotonic_ns()
            move(turn).wait()
            if turn >= WARM_TURNS:
                times[name].append((time.monotonic_ns() - start_ns) / 1e6)
    return times


def tell_ratios(label: str, condition: str, moves: dict[str, Move]) -> dict[str, float]:
    """Time each case in turns with the contiguous copy and nothing else, as one mover runs one
    transport. Say p50, p95 and ratio of each and p50 of all contiguous copies; returns the
    ratios, and that p50 in ms under "contiguous"."""
    contiguous = moves.pop("contiguous")
    ratios, floors = {}, []
    for name, move in moves.items():
        times = time_in_turns({"contiguous": contiguous, name: move})
        floor, p50 = (statistics.median(values) for values in times.values())
        floors.append(floor)
        ratios[name] = p50 / floor
        say(f"{label}.{name}.{condition}", p50, "ms")
        say(f"{label}.{name}.{condition}.p95", float(np.percentile(times[name], 95)), "ms")
        say(f"{label}.{name}.{condition}.ratio", p50 / floor, "ratio")
    ratios["contiguous"] = statistics.median(floors)
    say(f"{label}.contiguous.{condition}", ratios["contiguous"], "ms")
    return ratios


def run_page_major(condition: str) -> None:
    """Whole pages of 16 rows, digests, churn, small copies, and decode's step beside them."""
    bench = Bench(condition, "page-major", 16, 1024)
    movers = {n: build_transport(n, bench.at, bench.to) for n in GPU_TRANSPORTS}
    for name in GPU_TRANSPORTS:
        bench.check(name, movers[name], ROWS)
        if name not in WHOLE_PAGES:
            bench.check(name, movers[name], 1501, 5)
    bench.load(True)
    moves: dict[str, Move] = {"contiguous": bench.contiguous(ROWS)}
    moves |= {name: bench.mover(mover, ROWS) for name, mover in movers.items()}
    if condition == "busy":
        moves["one-copy-a-page"] = bench.raw(plan_pages, ROWS, batched=False)
        fresh, churned = churn(1024, ROWS // 16)
        moves["fresh"] = bench.mover(movers["pages"], ROWS, fresh)
        moves["churned"] = bench.mover(movers["pages"], ROWS, churned)
    ratios = tell_ratios("page-major-2048", condition, moves)
    if condition == "busy":
        tell_digests(bench, ratios)
        tell_slowdown(bench, movers["pages"])
    small: dict[str, Move] = {"contiguous": bench.contiguous(128)}
    small |= {name: bench.mover(mover, 128) for name, mover in movers.items()}
    tell_ratios("page-major-128", condition, small)
    bench.close()


def tell_digests(bench: Bench, ratios: dict[str, float]) -> None:
    """Digests in both owners behind their loads' steps, and what they add to a move of whole
    pages."""
    pages, to_pages = bench.pages(bench.source, ROWS), bench.pages(bench.dest, ROWS)
    copy = check_copy(bench.source.description, pages, bench.dest.description, to_pages, 0, ROWS)
    mover = build_transport("pages", bench.at, bench.to)
    assert bench.source.pool is not None
    assert bench.dest.pool is not None
    mover.start(copy, bench.source.pool, bench.dest.pool).wait()
    taken = bench.source.ask(do="digest", pages=pages, rows=ROWS, repeats=40)
    verified = bench.dest.ask(do="digest", pages=to_pages, rows=ROWS, repeats=40)
    if taken["digests"] != verified["digests"] or len(set(taken["digests"])) != len(pages):
        raise SystemExit("digests: taken and verified differ")
    last = bench.source.ask(do="digest", pages=pages[:16], rows=256, repeats=40)
    say("digest.taken-last-chunk.busy", last["time_ms"], "ms")
    say("digest.taken.busy", taken["time_ms"], "ms")
    say("digest.verified.busy", verified["time_ms"], "ms")
    floor = ratios["contiguous"]
    # Digests of earlier chunks are taken beside the next chunk's computation: only the last
    # chunk's is on the way.
    added = {"exposed": last["time_ms"] + verified["time_ms"]}
    added["one-after-the-other"] = taken["time_ms"] + verified["time_ms"]
    for name, ms in added.items():
        say(f"digest.{name}.busy.ratio", ratios["pages"] + ms / floor, "ratio")


def tell_slowdown(bench: Bench, pages: GpuTransport) -> None:
    """Decode's step with 20 requests/s of 1,500 rows arriving, against none, in turns."""
    move = bench.mover(pages, REQUEST_ROWS)
    steps: dict[bool, list[float]] = {False: [], True: []}
    for arriving in (False, True) * 2:
        bench.dest.ask(do="steps")
        until = time.monotonic() + SLOWDOWN_S
        turn = 0
        while time.monotonic() < until:
            if arriving:
                move(turn).wait()
                turn += 1
            time.sleep(1 / REQUESTS_PER_S)
        steps[arriving] += bench.dest.ask(do="steps")
    ratio = statistics.mean(steps[True]) / statistics.mean(steps[False])
    say("decode-step.with-over-without.busy", ratio, "ratio")


def churn(pages: int, count: int) -> tuple[Any, Any]:
    """Page lists of fresh pools and of pools after a day of 20 requests/s: each takes `count`
    pages from the end of a free list and gives them back when another, at random, ends."""
    chance = random.Random(3)
    fresh = list(range(count)), list(range(count))
    lists = []
    for _ in range(2):
        free: list[int] = list(range(pages))
        held: list[list[int]] = []
        for _ in range(86_400 * REQUESTS_PER_S):
            if len(free) < count + 32:
                free.extend(held.pop(chance.randrange(len(held))))
            size = chance.randrange(32, count)
            held.append(free[-size:])
            del free[-size:]
        while len(free) < count:
            free.extend(held.pop())
        lists.append(free)
    chance.shuffle(lists[0])
    return [fresh], [(lists[0][:count], lists[1][:count])]


def run_layer_major(condition: str) -> None:
    """Rows at random places of every layer: 147,456 fragments of 2 KiB."""
    bench = Bench(condition, "layer-major", 1, 16384)
    names: tuple[TransportName, ...] = ("push", "pull", "staged")
    movers = {n: build_transport(n, bench.at, bench.to) for n in names}
    for name in names:
        bench.check(name, movers[name], ROWS)
        bench.check(name, movers[name], 1501)
    bench.load(True)
    moves: dict[str, Move] = {"contiguous": bench.contiguous(ROWS)}
    moves |= {name: bench.mover(movers[name], ROWS) for name in names}
    tell_ratios("layer-major-2048", condition, moves)
    if condition == "idle":
        batch = bench.raw(plan_ranges, ROWS, batched=True)
        start_ns = time.monotonic_ns()
        batch(0).wait()
        elapsed_ms = (time.monotonic_ns() - start_ns) / 1e6
        say("layer-major-2048.batch-of-fragments.idle", elapsed_ms, "ms")
    bench.close()


def run_launches(condition: str) -> None:
    """The kernels of `push` and `pull` in fewer and in more programs, and `pull` with heads of
    some sizes and without, on a layer-major pool: what PROGRAMS_PER_SM of `move_direct` and
    HEAD_PAGES of `head_start` rest on."""
    bench = Bench(condition, "layer-major", 1, 16384)
    movers = {
        f"{name}-by-{programs}": DirectMover(name, bench.at, bench.to, programs)
        for name in ("push", "pull")
        for programs in (1, 2, 4, 8)
    }
    for name, mover in movers.items():
        bench.check(name, mover, ROWS)
    pull = DirectMover("pull", bench.at, bench.to)
    heads = {f"pull-head-{size}": size for size in (128, 256, 512)} | {"pull-no-head": ROWS}
    for name, size in heads.items():
        bench.check(name, pull, ROWS, head_pages=size)
    bench.load(True)
    moves: dict[str, Move] = {"contiguous": bench.contiguous(ROWS)}
    moves |= {name: bench.mover(mover, ROWS) for name, mover in movers.items()}
    moves |= {name: bench.mover(pull, ROWS, head_pages=size) for name, size in heads.items()}
    tell_ratios("launches", condition, moves)
    bench.close()


FORMS = {"page-major": run_page_major, "layer-major": run_layer_major, "launches": run_launches}


def main() -> int:
    condition, form = sys.argv[1:]
    FORMS[form](condition)
    return 0


if __name__ == "__main__":
    sys.exit(main())
