"""Streams that come while steps run: how many steps they wait, and what no order may allow.

The GPU, the I/O process and the time between them are made up. Time goes on by a tick when the
loop looks at its messages, and while it waits for the GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplet_core.engine import (
    FromEngine,
    Shutdown,
    Start,
    StepDone,
    Stop,
    Stopped,
    ToEngine,
    Verified,
    Verify,
)
from duplet_core.ids import TransferId
from duplet_engine.gpu_loop import run_normal, run_overlap
from duplet_engine.tiny import TINY
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import PLAIN, MadeUpBatch

RUNS = [(run_normal, 0), (run_overlap, 1)]
STEP_TICKS = 20
"""Of a step, where they are all alike."""
ANSWER_TICKS = 2
"""From Verified to the Start that answers it."""
SHORT = 1
"""A digest beside which a step is long."""


def token(seq: int, number: int) -> int:
    return 512 + (seq * 37 + number * 5) % 200


@dataclass(frozen=True)
class Work:
    """Something that the GPU does for some seqs."""

    seqs: tuple[int, ...]
    numbers: tuple[int, ...]
    launched: int
    done: int


class World:
    """A GPU whose steps run one after the other and whose digests run beside them, an I/O
    process that answers Verified, and the ticks between. Engine and link of one loop."""

    def __init__(self, draw: random.Random, step_ticks: int = 0, digest_ticks: int = 0) -> None:
        """`step_ticks`, `digest_ticks`: of every step and digest; 0: drawn for each."""
        self.config = EngineConfig("decode", model="tiny", pool_pages=256)
        self.model_config = TINY
        self.tick = 0
        self.agenda: list[tuple[int, ToEngine]] = []
        self.sent: list[tuple[int, FromEngine]] = []
        self.steps: list[Work] = []
        self.digests: list[Work] = []
        self.given: dict[int, int] = {}
        """When each seq's Start came to the loop."""
        self.lengths: dict[int, int] = {}
        self.wrong: set[int] = set()
        """Seqs whose KV is not what was sent."""
        self.slow_digests: dict[int, int] = {}
        """Ticks of the digests of some seqs."""
        self._stopped: set[int] = set()
        self._draw = draw
        self._step_ticks = step_ticks
        self._digest_ticks = digest_ticks

    def land(self, at: int, seq: int, max_rows: int, *, right: bool = True) -> None:
        """KV of a page of `seq`, whose number it has, lands."""
        self.lengths[seq] = max_rows
        if not right:
            self.wrong.add(seq)
        digest = bytes([seq if right else 255]) * 16
        verify = Verify(seq, TransferId("ab" * 16), (seq,), 10, (digest,))
        self.agenda.append((at, verify))

    # --- the GPU ----------------------------------------------------------------------

    def new_batch(self) -> MadeUpBatch:
        return MadeUpBatch()

    def launch_step(self, batch: MadeUpBatch) -> Work:
        for seq in batch.rows:
            batch.rows[seq] += 1
        begin = max([self.tick, *(work.done for work in self.steps[-1:])])
        ticks = self._step_ticks or self._draw.choice([1, 3, 20])
        numbers = tuple(batch.rows.values())
        self.steps.append(Work(batch.seqs, numbers, self.tick, begin + ticks))
        return self.steps[-1]

    def step_done(self, flight: Work) -> bool:
        return flight.done <= self.tick

    def read_step(self, flight: Work) -> tuple[Tensor, Tensor]:
        self.tick = max(self.tick, flight.done)
        rows = torch.zeros((len(flight.seqs), TINY.columns), dtype=torch.int32)
        for index, (seq, number) in enumerate(zip(flight.seqs, flight.numbers, strict=True)):
            rows[index, 0] = token(seq, number)
        return rows, torch.zeros(len(flight.seqs), dtype=torch.bool)

    def launch_digests(self, pages: Sequence[int], valid_rows: Sequence[int]) -> Work:
        ticks = self._digest_ticks or self._draw.choice([1, 5, 70])
        ticks = self.slow_digests.get(pages[0], ticks)
        self.digests.append(Work(tuple(pages), (), self.tick, self.tick + ticks))
        return self.digests[-1]

    def digests_done(self, flight: Work) -> bool:
        return flight.done <= self.tick

    def read_digests(self, flight: Work) -> tuple[bytes, ...]:
        self.tick = max(self.tick, flight.done)
        return tuple(bytes([page]) * 16 for page in flight.seqs)

    # --- the link ---------------------------------------------------------------------

    def poll(self) -> list[ToEngine]:
        self.tick += 1
        due = sorted((item for item in self.agenda if item[0] <= self.tick), key=lambda i: i[0])
        self.agenda = [item for item in self.agenda if item[0] > self.tick]
        messages: list[ToEngine] = []
        for _, message in due:
            if isinstance(message, Stop):
                self._stopped.add(message.seq)
            elif isinstance(message, Start):
                if message.seq in self._stopped:
                    continue
                self.given[message.seq] = self.tick
            messages.append(message)
        return messages

    def wait(self) -> list[ToEngine]:
        if not self.agenda:
            return [Shutdown()]
        self.tick = max(self.tick, min(at for at, _ in self.agenda))
        return self.poll()

    def send(self, message: FromEngine, fds: Sequence[int] = ()) -> None:
        assert not fds
        self.sent.append((self.tick, message))
        if isinstance(message, Verified):
            seq, at = message.seq, self.tick + ANSWER_TICKS
            row = np.zeros(TINY.columns, "<i4").tobytes()
            start = Start(seq, (seq,), row, 10, self.lengths[seq], replace(PLAIN, seed=seq))
            self.agenda.append((at, start if message.ok else Stop(seq)))

    # --- what came of it ----------------------------------------------------------------

    def when(self, kind: type, seq: int) -> list[int]:
        """Ticks at which messages of `kind` told of `seq`."""
        found = []
        for tick, message in self.sent:
            named = message.seqs if isinstance(message, StepDone) else (message.seq,)  # type: ignore[union-attr]
            if isinstance(message, kind) and seq in named:
                found.append(tick)
        return found

    def rows(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for _, message in self.sent:
            if isinstance(message, StepDone):
                tokens = np.frombuffer(message.rows, "<i4").reshape(-1, TINY.columns)[:, 0]
                for seq, drawn in zip(message.seqs, tokens.tolist(), strict=True):
                    found.setdefault(seq, []).append(drawn)
        return found


@pytest.mark.parametrize("landed", range(200, 200 + STEP_TICKS))
@pytest.mark.parametrize(("run_loop", "ahead"), RUNS)
def test_newcomer_is_in_the_next_step_that_is_launched(
    run_loop: Any, ahead: int, landed: int
) -> None:
    """Wherever in a step its KV lands. Its first row comes with the end of the step that runs,
    of those that are launched by then, and of its own; one more where the step ends before
    check and Start are through."""
    world = World(random.Random(1), STEP_TICKS, SHORT)
    world.land(0, 1, 60)
    world.land(landed, 2, 5)
    run_loop(world, world)
    (verified,) = world.when(Verified, 2)
    assert verified <= landed + SHORT + 1, "it is told in the turn after the digests are done"
    launched = next(work for work in world.steps if 2 in work.seqs)
    passed_over = [w for w in world.steps if world.given[2] <= w.launched < launched.launched]
    assert passed_over == []
    first_row = world.when(StepDone, 2)[0]
    ends = [work.done for work in world.steps if landed < work.done <= first_row]
    boundary_passed = ends[0] <= world.given[2]
    assert len(ends) <= ahead + 2 + boundary_passed


@pytest.mark.parametrize(("run_loop", "ahead"), RUNS)
def test_a_check_holds_up_no_start(run_loop: Any, ahead: int) -> None:
    """Also where nothing steps yet."""
    world = World(random.Random(1), STEP_TICKS, SHORT)
    world.land(10, 1, 5)
    world.land(10, 2, 5)
    world.slow_digests[2] = 500
    run_loop(world, world)
    assert world.steps[0].launched == world.given[1] < 20
    assert {seq: len(drawn) for seq, drawn in world.rows().items()} == {1: 4, 2: 4}


@pytest.mark.parametrize(("run_loop", "ahead"), RUNS)
def test_gpu_never_waits_for_a_loop_that_looks(run_loop: Any, ahead: int) -> None:
    """With overlap a step follows the other at once, also while others come and checks run."""
    world = World(random.Random(1), STEP_TICKS, 3 * STEP_TICKS)
    world.land(0, 1, 100)
    for seq in range(2, 8):
        world.land(150 + seq * 47, seq, 7)
    run_loop(world, world)
    assert len(world.rows()) == 7
    idle = [
        b.done - STEP_TICKS - a.done for a, b in zip(world.steps, world.steps[1:], strict=False)
    ]
    if ahead:
        assert max(idle) == 0
    else:
        assert 0 < max(idle) <= 2, "a turn to read, a turn to launch"


def make_world(seed: int, *, stops: bool) -> World:
    """Forty requests, some of whose KV is wrong and, with `stops`, some that are stopped. In every
    other world KV is checked again at the end."""
    draw = random.Random(seed)
    world = World(draw)
    world.config = replace(world.config, recheck_at_end=bool(seed % 2))
    for seq in range(1, 41):
        at = draw.randrange(600)
        world.land(at, seq, draw.choice([1, 2, 9, 60]), right=draw.random() > 0.15)
        if stops and draw.random() < 0.3:
            world.agenda.append((at + draw.randrange(200), Stop(seq)))
    return world


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("run_loop", "ahead"), RUNS)
def test_no_step_before_its_check_and_no_stopped_before_its_work(
    run_loop: Any, ahead: int, seed: int
) -> None:
    world = make_world(seed, stops=True)
    run_loop(world, world)
    assert world.wrong, "no wrong KV in this world"
    assert not {seq for work in world.steps for seq in work.seqs} & world.wrong
    for seq in range(1, 41):
        told = [t for t, m in world.sent if m == Verified(seq, TransferId("ab" * 16), True, "")]
        work = [w for w in world.steps + world.digests if seq in w.seqs]
        steps = [w for w in world.steps if seq in w.seqs]
        (stopped,) = world.when(Stopped, seq)
        assert all(w.done <= stopped for w in work), "its pages are free while the GPU uses them"
        checks = [w for w in world.digests if seq in w.seqs]
        assert len(checks) == 1 + bool(told and seed % 2)
        if steps:
            assert told, "steps read KV that nobody called right"
            assert min(w.launched for w in steps) > told[0]
            assert all(w.launched >= steps[-1].done for w in checks[1:]), "rows are still written"
    for seq, drawn in world.rows().items():
        assert drawn == [token(seq, number + 1) for number in range(len(drawn))]


@pytest.mark.parametrize("seed", range(20))
def test_both_variants_give_the_same_rows(seed: int) -> None:
    rows = []
    for run_loop, _ in RUNS:
        world = make_world(seed, stops=False)
        run_loop(world, world)
        rows.append(world.rows())
        wanted = {s: n for s, n in world.lengths.items() if s not in world.wrong and n > 1}
        assert {seq: len(drawn) + 1 for seq, drawn in rows[-1].items()} == wanted
    assert rows[0] == rows[1]
