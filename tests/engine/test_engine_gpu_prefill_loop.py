"""Prefill's loop on a GPU, over an engine that is made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from duplet_core.chunks import ChunkPart
from duplet_core.engine import ChunkDone, SeqFailed, Shutdown, Start, Stop, Stopped, ToEngine
from duplet_core.errors import InvariantError
from duplet_engine.gpu_prefill_loop import PartDone, PassDone, PassLoop, run_prefill
from duplet_engine.sequences import PrefillSequence
from duplet_engine.tiny import TINY
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import PLAIN, FakeLink

CONFIG = EngineConfig("prefill", model="tiny", pool_pages=64, chunk_rows=64)


@dataclass
class MadeUpEngine:
    """Draws token `seq` after a prompt. Notes its calls."""

    broken: set[int] = field(default_factory=set)
    config: EngineConfig = CONFIG
    model_config = TINY

    def __post_init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[int, int, int]]]] = []

    def launch_pass(self, parts: Sequence[tuple[PrefillSequence, ChunkPart]]) -> Any:
        for sequence, part in parts:
            assert sequence.start.seq == part.seq
        named = [part for _, part in parts]
        self.calls.append(("launch", [(p.seq, p.first, p.count) for p in named]))
        return named

    def read_pass(self, flight: Any) -> PassDone:
        self.calls.append(("read", [(p.seq, p.first, p.count) for p in flight]))
        parts = []
        for part in flight:
            row = torch.zeros(TINY.columns, dtype=torch.int32)
            row[0] = part.seq
            pages = -(-part.count // 16)
            parts.append(
                PartDone(
                    (b"d" * 16,) * pages, row if part.last else None, part.seq not in self.broken
                )
            )
        return PassDone(tuple(parts), 5, 6)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def start(seq: int, rows: int, start_row: int = 0) -> Start:
    prompt = np.zeros((rows, TINY.columns), "<i4").tobytes()
    return Start(seq, tuple(range(-(-rows // 16))), prompt, start_row, 0, PLAIN)


def run(engine: MadeUpEngine, *inbox: list[ToEngine]) -> FakeLink:
    link = FakeLink()
    link.inbox = [list(messages) for messages in inbox]
    run_prefill(engine, link)
    return link


def chunks(link: FakeLink) -> list[tuple[int, int, bool]]:
    return [(m.seq, m.rows, m.first_row is not None) for m in link.sent if isinstance(m, ChunkDone)]


def test_prompts_share_passes() -> None:
    engine = MadeUpEngine()
    link = run(engine, [start(1, 100), start(2, 60, 48)], *[[] for _ in range(6)])
    assert engine.calls[0] == ("launch", [(1, 0, 48), (2, 48, 12)])
    assert chunks(link) == [(1, 48, False), (2, 60, True), (1, 100, True)]
    assert not [m for m in link.sent if not isinstance(m, ChunkDone)]


def test_what_a_chunk_tells() -> None:
    link = run(MadeUpEngine(), [start(TINY.stop_id, 20)], [], [])
    (done,) = link.sent
    assert isinstance(done, ChunkDone)
    assert done.digests == (b"d" * 16,) * 2
    assert done.stopped
    assert done.first_row is not None
    assert np.frombuffer(done.first_row, "<i4")[0] == TINY.stop_id
    assert 0 < done.started_ns <= done.done_ns
    assert (done.computed_ns, done.drawn_ns) == (5, 6)


def test_overlap_launches_before_it_reads() -> None:
    engine = MadeUpEngine()
    run(engine, [start(1, 180)], *[[] for _ in range(6)])
    assert engine.names == ["launch", "launch", "read", "launch", "read", "read"]
    normal = MadeUpEngine(config=replace(CONFIG, overlap=False))
    run(normal, [start(1, 180)], *[[] for _ in range(6)])
    assert normal.names == ["launch", "read"] * 3


def test_a_prompt_that_arrives_during_a_pass_is_in_the_next() -> None:
    engine = MadeUpEngine()
    run(engine, [start(1, 180)], [start(2, 20)], *[[] for _ in range(6)])
    launches = [{seq for seq, _, _ in parts} for name, parts in engine.calls if name == "launch"]
    assert launches[:2] == [{1}, {1, 2}]


def test_stopped_waits_for_the_pass_that_names_its_pages() -> None:
    engine, link = MadeUpEngine(), FakeLink()
    loop = PassLoop(engine, link, ahead=1)
    loop.handle(start(1, 180))
    loop.step()
    loop.step()
    sent = len(link.sent)
    loop.handle(Stop(1))
    loop.handle(Stop(1))
    loop.handle(Stop(7))
    assert len(link.sent) == sent
    loop.step()
    assert link.sent[sent:] == [Stopped(1, None)]
    assert not loop.busy


def test_stopped_waits_for_the_last_of_the_passes_that_run() -> None:
    """The oldest names its pages, too, and is read first."""
    engine, link = MadeUpEngine(), FakeLink()
    loop = PassLoop(engine, link, ahead=2)
    loop.handle(start(1, 400))
    loop.handle(start(2, 400))
    loop.step()
    loop.step()
    named = [{seq for seq, _, _ in parts} for name, parts in engine.calls if name == "launch"]
    assert named == [{1}, {1}]
    loop.handle(Stop(1))
    loop.step()
    assert engine.names[-1] == "read"
    assert Stopped(1, None) not in link.sent, "a pass still writes there"
    loop.step()
    assert link.sent.count(Stopped(1, None)) == 1


def test_a_prompt_that_waits_is_stopped_at_once() -> None:
    engine, link = MadeUpEngine(), FakeLink()
    loop = PassLoop(engine, link, ahead=1)
    loop.handle(start(1, 180))
    loop.handle(Stop(1))
    assert link.sent == [Stopped(1, None)]
    assert not loop.busy


def test_a_last_chunk_that_crossed_a_stop_is_not_told() -> None:
    engine, link = MadeUpEngine(), FakeLink()
    loop = PassLoop(engine, link, ahead=2)
    loop.handle(start(1, 20))
    loop.handle(start(2, 200))
    loop.step()
    loop.handle(Stop(1))
    loop.step()
    loop.step()
    assert [m for m in link.sent if m.seq == 1] == [Stopped(1, None)]  # type: ignore[union-attr]


def test_numbers_that_are_not_finite_end_their_prompt_alone() -> None:
    engine = MadeUpEngine(broken={1})
    link = run(engine, [start(1, 300), start(2, 100)], *[[] for _ in range(9)])
    about = [m for m in link.sent if getattr(m, "seq", 0) == 1]
    assert isinstance(about[0], SeqFailed)
    assert about[0].detail == "the model gave no finite numbers in rows 0 to 32"
    assert about[1:] == [Stopped(1, None)]
    assert chunks(link)[-1] == (2, 100, True)


def test_a_start_that_is_wrong_fails_alone() -> None:
    link = run(MadeUpEngine(), [start(1, 20, 3)], [], [Shutdown()])
    assert isinstance(link.sent[0], SeqFailed)
    assert link.sent[1:] == [Stopped(1, None)]


def test_a_seq_is_started_once() -> None:
    loop = PassLoop(MadeUpEngine(), FakeLink(), ahead=1)
    loop.handle(start(1, 20))
    with pytest.raises(InvariantError, match="started twice"):
        loop.handle(start(1, 20))
