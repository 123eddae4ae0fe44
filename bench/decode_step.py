"""What the GPU engine makes of the GPU: `python -m bench.decode_step`, on one GPU.

Random weights of S2-Pro's shape in bfloat16. Every case stands beside what this GPU was measured
to do in the same run: its read bandwidth (a sum over 8 GiB) and its matrix rate (8192 cubed).
The floor of a decode step is what it must read, once, at that bandwidth: the backbone and head,
the codebook transformer in each of its passes (two positions share the first one), and the KV.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.decode_peer import transformers_step_ms
from bench.engine_start import start_to_ready_s, write_checkpoint
from bench.results import Report
from duplet_core.engine import Start
from duplet_core.errors import require
from duplet_core.messages import Sampling
from duplet_engine.gpu_attend_step import choose_splits, launch_attend_step
from duplet_engine.gpu_engine import Flight, GpuEngine
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.model_config import ModelConfig, TransformerConfig
from duplet_engine.sequences import open_prefill
from duplet_engine.shapes import SHAPES, random_weights
from duplet_memory.layout import describe_pool
from duplet_pages.engine_config import EngineConfig

MODEL = SHAPES["s2-pro"]
ITEM_BYTES = 2
CONTEXT_ROWS = 2048
PROMPT_ROWS = 1500
HIT_ROWS = 1296
"""Of the prompt, cached: whole pages of 1,300."""
LAST_ROWS = 1488
"""All whole pages of the prompt: products of few rows are left."""
PEER_ROWS = 1536
PAGE_ROWS = 16
STREAMS = {1: "<= 1.6", 64: "<= 1.25", 128: "<= 1.25"}
"""Batches that are measured, and what each may take beside its floor."""
STEPS = 40
STREAM_PAGES = (CONTEXT_ROWS + 4 * STEPS) // PAGE_ROWS


def new_mark() -> torch.cuda.Event:
    """An event that knows when it was passed."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_ms(work: Callable[[], object], turns: int) -> float:
    """Median of `turns` runs, each between two events."""
    times = []
    for turn in range(turns + 2):
        start, end = new_mark(), new_mark()
        start.record()
        work()
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


def read_bytes_per_ms() -> float:
    """Read-only bandwidth."""
    data = torch.randn(1 << 31, device="cuda")
    return float(data.nbytes / time_ms(data.sum, 5))


def matrix_flop_per_ms() -> float:
    """Of a large bfloat16 product of random values."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / time_ms(lambda: a @ a, 10)


def block_items(config: TransformerConfig) -> int:
    """Weights of one block's products."""
    heads = config.heads * config.head_dim
    qkv = heads + 2 * config.kv_heads * config.head_dim
    return config.width * (qkv + heads + 3 * config.mlp)


def step_bytes(config: ModelConfig, streams: int) -> int:
    """What one step must read."""
    small, backbone = config.codebook_transformer, config.backbone
    assert small is not None
    passes = config.codebooks - 1
    items = backbone.layers * block_items(backbone) + len(config.drawable_ids) * backbone.width
    items += passes * small.layers * block_items(small)
    items += sum(config.codebook_sizes[1:]) * small.width
    kv_row = 2 * backbone.layers * backbone.kv_heads * backbone.head_dim
    return ITEM_BYTES * (items + streams * CONTEXT_ROWS * kv_row)


def prefill_flop(config: ModelConfig, rows: int) -> int:
    """Products of the backbone, and its causal attention."""
    c = config.backbone
    attention = 2 * c.layers * c.heads * c.head_dim * rows * rows
    return 2 * rows * c.layers * block_items(c) + attention


def attention_fraction(bandwidth: float, streams: int) -> float:
    """Attention of a decode step alone, layer after layer, against the read bandwidth."""
    c, layers = MODEL.backbone, 4
    pages = CONTEXT_ROWS // PAGE_ROWS
    pool = describe_pool(
        layers=layers,
        page_rows=PAGE_ROWS,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        dtype="bfloat16",
        pages=streams * pages,
        arrangement="page-major",
    )
    memory = torch.zeros(pool.total_bytes, dtype=torch.uint8, device="cuda")
    kv = PagedKv.of_pool(memory, pool)
    kv.items.normal_()
    tables = torch.randperm(pool.pages, device="cuda").int().view(streams, pages)
    index = torch.arange(streams, dtype=torch.int32, device="cuda")
    positions = torch.full_like(index, CONTEXT_ROWS - 1)
    query = kv.items.new_ones(streams, c.heads * c.head_dim).normal_()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits = choose_splits(streams, c.kv_heads, processors)

    def attend() -> None:
        for layer in range(layers):
            launch_attend_step(query, kv, layer, tables, index, positions, c.heads, splits)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    return pool.pages * pool.page_bytes / time_ms(graph.replay, 20) / bandwidth


class Bench:
    """An engine with random weights and prompts for it. Owns the engine until `close`."""

    def __init__(self, slots: int) -> None:
        weights = random_weights(MODEL, torch.device("cuda", 0), torch.bfloat16)
        config = EngineConfig(
            "monolith",
            device="cuda",
            model=MODEL.name,
            dtype="bfloat16",
            pool_pages=slots * STREAM_PAGES,
            page_rows=PAGE_ROWS,
            slots=slots,
            chunk_rows=-(-PROMPT_ROWS // PAGE_ROWS) * PAGE_ROWS,
        )
        self.engine = GpuEngine(config, MODEL, weights)
        chance = np.random.default_rng(0)
        codes = chance.integers(0, 1024, (PROMPT_ROWS, MODEL.codebooks))
        rows = np.concatenate((MODEL.semantic_first + codes[:, :1], codes), axis=1)
        self._rows = rows.astype("<i4")

    def sampling(self, seed: int) -> Sampling:
        """The defaults of S2-Pro."""
        return Sampling(seed, temperature=0.8, top_p=0.8, top_k=30, repetition_window=10)

    def join(self, streams: int, context_rows: int = CONTEXT_ROWS) -> None:
        """A batch of so many streams with so much context; the KV is what the pool holds."""
        self.batch = self.engine.new_batch()
        for seq in range(streams):
            pages = tuple(range(seq * STREAM_PAGES, (seq + 1) * STREAM_PAGES))
            row = self._rows[seq : seq + 1].tobytes()
            self.batch.join(Start(seq, pages, row, context_rows, 3 * STEPS, self.sampling(seq)))

    def prefill(self, cached_rows: int = 0) -> Tensor:
        """A prompt in one pass, the draw of its first row included."""
        pages = tuple(range(-(-PROMPT_ROWS // PAGE_ROWS)))
        start = Start(0, pages, self._rows.tobytes(), cached_rows, 0, self.sampling(1))
        c = self.engine.config
        row = self.engine.prefill_chunk(open_prefill(MODEL, start, PAGE_ROWS, c.pool_pages))
        assert row is not None
        return row

    def loop(self, streams: int, ahead: int) -> tuple[float, float, Tensor]:
        """Steps launched `ahead` of what is read: ms a step, share of that in which the GPU had
        a step's graph at work, and the rows int32 [steps, streams, columns]."""
        self.join(streams)
        for _ in range(2):
            self.engine.decode_step(self.batch)
        self.join(streams)
        flights: list[Flight] = []
        rows: list[Tensor] = []
        marks = [new_mark() for _ in range(2 * STEPS)]
        for step in range(STEPS):
            marks[2 * step].record()
            flights.append(self.engine.launch_step(self.batch))
            marks[2 * step + 1].record()
            if len(flights) > ahead:
                rows.append(self.engine.read_step(flights.pop(0))[0].clone())
        rows += [self.engine.read_step(flight)[0].clone() for flight in flights]
        torch.cuda.synchronize()
        spans = [marks[i].elapsed_time(marks[i + 1]) for i in range(2, 2 * STEPS, 2)]
        whole = marks[2].elapsed_time(marks[-1])
        # A step that is launched late starts late: its first mark is passed at once.
        return whole / (STEPS - 1), sum(spans) / whole, torch.stack(rows)

    def close(self) -> None:
        self.engine.close()


def measure(report: Report) -> None:
    """All cases."""
    own_ms = measure_engine(report)
    gc.collect()
    torch.cuda.empty_cache()
    measure_start(report)
    measure_peer(report, own_ms)


def measure_engine(report: Report) -> float:
    """One engine in this process; ms of its step beside `measure_peer`'s."""
    bandwidth, rate = read_bytes_per_ms(), matrix_flop_per_ms()
    report.add("read_bandwidth", bandwidth / 1e6, "GB/s")
    report.add("matmul_rate", rate / 1e9, "TFLOP/s")
    fraction = attention_fraction(bandwidth, 64)
    report.add("decode_attention_64x2k_fraction_of_bandwidth", fraction, "ratio", ">= 0.85")
    bench = Bench(max(STREAMS))
    print(bench.engine.statement, flush=True)
    for streams, budget in STREAMS.items():
        bench.join(streams)
        step_ms = time_ms(lambda: bench.engine.launch_step(bench.batch), STEPS)
        floor_ms = step_bytes(MODEL, streams) / bandwidth
        report.add(f"decode_step_{streams}x2k_ms", step_ms, "ms")
        report.add(f"decode_step_{streams}x2k_ratio_to_floor", step_ms / floor_ms, "ratio", budget)
    normal_ms, _, normal_rows = bench.loop(64, ahead=0)
    overlap_ms, busy, overlap_rows = bench.loop(64, ahead=1)
    require(torch.equal(normal_rows, overlap_rows), "overlap changes rows")
    report.add("decode_gpu_busy_fraction", busy, "ratio", ">= 0.97")
    report.add("overlap_over_normal_step_ratio", overlap_ms / normal_ms, "ratio")
    prefill_ms = time_ms(bench.prefill, 8)
    share = prefill_flop(MODEL, PROMPT_ROWS) / prefill_ms / rate
    report.add("prefill_1500_ms", prefill_ms, "ms")
    report.add("prefill_1500_fraction_of_matmul_rate", share, "ratio", ">= 0.55")
    hit_ms = time_ms(lambda: bench.prefill(HIT_ROWS), 8)
    report.add("prefix_hit_over_cold_ratio", hit_ms / prefill_ms, "ratio", "<= 0.35")
    last_ms = time_ms(lambda: bench.prefill(LAST_ROWS), 8)
    report.add("prefix_hit_but_12_over_cold_ratio", last_ms / prefill_ms, "ratio", "<= 0.35")
    bench.join(64, PEER_ROWS)
    own_ms = time_ms(lambda: bench.engine.launch_step(bench.batch), STEPS)
    bench.close()
    return own_ms


def measure_peer(report: Report, own_ms: float) -> None:
    """transformers at 64 streams; `own_ms`: our step there, which draws the codebooks as well."""
    peer_ms = transformers_step_ms(MODEL, 64, PEER_ROWS)
    report.add("decode_step_64x1536_ms", own_ms, "ms")
    report.add("transformers_step_64x1536_ms", peer_ms, "ms")
    report.add("decode_vs_transformers_ratio", peer_ms / own_ms, "ratio", ">= 8")


def measure_start(report: Report) -> None:
    """An engine process from its start to Ready: weights made on the GPU, and read from files."""
    report.add("start_to_ready_random_s", start_to_ready_s(MODEL.name), "s")
    with tempfile.TemporaryDirectory(prefix="duplet-checkpoint-") as folder:
        write_checkpoint(MODEL, Path(folder))
        torch.cuda.empty_cache()
        report.add("start_to_ready_s", start_to_ready_s(folder), "s", "<= 30")


def main() -> None:
    """Measure, save and print."""
    torch.set_grad_enabled(False)
    properties = torch.cuda.get_device_properties(0)
    report = Report("decode_step", f"{properties.name}, torch {torch.__version__}")
    try:
        measure(report)
    finally:
        report.save()
    print(report.table())


if __name__ == "__main__":
    main()
