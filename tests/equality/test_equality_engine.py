"""The engine alone: the same request gives the same rows in any company, chunking and layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from duplet_core.engine import (
    ChunkDone,
    FromEngine,
    SeqFailed,
    Start,
    StepDone,
    Stop,
    Stopped,
    ToEngine,
    Verify,
)
from duplet_core.errors import InvariantError
from duplet_core.ids import TransferId
from duplet_core.messages import Sampling
from duplet_engine.decode_loop import DecodeLoop
from duplet_engine.engine import Engine
from duplet_engine.monolith_loop import MonolithLoop
from duplet_engine.prefill_loop import PrefillLoop
from duplet_pages.engine_config import Arrangement, EngineConfig

PAGE_ROWS = 16
COLUMNS = 11
REQUESTS = 12
MAX_ROWS = 14


class ScriptedLink:
    """The I/O process's place: what it was told, and what it says next."""

    def __init__(self) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.told: list[FromEngine] = []

    def poll(self) -> list[ToEngine]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def wait(self) -> list[ToEngine]:
        assert self.inbox, "the engine would wait for ever"
        return self.poll()

    def send(self, message: FromEngine, fds: Sequence[int] = ()) -> None:
        assert not fds
        self.told.append(message)


@dataclass
class Request:
    """One prompt, and the rows that came of it."""

    number: int
    prompt: bytes
    sampling: Sampling
    pages: tuple[int, ...] = ()
    rows: list[bytes] = field(default_factory=list)
    stopped: bool = False


def make_requests() -> list[Request]:
    """Prompts of 3 to 300 rows; every way of drawing."""
    random = np.random.Generator(np.random.PCG64(7))
    made = []
    for number in range(REQUESTS):
        count = int(random.integers(3, 300))
        prompt = np.zeros((count, COLUMNS), dtype="<i4")
        prompt[:, 0] = random.integers(0, 256, count)
        temperature = (0.0, 0.7, 1.0)[number % 3]
        sampling = Sampling(number, temperature, 0.9, 30, (0, 16)[number // 3 % 2])
        made.append(Request(number, prompt.tobytes(), sampling))
    return made


class Bench:
    """A monolith's engine whose sequences the test starts. Owns the engine until `close`."""

    def __init__(self, chunk_rows: int, arrangement: Arrangement) -> None:
        self.link = ScriptedLink()
        self.engine = Engine(
            EngineConfig(
                role="monolith",
                model="tiny",
                pool_pages=320,
                page_rows=PAGE_ROWS,
                slots=REQUESTS,
                chunk_rows=chunk_rows,
                arrangement=arrangement,
            )
        )
        self.loop = MonolithLoop(
            self.link, PrefillLoop(self.engine, self.link), DecodeLoop(self.engine, self.link)
        )
        self._seq = 0
        self._free = list(range(319, -1, -1))

    def start(self, request: Request, first_row: bytes | None = None) -> int:
        """Its prompt, or with its first row its stream; returns the seq."""
        self._seq += 1
        rows = len(request.prompt) // (4 * COLUMNS)
        if first_row is None:
            count = -(-(rows + MAX_ROWS) // PAGE_ROWS)
            request.pages = tuple(self._free.pop() for _ in range(count))
            start = Start(self._seq, request.pages, request.prompt, 0, 0, request.sampling)
        else:
            sampling = request.sampling
            start = Start(self._seq, request.pages, first_row, rows, MAX_ROWS, sampling)
        self.link.inbox.append(start)
        return self._seq

    def run(self, requests: list[Request]) -> None:
        """Start all at once and step until each has ended."""
        open_seqs = {self.start(request): request for request in requests}
        while open_seqs:
            assert self.loop.receive()
            self.loop.step()
            for message in self.link.told:
                self._take(message, open_seqs)
            self.link.told.clear()

    def _take(self, message: FromEngine, open_seqs: dict[int, Request]) -> None:
        assert not isinstance(message, SeqFailed), message
        if isinstance(message, ChunkDone) and message.first_row is not None:
            request = open_seqs.pop(message.seq)
            request.stopped = message.stopped
            if not message.stopped:
                request.rows.append(message.first_row)
                open_seqs[self.start(request, message.first_row)] = request
        elif isinstance(message, StepDone):
            for index, seq in enumerate(message.seqs):
                row = message.rows[index * 4 * COLUMNS : (index + 1) * 4 * COLUMNS]
                open_seqs[seq].rows.append(row)
            for seq, stop in message.ends:
                open_seqs[seq].stopped = stop
        elif isinstance(message, Stopped):
            request = open_seqs.pop(message.seq)
            self._free.extend(request.pages)

    def close(self) -> None:
        del self.loop
        self.engine.close()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone() -> list[Request]:
    """Each request by itself, its prompt in one chunk."""
    bench = Bench(512, "page-major")
    requests = make_requests()
    for request in requests:
        bench.run([request])
    bench.close()
    return requests


@pytest.mark.parametrize(
    ("chunk_rows", "arrangement"), [(16, "page-major"), (96, "layer-major"), (37, "layer-major")]
)
def test_rows_are_the_same_in_company(
    alone: list[Request], chunk_rows: int, arrangement: Arrangement
) -> None:
    bench = Bench(chunk_rows, arrangement)
    requests = make_requests()
    bench.run(requests)
    bench.close()
    assert any(len(request.rows) == MAX_ROWS for request in alone)
    assert len({b"".join(request.rows) for request in alone}) == REQUESTS
    for request, reference in zip(requests, alone, strict=True):
        assert request.stopped == reference.stopped
        assert request.rows == reference.rows, f"request {request.number}"


def test_a_stop_ends_a_prompt_or_a_stream_once() -> None:
    bench = Bench(16, "page-major")
    prompt, stream, *_ = make_requests()
    stream_prompt = bench.start(stream)
    while not (bench.link.told and isinstance(bench.link.told[-1], ChunkDone)) or (
        bench.link.told[-1].first_row is None
    ):
        assert bench.loop.receive()
        bench.loop.step()
    done = bench.link.told[-1]
    assert isinstance(done, ChunkDone)
    assert done.seq == stream_prompt
    assert done.first_row is not None
    seqs = [bench.start(prompt), bench.start(stream, done.first_row)]
    assert bench.loop.receive()
    bench.link.told.clear()
    bench.link.inbox.extend(Stop(seq) for seq in (*seqs, stream_prompt))
    assert bench.loop.receive()
    assert bench.link.told == [Stopped(seq, None) for seq in seqs]
    bench.close()


def test_nothing_lands_in_a_monolith() -> None:
    bench = Bench(16, "page-major")
    bench.link.inbox.append(Verify(1, TransferId("0" * 32), (0,), 1, (b"",)))
    with pytest.raises(InvariantError):
        bench.loop.receive()
    bench.close()
