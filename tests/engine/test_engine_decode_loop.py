from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

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
from duplet_engine.decode_loop import run_decode
from duplet_engine.engine import Engine
from duplet_engine.tiny import TINY
from tests.engine.company import PLAIN, FakeLink, Request, random_prompt, run_alone
from tests.engine.conftest import MakeEngine

TRANSFER = TransferId("ab" * 16)


class Landed:
    """A request whose prompt lies in the engine's pool, as a transfer would leave it."""

    def __init__(
        self, engine: Engine, seq: int, rows: int, steps: int = 6, first_page: int = 0
    ) -> None:
        prompt = random_prompt(np.random.default_rng(seq), rows)
        self.request = Request(prompt, replace(PLAIN, seed=seq))
        self.seq = seq
        self.pages = tuple(range(first_page, first_page + -(-(rows + steps + 1) // 16)))
        self.prompt_pages = self.pages[: -(-rows // 16)]
        self.digests, self.rows = run_alone(engine, self.request, self.pages, steps)

    def verify(self) -> Verify:
        return Verify(self.seq, TRANSFER, self.prompt_pages, self.request.rows, self.digests)

    def start(self, max_rows: int) -> Start:
        first = torch.tensor(self.rows[0])
        return self.request.decode(self.seq, self.pages, first, max_rows)


def rows_by_seq(link: FakeLink) -> dict[int, list[list[int]]]:
    rows: dict[int, list[list[int]]] = {}
    for message in link.sent:
        if isinstance(message, StepDone):
            packed = np.frombuffer(message.rows, "<i4").reshape(-1, TINY.columns)
            for seq, row in zip(message.seqs, packed.tolist(), strict=True):
                rows.setdefault(seq, []).append(row)
    return rows


def run(engine: Engine, *inbox: list[ToEngine]) -> FakeLink:
    link = FakeLink()
    link.inbox = [list(messages) for messages in inbox]
    run_decode(engine, link)
    return link


def seqs_of(link: FakeLink, kind: type) -> list[int]:
    return [message.seq for message in link.sent if isinstance(message, kind)]  # type: ignore[union-attr]


def test_streams_go_to_their_limits(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second = Landed(engine, 1, 40), Landed(engine, 2, 50, first_page=10)
    assert all(row[0] != TINY.stop_id for row in first.rows[:5] + second.rows[:5])
    link = run(
        engine,
        [first.verify(), second.verify(), first.start(5)],
        [],
        [second.start(3)],
    )
    assert link.sent[:2] == [
        Verified(1, TRANSFER, ok=True, detail=""),
        Verified(2, TRANSFER, ok=True, detail=""),
    ]
    steps = [message for message in link.sent if isinstance(message, StepDone)]
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert [step.seqs for step in steps] == [(1,), (1,), (1, 2), (1, 2)]
    assert [step.ends for step in steps] == [(), (), (), ((1, False), (2, False))]
    assert all(step.started_ns <= step.done_ns for step in steps)
    assert rows_by_seq(link) == {1: first.rows[1:5], 2: second.rows[1:3]}
    assert link.sent[-2:] == [Stopped(1, kv_ok=None), Stopped(2, kv_ok=None)]


def test_a_stop_row_ends_the_stream_and_is_not_sent(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stopping = next(
        landed
        for landed in (Landed(engine, seq, 20, steps=60) for seq in range(1, 40))
        if any(row[0] == TINY.stop_id for row in landed.rows)
    )
    length = [row[0] for row in stopping.rows].index(TINY.stop_id)
    link = run(engine, [stopping.start(61)])
    assert rows_by_seq(link).get(stopping.seq, []) == stopping.rows[1:length]
    last, stopped = link.sent[-2:]
    assert isinstance(last, StepDone)
    assert (last.seqs, last.rows, last.ends) == ((), b"", ((stopping.seq, True),))
    assert stopped == Stopped(stopping.seq, kv_ok=None)


def test_one_row_needs_no_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    landed = Landed(engine, 1, 48)
    before = engine.pool.array.copy()
    start = replace(landed.start(1), pages=landed.pages[:3])
    link = run(engine, [landed.verify(), start])
    done = link.sent[1]
    assert isinstance(done, StepDone)
    assert (done.step, done.seqs, done.rows, done.ends) == (0, (), b"", ((1, False),))
    assert link.sent[2:] == [Stopped(1, kv_ok=None)]
    assert (engine.pool.array == before).all()


def test_a_wrong_page_is_named(make_engine: MakeEngine) -> None:
    engine = make_engine()
    landed = Landed(engine, 1, 40, first_page=7)
    engine.pool.array[8, 2, 1, 15, 1, 15] += 1e-3
    link = run(engine, [landed.verify()], [Stop(1)])
    verified, stopped = link.sent
    assert isinstance(verified, Verified) and not verified.ok
    assert verified.detail.startswith("page 8 (page 1 of 3 of the prompt, 16 rows): digest ")
    assert stopped == Stopped(1, kv_ok=None)


def test_wrong_kv_is_never_started(make_engine: MakeEngine) -> None:
    engine = make_engine()
    landed = Landed(engine, 1, 40)
    engine.pool.array[0, 0, 0, 0] = 0
    with pytest.raises(InvariantError, match="started on wrong KV: page 0"):
        run(engine, [landed.verify(), landed.start(5)])


def test_rows_beyond_the_prompt_are_not_verified(make_engine: MakeEngine) -> None:
    engine = make_engine()
    landed = Landed(engine, 1, 40)
    engine.pool.array[2, :, :, 8:] = np.nan
    link = run(engine, [landed.verify()], [Stop(1)])
    assert link.sent[0] == Verified(1, TRANSFER, ok=True, detail="")


def test_missing_digests_are_no_match(make_engine: MakeEngine) -> None:
    engine = make_engine()
    landed = Landed(engine, 1, 40)
    verify = replace(landed.verify(), digests=landed.digests[:2])
    link = run(engine, [verify], [Stop(1)])
    assert link.sent[0] == Verified(
        1, TRANSFER, ok=False, detail="2 digests for 40 rows of 16 a page"
    )


@pytest.mark.parametrize("damage", [False, True])
def test_the_prompts_kv_is_checked_again_at_the_end(make_engine: MakeEngine, damage: bool) -> None:
    """A late write into one of two streams shows at that stream's end and nowhere else."""
    engine = make_engine(recheck_at_end=True)
    first, second = Landed(engine, 1, 40), Landed(engine, 2, 40, first_page=10)
    link = FakeLink()
    inbox: list[list[ToEngine]] = [
        [first.verify(), first.start(4), second.verify(), second.start(4)],
        [],
        [],
    ]

    class LateWriter(FakeLink):
        def poll(self) -> list[ToEngine]:
            if damage and len(self.inbox) == 1:
                engine.pool.array[1, 0, 0, 3] = 0
            return super().poll()

    link = LateWriter()
    link.inbox = inbox
    run_decode(engine, link)
    stopped = [message for message in link.sent if isinstance(message, Stopped)]
    assert stopped == [Stopped(1, kv_ok=not damage), Stopped(2, kv_ok=True)]


def test_stop_ends_streams_at_any_time(make_engine: MakeEngine) -> None:
    engine = make_engine(recheck_at_end=True)
    first, second = Landed(engine, 1, 40), Landed(engine, 2, 40, first_page=10)
    link = run(
        engine,
        [first.verify(), Stop(2), second.verify(), second.start(9)],
        [Stop(1), Stop(1)],
        [Stop(2)],
    )
    assert seqs_of(link, Stopped) == [1, 2]
    assert rows_by_seq(link) == {2: second.rows[1:3]}


def test_a_failed_stream_takes_nobody_along(make_engine: MakeEngine) -> None:
    engine = make_engine(recheck_at_end=True)
    first, second = Landed(engine, 1, 40), Landed(engine, 2, 40, first_page=10)
    start = first.start(9)
    engine.pool.array[0] = np.nan
    link = run(engine, [start, second.verify(), second.start(4)])
    assert seqs_of(link, SeqFailed) == [1]
    assert link.sent.index(Stopped(1, kv_ok=None)) > link.sent.index(
        SeqFailed(1, "the model gave no finite numbers")
    )
    assert rows_by_seq(link) == {2: second.rows[1:4]}
    assert link.sent[-1] == Stopped(2, kv_ok=True)


BAD_STARTS = [
    ({"rows": b"\0" * 88}, "2 rows, decode starts from one"),
    ({"rows": b"\0" * 43}, "43 bytes are not rows"),
    ({"max_rows": 0}, "max_rows 0"),
    ({"start_row": 0}, "start_row 0"),
    ({"max_rows": 4060}, "the longest sequence is 4096"),
    ({"pages": (0, 1)}, "2 pages of 16 rows for 44 rows"),
    ({"pages": (0, 1, -1)}, "page -1 is not in a pool of 256"),
    ({"sampling": replace(PLAIN, temperature=-1.0)}, "sampling.temperature is -1.0"),
]


@pytest.mark.parametrize(("change", "message"), BAD_STARTS)
def test_a_bad_start_ends_its_own_stream_only(
    make_engine: MakeEngine, change: dict[str, object], message: str
) -> None:
    engine = make_engine()
    landed = Landed(engine, 1, 40)
    good = landed.start(5)
    bad: Start = replace(good, seq=2, **change)  # type: ignore[arg-type]
    link = run(engine, [good, bad])
    failed, stopped = link.sent[:2]
    assert isinstance(failed, SeqFailed) and failed.seq == 2 and message in failed.detail
    assert stopped == Stopped(2, kv_ok=None)
    assert rows_by_seq(link) == {1: landed.rows[1:5]}


def test_verify_of_strange_pages_fails_its_own_stream_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    verify = Verify(1, TRANSFER, (256,), 3, (bytes(16),))
    link = run(engine, [verify])
    assert link.sent == [
        SeqFailed(1, "pages: page 256 is not in a pool of 256"),
        Stopped(1, kv_ok=None),
    ]


def test_slots_are_bounded_and_used_again(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    streams = [Landed(engine, seq, 20, first_page=10 * seq) for seq in range(1, 4)]
    link = run(engine, [streams[0].start(2), streams[1].start(4)], [streams[2].start(4)])
    assert rows_by_seq(link) == {
        1: streams[0].rows[1:2],
        2: streams[1].rows[1:4],
        3: streams[2].rows[1:4],
    }
    with pytest.raises(InvariantError, match="more than 2 streams"):
        run(engine, [stream.start(4) for stream in streams])


def test_misuse_is_our_fault(make_engine: MakeEngine) -> None:
    engine = make_engine()
    landed = Landed(engine, 1, 20)
    for messages in ([landed.verify()] * 2, [landed.start(4)] * 2):
        with pytest.raises(InvariantError, match="twice"):
            run(engine, list(messages))


def test_shutdown_leaves_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    landed = Landed(engine, 1, 20)
    link = run(engine, [landed.start(4)], [Shutdown(), Stop(1)])
    assert [type(message) for message in link.sent] == [StepDone]
