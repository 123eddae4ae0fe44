"""What the GPU engine makes of the GPU: `python -m bench.decode_step`, on one GPU.

Random weights of S2-Pro's shape in bfloat16. Every case stands beside what this GPU was measured
to do in the same run: its read bandwidth (a sum over 8 GiB) and its matrix rate (8192 cubed).
`--parts` names some cases only; none begins after `--seconds`.
The floor of a decode step is what it must read, once, at that bandwidth: the backbone and head,
the codebook transformer in each of its passes (two positions share the first one), and the KV.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.decode_peer import transformers_step_ms
from bench.engine_start import start_to_ready_s, write_checkpoint
from bench.results import MEASUREMENTS, Report
from duplet_core.engine import Start
from duplet_core.errors import require
from duplet_core.messages import Sampling
from duplet_engine.gpu_attend_step import choose_splits, launch_attend_step
from duplet_engine.gpu_engine import Flight, GpuEngine
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.kv_store import DTYPES
from duplet_engine.model_config import ModelConfig, TransformerConfig
from duplet_engine.sequences import open_prefill
from duplet_engine.shapes import SHAPES, random_weights
from duplet_memory.layout import describe_pool
from duplet_pages.engine_config import Dtype, EngineConfig

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
MANY = 64
"""Streams of the cases that have one size."""
DEVICE = torch.device("cuda", 0)
DTYPE: Dtype = "bfloat16"
READ_ITEMS = 1 << 31
MATRIX_SIDE = 8192
ACTIVITIES = (ProfilerActivity.CUDA,)
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
    data = torch.randn(READ_ITEMS, device=DEVICE)
    return float(data.nbytes / time_ms(data.sum, 5))


def matrix_flop_per_ms() -> float:
    """Of a large bfloat16 product of random values."""
    a = torch.randn(MATRIX_SIDE, MATRIX_SIDE, device=DEVICE, dtype=DTYPES[DTYPE])
    return 2 * MATRIX_SIDE**3 / time_ms(lambda: a @ a, 10)


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
        dtype=DTYPE,
        pages=streams * pages,
        arrangement="page-major",
    )
    memory = torch.zeros(pool.total_bytes, dtype=torch.uint8, device=DEVICE)
    kv = PagedKv.of_pool(memory, pool)
    kv.items.normal_()
    tables = torch.randperm(pool.pages, device=DEVICE).int().view(streams, pages)
    index = torch.arange(streams, dtype=torch.int32, device=DEVICE)
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


def backbone_alone(config: ModelConfig) -> ModelConfig:
    """A plain language model of the backbone's shape."""
    return replace(
        config,
        codebook_transformer=None,
        scaled_embeddings=False,
        codebooks=0,
        codebook_entries=0,
        codebook_sizes=(),
        semantic_first=0,
        semantic_last=0,
    )


def make_rows(config: ModelConfig) -> np.ndarray:
    """int32 [PROMPT_ROWS, columns], semantic, or tokens of a plain language model."""
    chance = np.random.default_rng(0)
    if not config.codebooks:
        return chance.integers(0, 1000, (PROMPT_ROWS, 1)).astype("<i4")
    sizes = np.minimum(config.codebook_sizes, 1024)
    codes = chance.integers(0, sizes, (PROMPT_ROWS, config.codebooks))
    rows = np.concatenate((config.semantic_first + codes[:, :1], codes), axis=1)
    return rows.astype("<i4")


class Bench:
    """An engine with random weights and prompts for it. Owns the engine until `close`."""

    def __init__(self, slots: int, model: ModelConfig) -> None:
        weights = random_weights(model, DEVICE, DTYPES[DTYPE])
        self._model = model
        config = EngineConfig(
            "monolith",
            device="cuda",
            model=model.name,
            dtype=DTYPE,
            pool_pages=slots * STREAM_PAGES,
            page_rows=PAGE_ROWS,
            slots=slots,
            chunk_rows=-(-PROMPT_ROWS // PAGE_ROWS) * PAGE_ROWS,
        )
        self.engine = GpuEngine(config, model, weights)
        self._rows = make_rows(model)

    def sampling(self, seed: int) -> Sampling:
        """The defaults of S2-Pro."""
        return Sampling(seed, temperature=0.8, top_p=0.8, top_k=30, repetition_window=10)

    def join(self, streams: int, context_rows: int) -> None:
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
        row = self.engine.prefill_chunk(open_prefill(self._model, start, PAGE_ROWS, c.pool_pages))
        assert row is not None
        return row

    def loop(self, streams: int, ahead: int) -> tuple[float, float, Tensor]:
        """Steps launched `ahead` of what is read: ms a step, share of that in which the GPU had
        a step's graph at work, and the rows int32 [steps, streams, columns]."""
        self.join(streams, CONTEXT_ROWS)
        for _ in range(2):
            self.engine.decode_step(self.batch)
        self.join(streams, CONTEXT_ROWS)
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


class Measuring:
    """The parts of a run and what they share. Owns the engine that some of them need."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.bandwidth = read_bytes_per_ms()
        self.rate = matrix_flop_per_ms()
        self.tell("read_bandwidth", self.bandwidth / 1e6, "GB/s")
        self.tell("matmul_rate", self.rate / 1e9, "TFLOP/s")
        self._bench: Bench | None = None

    def tell(self, case: str, value: float, unit: str, budget: str = "") -> None:
        """Note one number and say it at once: a run may be cut short."""
        self._report.add(case, value, unit, budget)
        print(f"{case} {value:.4g} {unit} {budget}", flush=True)

    @property
    def bench(self) -> Bench:
        """Built when it is first asked for."""
        if self._bench is None:
            self._bench = Bench(max(STREAMS), MODEL)
            print(self._bench.engine.statement, flush=True)
        return self._bench

    def close(self) -> None:
        """Give the engine's memory back, if there is one."""
        if self._bench is not None:
            self._bench.close()
            self._bench = None
            gc.collect()
            torch.cuda.empty_cache()

    def attention(self) -> None:
        """A step's attention alone."""
        fraction = attention_fraction(self.bandwidth, MANY)
        self.tell(f"decode_attention_{MANY}x2k_fraction_of_bandwidth", fraction, "ratio", ">= 0.85")

    def passes(self) -> None:
        """Prompts, cold and behind cached prefixes."""
        bench = self.bench
        prefill_ms = time_ms(bench.prefill, 8)
        share = prefill_flop(MODEL, PROMPT_ROWS) / prefill_ms / self.rate
        self.tell("prefill_1500_ms", prefill_ms, "ms")
        self.tell("prefill_1500_fraction_of_matmul_rate", share, "ratio", ">= 0.55")
        for name, cached in (("prefix_hit", HIT_ROWS), ("prefix_hit_but_12", LAST_ROWS)):
            hit_ms = time_ms(lambda cached=cached: bench.prefill(cached), 8)  # type: ignore[misc]
            self.tell(f"{name}_over_cold_ratio", hit_ms / prefill_ms, "ratio", "<= 0.35")

    def steps(self) -> None:
        """Decode steps of each size of batch."""
        bench = self.bench
        for streams, budget in STREAMS.items():
            bench.join(streams, CONTEXT_ROWS)
            step_ms = time_ms(lambda: bench.engine.launch_step(bench.batch), STEPS)
            ratio = step_ms * self.bandwidth / step_bytes(MODEL, streams)
            self.tell(f"decode_step_{streams}x2k_ms", step_ms, "ms")
            self.tell(f"decode_step_{streams}x2k_ratio_to_floor", ratio, "ratio", budget)

    def loops(self) -> None:
        """Both loops over MANY streams."""
        normal_ms, _, normal_rows = self.bench.loop(MANY, ahead=0)
        overlap_ms, busy, overlap_rows = self.bench.loop(MANY, ahead=1)
        require(torch.equal(normal_rows, overlap_rows), "overlap changes rows")
        self.tell("decode_gpu_busy_fraction", busy, "ratio", ">= 0.97")
        self.tell("overlap_over_normal_step_ratio", overlap_ms / normal_ms, "ratio")

    def profile(self) -> None:
        """Which kernels take the time, printed only."""
        bench = self.bench
        bench.join(MANY, CONTEXT_ROWS)
        for name, work in (
            (f"a step of {MANY} streams", lambda: bench.engine.decode_step(bench.batch)),
            ("a prompt behind a cached prefix", lambda: bench.prefill(HIT_ROWS)),
        ):
            print(f"{name}, us:", *kernels_of(work), sep="\n  ", flush=True)

    def start(self) -> None:
        """An engine process from its start to Ready: weights made on the GPU, read from files."""
        self.close()
        self.tell("start_to_ready_random_s", start_to_ready_s(MODEL.name), "s")
        with tempfile.TemporaryDirectory(prefix="duplet-checkpoint-") as folder:
            write_checkpoint(MODEL, Path(folder))
            torch.cuda.empty_cache()
            self.tell("start_to_ready_s", start_to_ready_s(folder), "s", "<= 30")

    def peer(self) -> None:
        """transformers at as many streams, beside our whole step, which draws codebooks as well,
        and beside our step of as much as transformers computes."""
        own_ms = self._step_ms()
        self.close()
        self._bench = Bench(MANY, backbone_alone(MODEL))
        alone_ms = self._step_ms()
        self.close()
        peer_ms = transformers_step_ms(MODEL, MANY, PEER_ROWS)
        self.tell(f"decode_step_{MANY}x1536_ms", own_ms, "ms")
        self.tell(f"backbone_step_{MANY}x1536_ms", alone_ms, "ms")
        self.tell(f"transformers_step_{MANY}x1536_ms", peer_ms, "ms")
        self.tell("decode_vs_transformers_ratio", peer_ms / own_ms, "ratio", ">= 8")
        self.tell("backbone_vs_transformers_ratio", peer_ms / alone_ms, "ratio")

    def _step_ms(self) -> float:
        bench = self.bench
        bench.join(MANY, PEER_ROWS)
        return time_ms(lambda: bench.engine.launch_step(bench.batch), STEPS)


PARTS: dict[str, Callable[[Measuring], None]] = {
    "passes": Measuring.passes,
    "steps": Measuring.steps,
    "attention": Measuring.attention,
    "loops": Measuring.loops,
    "profile": Measuring.profile,
    "peer": Measuring.peer,
    "start": Measuring.start,
}
"""In the order in which they are measured: what takes long comes last."""


def kernels_of(work: Callable[[], object], most: int = 12) -> list[str]:
    """Kernels of one run of `work` and their time, those that take most first."""
    work()
    with profile(activities=ACTIVITIES) as found:
        work()
        torch.cuda.synchronize()
    times: dict[str, tuple[float, int]] = {}
    for event in found.events():
        spent, count = times.get(event.name, (0.0, 0))
        times[event.name] = spent + event.device_time_total, count + 1
    order = sorted(times.items(), key=lambda item: -item[1][0])[:most]
    return [f"{spent:8.0f} {count:5} {name[:60]}" for name, (spent, count) in order]


def measure(report: Report, parts: Iterable[str], seconds: float) -> None:
    """Measure parts in their order while fewer than `seconds` have passed."""
    began = time.monotonic()
    measuring = Measuring(report)
    for name, part in PARTS.items():
        if name not in parts:
            continue
        passed_s = time.monotonic() - began
        if passed_s > seconds:
            print(f"no time left for {name}", flush=True)
            continue
        print(f"[{passed_s:5.1f} s] {name}", flush=True)
        part(measuring)
    measuring.close()


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """parts: of PARTS; seconds; out: a folder."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=300.0, help="no part begins later")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="folder of the results")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, save and print."""
    options = read_options()
    faulthandler.enable()
    # Something that never ends says where it is, and what was measured is kept.
    faulthandler.dump_traceback_later(options.seconds + 120, exit=False)
    torch.set_grad_enabled(False)
    properties = torch.cuda.get_device_properties(0)
    report = Report("decode_step", f"{properties.name}, torch {torch.__version__}")
    try:
        measure(report, options.parts, options.seconds)
    finally:
        report.save(options.out)
    print(report.table())


if __name__ == "__main__":
    main()
