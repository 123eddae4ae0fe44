"""Damage on purpose: it must be asked for, and then rows differ though every check passed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duplet_core.engine import Start, StepDone, Verified, Verify
from duplet_core.errors import InvalidInput
from duplet_core.ids import TransferId
from duplet_engine.backends import start_backend
from duplet_engine.decode_loop import run_decode
from duplet_engine.engine import Engine
from duplet_pages.engine_config import EngineConfig
from tests.engine.company import PLAIN, FakeLink, Request, random_prompt, run_alone
from tests.engine.conftest import MakeEngine

ROWS = 40
PROMPT_PAGES = 3
STEPS = 6
TRANSFER = TransferId("cd" * 16)


def landed(engine: Engine, seq: int, first_page: int) -> tuple[Verify, Start, list[list[int]]]:
    """Messages about a prompt that lies in the pool, and the rows that should come of it."""
    request = Request(random_prompt(np.random.default_rng(seq), ROWS), PLAIN)
    pages = tuple(range(first_page, first_page + PROMPT_PAGES))
    digests, rows = run_alone(engine, request, pages, STEPS)
    start = request.decode(seq, pages, torch.tensor(rows[0]), STEPS + 1)
    return Verify(seq, TRANSFER, pages, ROWS, digests), start, rows


def speak_both(engine: Engine) -> tuple[list[bool], list[bool]]:
    """Of two prompts: whether the check passed, and whether the rows are right."""
    requests = [landed(engine, 1, 0), landed(engine, 2, 8)]
    link = FakeLink()
    link.inbox = [[message for verify, start, _ in requests for message in (verify, start)]]
    run_decode(engine, link)
    rows: dict[int, bytes] = {1: b"", 2: b""}
    for step in (message for message in link.sent if isinstance(message, StepDone)):
        packed = np.frombuffer(step.rows, "<i4").reshape(len(step.seqs), -1)
        for seq, row in zip(step.seqs, packed, strict=True):
            rows[seq] += row.tobytes()
    checks = [message.ok for message in link.sent if isinstance(message, Verified)]
    wanted = (np.array(right[1:], "<i4").tobytes() for _, _, right in requests)
    return checks, [rows[seq] == right for seq, right in enumerate(wanted, start=1)]


def test_nothing_is_damaged_by_default(make_engine: MakeEngine) -> None:
    assert EngineConfig("decode", "tiny").damage_pages == 0
    assert speak_both(make_engine(role="decode")) == ([True, True], [True, True])


@pytest.mark.parametrize("arrangement", ["page-major", "layer-major"])
def test_a_struck_prompt_speaks_otherwise(make_engine: MakeEngine, arrangement: str) -> None:
    """The first has nobody before it."""
    engine = make_engine(role="decode", damage_pages=1, arrangement=arrangement)
    assert speak_both(engine) == ([True, True], [True, False])


def test_a_gpu_refuses() -> None:
    config = EngineConfig("decode", "tiny", device="cuda", damage_pages=1)
    with pytest.raises(InvalidInput, match="damage_pages: only a CPU's KV is damaged"):
        start_backend(config, lambda *_: None)
