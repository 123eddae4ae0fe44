"""The GPU's decode loop over a made-up engine: what it sends, and when a seq's pages are quiet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplet_core.engine import (
    SeqFailed,
    Shutdown,
    Start,
    StepDone,
    Stop,
    Stopped,
    ToEngine,
    Verified,
    Verify,
)
from duplet_core.errors import InvariantError
from duplet_core.ids import TransferId
from duplet_engine.gpu_loop import StepLoop, run_normal, run_overlap
from duplet_engine.tiny import TINY
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import PLAIN, FakeLink, MadeUpBatch

TRANSFER = TransferId("cd" * 16)
RUNS = [run_normal, run_overlap]


@dataclass
class MadeUpFlight:
    """A step that is done when somebody asks for the second time."""

    seqs: tuple[int, ...]
    numbers: list[int]
    asked: int = 0


@dataclass
class MadeUpEngine:
    """Row n of seq s is `512 + (s * 7 + n) % 100`, or what `special` says. Notes its calls."""

    special: dict[tuple[int, int], int]
    """Tokens by (seq, number of the row); -1 for a row without numbers."""
    digests_are_done: bool = True

    def __post_init__(self) -> None:
        self.config = EngineConfig("decode", model="tiny", pool_pages=64, recheck_at_end=True)
        self.model_config = TINY
        self.calls: list[tuple[str, Any]] = []
        self.link: FakeLink
        self.digests = [bytes([n]) * 16 for n in range(64)]

    def new_batch(self) -> MadeUpBatch:
        return MadeUpBatch()

    def launch_step(self, batch: MadeUpBatch) -> MadeUpFlight:
        seqs = batch.seqs
        numbers = []
        for seq in seqs:
            batch.rows[seq] += 1
            numbers.append(batch.rows[seq])
        self.calls.append(("launch", seqs))
        return MadeUpFlight(seqs, numbers)

    def step_done(self, flight: MadeUpFlight) -> bool:
        flight.asked += 1
        return flight.asked > 1

    def read_step(self, flight: MadeUpFlight) -> tuple[Tensor, Tensor]:
        seqs, numbers = flight.seqs, flight.numbers
        self.calls.append(("read", seqs))
        tokens = [
            self.special.get((seq, number), 512 + (seq * 7 + number) % 100)
            for seq, number in zip(seqs, numbers, strict=True)
        ]
        rows = torch.zeros((len(seqs), TINY.columns), dtype=torch.int32)
        rows[:, 0] = torch.tensor(tokens)
        return rows, rows[:, 0] < 0

    def launch_digests(self, pages: Sequence[int], valid_rows: Sequence[int]) -> Any:
        stopped = {m.seq for m in self.link.sent if isinstance(m, Stopped)}
        self.calls.append(("digest", stopped))
        assert list(valid_rows) == [16, 4]
        return tuple(self.digests[page] for page in pages)

    def digests_done(self, flight: Any) -> bool:
        return self.digests_are_done

    def read_digests(self, flight: Any) -> tuple[bytes, ...]:
        digests: tuple[bytes, ...] = flight
        return digests


def start(seq: int, max_rows: int) -> Start:
    row = np.zeros(TINY.columns, "<i4").tobytes()
    return Start(seq, tuple(range(4)), row, 20, max_rows, replace(PLAIN, seed=seq))


def verify(engine: MadeUpEngine, seq: int) -> Verify:
    return Verify(seq, TRANSFER, (3, 4), 20, (engine.digests[3], engine.digests[4]))


def run(run_loop: Any, engine: MadeUpEngine, *inbox: list[ToEngine]) -> FakeLink:
    link = FakeLink()
    link.inbox = [list(messages) for messages in inbox]
    engine.link = link
    run_loop(engine, link)
    return link


def sent_rows(link: FakeLink) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for message in link.sent:
        if isinstance(message, StepDone):
            tokens = np.frombuffer(message.rows, "<i4").reshape(-1, TINY.columns)[:, 0]
            for seq, token in zip(message.seqs, tokens.tolist(), strict=True):
                found.setdefault(seq, []).append(token)
    return found


def sent_ends(link: FakeLink) -> list[tuple[int, bool]]:
    return [end for m in link.sent if isinstance(m, StepDone) for end in m.ends]


@pytest.mark.parametrize("run_loop", RUNS)
def test_rows_and_ends(run_loop: Any) -> None:
    """Limit, stop row, a row without numbers and a limit of one; later joins."""
    special = {(2, 3): TINY.stop_id, (3, 2): -1}
    engine = MadeUpEngine(special)
    first: list[ToEngine] = [start(1, 6), start(2, 9), start(4, 1)]
    link = run(run_loop, engine, first, [], [start(3, 9), start(5, 2)], *[[] for _ in range(9)])
    assert sent_rows(link) == {
        1: [512 + (7 + n) % 100 for n in range(1, 6)],
        2: [512 + (14 + n) % 100 for n in range(1, 3)],
        3: [512 + 22],
        5: [512 + 36],
    }
    assert sorted(sent_ends(link)) == [(1, False), (2, True), (4, False), (5, False)]
    assert [m.seq for m in link.sent if isinstance(m, SeqFailed)] == [3]
    assert sorted(m.seq for m in link.sent if isinstance(m, Stopped)) == [1, 2, 3, 4, 5]
    assert not any(m.seqs == () and not m.ends for m in link.sent if isinstance(m, StepDone))


def test_overlap_launches_before_it_reads() -> None:
    engine = MadeUpEngine({})
    run(run_overlap, engine, [start(1, 5)], *[[] for _ in range(8)])
    names = [name for name, _ in engine.calls]
    assert names == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]
    normal = MadeUpEngine({})
    run(run_normal, normal, [start(1, 5)], *[[] for _ in range(8)])
    assert [name for name, _ in normal.calls] == ["launch", "read"] * 4


def test_stopped_waits_for_the_last_launched_step() -> None:
    """Seq 1 stops in step 0, which is read when step 1, too, names its pages."""
    engine = MadeUpEngine({(1, 1): TINY.stop_id})
    link = FakeLink()
    engine.link = link
    loop = StepLoop(engine, link, ahead=1)
    for seq in (1, 2):
        loop.handle(start(seq, 50))
    loop.step()
    loop.step()
    assert engine.calls == [("launch", (1, 2)), ("launch", (1, 2)), ("read", (1, 2))]
    assert sent_ends(link) == [(1, True)]
    assert not [m for m in link.sent if isinstance(m, Stopped)], "step 1 still writes there"
    loop.step()
    assert [m.seq for m in link.sent if isinstance(m, Stopped)] == [1]
    assert engine.calls[-2] == ("launch", (2,)), "no later step names it"
    assert 1 not in sent_rows(link), "the row that step 1 drew for it is dropped"


def test_stop_in_flight_waits_and_sends_no_more_rows() -> None:
    engine = MadeUpEngine({})
    link = FakeLink()
    engine.link = link
    loop = StepLoop(engine, link, ahead=1)
    loop.handle(start(1, 50))
    loop.step()
    loop.handle(Stop(1))
    loop.handle(Stop(1))
    loop.handle(Stop(7))
    assert link.sent == []
    loop.step()
    assert [m.seq for m in link.sent if isinstance(m, Stopped)] == [1]
    assert sent_rows(link) == {}
    assert not loop.busy


def test_a_seq_may_come_back_only_after_stopped() -> None:
    engine = MadeUpEngine({})
    link = FakeLink()
    engine.link = link
    loop = StepLoop(engine, link, ahead=1)
    loop.handle(start(1, 50))
    loop.step()
    loop.handle(Stop(1))
    with pytest.raises(InvariantError, match="started twice"):
        loop.handle(start(1, 5))


def test_shutdown_reads_what_is_in_flight() -> None:
    engine = MadeUpEngine({})
    run(run_overlap, engine, [start(1, 50)], [], [Shutdown()])
    names = [name for name, _ in engine.calls]
    assert names.count("launch") == names.count("read")


@pytest.mark.parametrize("run_loop", RUNS)
def test_kv_is_checked_at_both_ends(run_loop: Any) -> None:
    engine = MadeUpEngine({})
    link = run(run_loop, engine, [verify(engine, 1)], [start(1, 3)], *[[] for _ in range(5)])
    assert link.sent[0] == Verified(1, TRANSFER, ok=True, detail="")
    assert link.sent[-1] == Stopped(1, kv_ok=True)
    assert [at for name, at in engine.calls if name == "digest"] == [set(), set()]


def test_wrong_kv_is_named_and_never_started() -> None:
    engine = MadeUpEngine({})
    wrong = replace(verify(engine, 1), digests=(engine.digests[3], engine.digests[5]))
    link = FakeLink()
    engine.link = link
    loop = StepLoop(engine, link, ahead=1)
    loop.handle(wrong)
    loop.step()
    message = link.sent[0]
    assert isinstance(message, Verified)
    assert not message.ok
    assert message.detail.startswith("page 4 (page 1 of 2 of the prompt): digest 0404")
    with pytest.raises(InvariantError, match="started on wrong KV"):
        loop.handle(start(1, 3))


def test_too_few_digests_are_a_mismatch() -> None:
    engine = MadeUpEngine({})
    loop = StepLoop(engine, link := FakeLink(), ahead=1)
    loop.handle(replace(verify(engine, 1), digests=(engine.digests[3],)))
    message = link.sent[0]
    assert isinstance(message, Verified)
    assert not message.ok
    assert message.detail == "1 digests for 20 rows of 16 a page"


def test_steps_go_on_beside_a_check() -> None:
    engine = MadeUpEngine({}, digests_are_done=False)
    engine.link = link = FakeLink()
    loop = StepLoop(engine, link, ahead=1)
    loop.handle(start(1, 50))
    loop.handle(verify(engine, 2))
    for _ in range(3):
        loop.step()
    assert not [m for m in link.sent if isinstance(m, Verified)]
    assert sent_rows(link)[1], "rows went out"
    with pytest.raises(InvariantError, match="before its KV is checked"):
        loop.handle(start(2, 50))
    engine.digests_are_done = True
    loop.step()
    assert [m for m in link.sent if isinstance(m, Verified)] == [
        Verified(2, TRANSFER, ok=True, detail="")
    ]


def test_a_check_is_waited_for_when_nothing_steps() -> None:
    engine = MadeUpEngine({}, digests_are_done=False)
    engine.link = link = FakeLink()
    loop = StepLoop(engine, link, ahead=1)
    loop.handle(verify(engine, 1))
    assert loop.busy
    loop.step()
    assert link.sent == [Verified(1, TRANSFER, ok=True, detail="")]
    assert not loop.busy


def test_stopped_waits_for_the_check_that_reads_its_pages() -> None:
    engine = MadeUpEngine({}, digests_are_done=False)
    engine.link = link = FakeLink()
    loop = StepLoop(engine, link, ahead=1)
    loop.handle(start(1, 50))
    loop.handle(verify(engine, 2))
    loop.handle(Stop(2))
    loop.step()
    loop.step()
    assert not [m for m in link.sent if isinstance(m, Verified | Stopped)]
    engine.digests_are_done = True
    loop.step()
    assert [m for m in link.sent if isinstance(m, Verified | Stopped)] == [Stopped(2, None)]


def test_the_check_at_the_end_is_begun_once_and_waited_for() -> None:
    engine = MadeUpEngine({})
    engine.link = link = FakeLink()
    loop = StepLoop(engine, link, ahead=1)
    loop.handle(verify(engine, 1))
    loop.step()
    loop.handle(start(1, 2))
    loop.handle(start(2, 50))
    engine.digests_are_done = False
    for _ in range(4):
        loop.step()
    assert [name for name, _ in engine.calls].count("digest") == 2
    assert not [m for m in link.sent if isinstance(m, Stopped)]
    engine.digests_are_done = True
    loop.step()
    assert [m for m in link.sent if isinstance(m, Stopped)] == [Stopped(1, kv_ok=True)]
