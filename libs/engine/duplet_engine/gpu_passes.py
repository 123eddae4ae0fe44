"""Forward passes over prompts' rows on a GPU, and the rows drawn after prompts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duplet_core.chunks import ChunkPart
from duplet_core.errors import require
from duplet_engine.gpu_attend_chunk import ChunkTiles, launch_attend_chunk
from duplet_engine.gpu_batch import fill_slot
from duplet_engine.gpu_digests import DigestFlight, PageDigests
from duplet_engine.gpu_graphs import capture_draws
from duplet_engine.gpu_heads import Places
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_model import GpuModel
from duplet_engine.gpu_pass_graphs import MOST_ROWS, PassGraphs, Span, place_spans
from duplet_engine.gpu_prefill_loop import MOST_PARTS, PartDone, PassDone
from duplet_engine.gpu_state import StreamState
from duplet_engine.sequences import PrefillSequence

Named = tuple[PrefillSequence, ChunkPart]

_WARM_ROWS = (MOST_ROWS + 1, MOST_ROWS + 16)
"""Sizes of pass without a graph that kernels tell apart: by whether 16 divides them."""


@dataclass(frozen=True, slots=True)
class PassFlight:
    """A pass that was launched. Owns the pinned memory that its results are copied to."""

    parts: tuple[Named, ...]
    sums: Tensor
    """float32 [rows], of each row's hidden state, valid once `drawn_mark` is passed: no number
    where one in the row is none."""
    drawn: Tensor
    """int32 [prompts that end, columns + 1], in the order of the pass; valid like `finite`."""
    digests: DigestFlight | None
    """Of all parts' completed pages together; None where none is wanted."""
    computed_mark: torch.cuda.Event
    drawn_mark: torch.cuda.Event


class PromptPasses:
    """What passes need beside model and KV: graphs of small passes, graphs of first draws and
    their state. Owns all of it.

    Everything is queued on the current CUDA stream of the thread that calls, but digests.
    """

    def __init__(self, model: GpuModel, page_rows: int, most_rows: int, processors: int) -> None:
        """Capture the draws on the model's device, which is the current one; the passes are
        captured by `prepare`, once there is a pool.

        Args:
            model: the model.
            page_rows: of the pool's pages.
            most_rows: of a pass.
            processors: multiprocessors of the GPU.
        """
        self._model = model
        self._page_rows = page_rows
        self._table_pages = -(-model.config.longest_sequence // page_rows)
        self._first = StreamState.empty(MOST_PARTS, 1, model.config.columns, model.device)
        self._draws = capture_draws(model, self._first)
        self._most_rows = most_rows
        self._processors = processors
        self._graphs: PassGraphs | None = None

    def prepare(self, kv: PagedKv) -> None:
        """Capture small passes over a pool, and queue large ones over its page 0, where all rows
        land over and over, for what is built at first use and to see how much memory it takes."""
        if self._graphs is not None:
            self._graphs.close()
        shape = (MOST_PARTS, self._table_pages)
        self._graphs = PassGraphs(self._model, kv, *shape, self._most_rows, self._processors)
        tables = torch.zeros(shape, dtype=torch.int32)
        longest = self._model.config.longest_sequence
        for size in (*_WARM_ROWS, self._most_rows):
            count = min(size, self._most_rows, MOST_PARTS * longest)
            lengths = [min(longest, count - begin) for begin in range(0, count, longest)]
            spans = [(table, 0, length) for table, length in enumerate(lengths)]
            rows = torch.zeros((count, self._model.config.columns), dtype=torch.int32)
            self._forward(rows, tables, spans, kv)

    def launch(
        self, parts: Sequence[Named], kv: PagedKv, digests: PageDigests | None
    ) -> PassFlight:
        """Queue a pass; never waits for the GPU. At most MOST_PARTS parts.

        `digests`: takes those of the pages that the parts complete; None where nobody asks.
        """
        require(0 < len(parts) <= MOST_PARTS, f"a pass of {len(parts)} parts")
        rows = torch.cat([s.rows[part.first : part.first + part.count] for s, part in parts])
        tables = torch.zeros((MOST_PARTS, self._table_pages), dtype=torch.int32)
        for index, (sequence, _) in enumerate(parts):
            pages = sequence.start.pages[: self._table_pages]
            tables[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        spans = [(index, part.first, part.count) for index, (_, part) in enumerate(parts)]
        hidden = self._forward(rows.int(), tables, spans, kv)
        computed_mark = _mark()
        sums = _to_host(hidden.sum(-1, dtype=torch.float32))
        drawn = self._draw(parts, hidden)
        drawn_mark = _mark()
        flight = None
        if digests is not None:
            flight = self._launch_digests(parts, digests, computed_mark)
        return PassFlight(tuple(parts), sums, drawn, flight, computed_mark, drawn_mark)

    def read(self, flight: PassFlight, digests: PageDigests | None) -> PassDone:
        """Wait for a pass and its digests. `digests`: as at its launch."""
        flight.drawn_mark.synchronize()
        drawn_ns = time.monotonic_ns()
        draw_ms = flight.computed_mark.elapsed_time(flight.drawn_mark)
        found: tuple[bytes, ...] = ()
        if digests is not None and flight.digests is not None:
            found = digests.read(flight.digests)
        rows = iter(flight.drawn)
        done = []
        row_count = page_count = 0
        for _, part in flight.parts:
            sums = flight.sums[row_count : row_count + part.count]
            finite = bool(torch.isfinite(sums).all())
            row_count += part.count
            pages = 0 if digests is None else len(self._valid_rows(part))
            own, page_count = found[page_count : page_count + pages], page_count + pages
            row = next(rows) if part.last else None
            if row is not None:
                finite = finite and not row[-1]
            done.append(PartDone(own, None if row is None else row[:-1], finite))
        return PassDone(tuple(done), drawn_ns - round(draw_ms * 1e6), drawn_ns)

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._draws.close()
        if self._graphs is not None:
            self._graphs.close()

    def _forward(self, rows: Tensor, tables: Tensor, spans: Sequence[Span], kv: PagedKv) -> Tensor:
        """Queue the backbone over `rows` int32 [m, columns] of the spans, all on the host; hidden
        states [m, width], overwritten by the next pass. `kv`: what was prepared for."""
        if self._graphs is not None and self._graphs.holds(rows.shape[0]):
            return self._graphs.replay(rows, tables, spans)
        backbone, device = self._model.config.backbone, self._model.device
        index, positions = place_spans(spans)
        places = Places(
            _to_device(tables, device),
            _to_device(index, device),
            _to_device(positions, device),
        )
        tiles = ChunkTiles.of(spans, backbone.heads, backbone.kv_heads, device)

        def attend(layer: int, query: Tensor) -> Tensor:
            return launch_attend_chunk(query, kv, layer, places.tables, tiles, backbone.heads)

        return self._model.forward(_to_device(rows, device), kv, places, attend)

    def _draw(self, parts: Sequence[Named], hidden: Tensor) -> Tensor:
        """Queue drawing the rows after the prompts that end; int32 [those, columns + 1] on the
        host, once it is there."""
        ends: list[int] = []
        row_count = 0
        for sequence, part in parts:
            row_count += part.count
            if not part.last:
                continue
            position = sequence.prompt_rows - 1
            last_row = sequence.rows[position]
            slot = len(ends)
            config = self._model.config
            fill_slot(self._first, slot, config, sequence.start, last_row, position, drawn=False)
            ends.append(row_count - 1)
        if not ends:
            return torch.empty((0, self._model.config.columns + 1), dtype=torch.int32)
        places = _to_device(torch.tensor(ends), hidden.device)
        return _to_host(self._draws.replay(hidden.index_select(0, places)))

    def _launch_digests(
        self, parts: Iterable[Named], digests: PageDigests, after: torch.cuda.Event
    ) -> DigestFlight | None:
        pages: list[int] = []
        valid_rows: list[int] = []
        for sequence, part in parts:
            valid = self._valid_rows(part)
            first_page = part.first // self._page_rows
            pages += sequence.start.pages[first_page : first_page + len(valid)]
            valid_rows += valid
        return digests.launch(pages, valid_rows, after) if pages else None

    def _valid_rows(self, part: ChunkPart) -> list[int]:
        """Rows that count of each page that the part completes, or ends the prompt in."""
        size = self._page_rows
        end = part.first + part.count
        first = part.first // size * size
        if not part.last:
            end = end // size * size
        return [min(size, end - row) for row in range(first, end, size)]


def _mark() -> torch.cuda.Event:
    """An event at the end of what is queued."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    return values.pin_memory().to(device, non_blocking=True)


def _to_host(values: Tensor) -> Tensor:
    copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copied.copy_(values, non_blocking=True)
    return copied
