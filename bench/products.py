"""Products with few rows against what must be read: `python -m bench.products`, on one GPU.

S2-Pro's products are checked against float32, and then timed over 36 layers' own weights in a
CUDA graph, so that no cache serves them, each with the kernel that reads it, beside cuBLAS and
the time in which this GPU reads the weights. Last a whole block at a short context, which is
what the codebook transformer repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.decode_step import MODEL, read_bytes_per_ms, time_ms
from bench.results import Report
from duplet_core.errors import require
from duplet_engine.gpu_attend_step import launch_attend_step
from duplet_engine.gpu_heads import HeadWeights, Places, launch_place_heads
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import linear, logits_of
from duplet_engine.gpu_norm import launch_add_norm
from duplet_engine.gpu_swiglu import gated_linear, launch_swiglu

BACKBONE = MODEL.backbone
LAYERS = BACKBONE.layers
WIDTH = BACKBONE.width
PAGE_ROWS = 16
ROWS = (1, 32, 64, 128)
MOST_ERROR = 6e-3
"""Of a bfloat16 product, as a share of its norm."""

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [n, k] and how it is multiplied."""

    name: str
    n: int
    k: int
    streamed: Product
    """As the engine does it."""
    library: Product
    """With cuBLAS, the result as the engine's readers take it."""


def products() -> tuple[Shape, ...]:
    """S2-Pro's."""

    def one_part(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight.t())[None]

    def library_gated(x: Tensor, weight: Tensor) -> Tensor:
        return launch_swiglu(torch.mm(x, weight.t()))

    def library_logits(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    heads = BACKBONE.heads * BACKBONE.head_dim
    qkv = heads + 2 * BACKBONE.kv_heads * BACKBONE.head_dim
    return (
        Shape("qkv", qkv, WIDTH, linear, one_part),
        Shape("wo", WIDTH, heads, linear, one_part),
        Shape("w13", 2 * BACKBONE.mlp, WIDTH, gated_linear, library_gated),
        Shape("w2", WIDTH, BACKBONE.mlp, linear, one_part),
        Shape("head", len(MODEL.drawable_ids), WIDTH, logits_of, library_logits),
    )


class Chain:
    """The kernels between products, with all that they need for `m` rows."""

    def __init__(self, m: int) -> None:
        chance = torch.Generator("cuda").manual_seed(m)
        self.first = torch.randn(m, WIDTH, device="cuda", generator=chance)
        self.stream = self.first.clone()
        self._norm = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
        c = BACKBONE
        self.kv = PagedKv.scratch(LAYERS, m, PAGE_ROWS, c.kv_heads, c.head_dim, self._norm)
        own = torch.arange(m, dtype=torch.int32, device="cuda")
        self._places = Places(own[:, None].contiguous(), own, torch.full_like(own, 9))
        angles = torch.rand(PAGE_ROWS, c.head_dim // 2, device="cuda", generator=chance)
        self._heads = HeadWeights(None, None, None, angles.cos(), angles.sin(), 1e-6)

    def norm(self, delta: Tensor | None) -> Tensor:
        """Queue the sum of the stream and a product's parts, and its norm."""
        return launch_add_norm(self.stream, delta, self._norm, 1e-6)

    def place(self, qkv: Tensor, layer: int) -> Tensor:
        """Queue what turns heads and places keys and values."""
        heads = BACKBONE.heads
        return launch_place_heads(qkv, self._heads, self.kv, layer, self._places, heads)

    def attend(self, query: Tensor, layer: int) -> Tensor:
        """Queue attention over one page."""
        p = self._places
        seen = (p.tables, p.table_index, p.positions)
        return launch_attend_step(query, self.kv, layer, *seen, BACKBONE.heads, 1, PAGE_ROWS)

    def read(self, shape: Shape, product: Tensor, layer: int) -> None:
        """Queue what follows a product, or, of w13, what is before the next one."""
        if shape.name == "qkv":
            self.place(product, layer)
        elif shape.name == "w13":
            self.norm(None)
        elif shape.name != "head":
            self.norm(product)

    def reset(self) -> None:
        """Back to the first state."""
        self.stream.copy_(self.first)
        self.kv.items.zero_()


def check(shape: Shape, m: int) -> None:
    """Compare with float32."""
    x = torch.randn(m, shape.k, device="cuda").bfloat16()
    weight = (torch.randn(shape.n, shape.k, device="cuda") * 0.05).bfloat16()
    right = x.float() @ weight.float().t()
    found = shape.streamed(x, weight).float()
    if shape.name == "w13":
        gate, up = right.chunk(2, dim=1)
        right = torch.nn.functional.silu(gate) * up
    else:
        found = found.sum(0)
    error = float((found - right).norm() / right.norm())
    require(error < MOST_ERROR, f"{shape.name} of {m} rows is off by {error}")


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run it once, for what is built at first use, and then capture it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def product_us(shape: Shape, weights: list[Tensor], m: int, product: Product) -> float:
    """Of one product and the kernel that reads it."""
    chain = Chain(m)
    x = torch.randn(m, shape.k, device="cuda").bfloat16()

    def work() -> None:
        for layer, weight in enumerate(weights):
            chain.read(shape, product(x, weight), layer)

    return time_ms(capture(work).replay, 9) * 1000 / LAYERS


def run_block(
    chain: Chain, weights: dict[str, list[Tensor]], product: dict[str, Product]
) -> Callable[[], None]:
    """A block, layer after layer."""

    def work() -> None:
        delta = None
        for layer in range(LAYERS):
            at = {name: layers[layer] for name, layers in weights.items()}
            hidden = chain.norm(delta)
            query = chain.place(product["qkv"](hidden, at["qkv"]), layer)
            delta = product["wo"](chain.attend(query, layer), at["wo"])
            both = product["w13"](chain.norm(delta), at["w13"])
            delta = product["w2"](both, at["w2"])

    return work


def block_us(weights: dict[str, list[Tensor]], m: int, product: dict[str, Product]) -> float:
    """Of one layer. A captured graph and plain launches must leave the same stream."""
    chain = Chain(m)
    work = run_block(chain, weights, product)
    work()
    right = chain.stream.clone()
    graph = capture(work)
    taken = time_ms(graph.replay, 9) * 1000 / LAYERS
    chain.reset()
    graph.replay()
    require(torch.equal(chain.stream, right), f"a graph of {m} rows gives another stream")
    return taken


def measure(report: Report) -> None:
    """All cases."""
    bandwidth = read_bytes_per_ms()
    torch.cuda.empty_cache()
    report.add("read_bandwidth", bandwidth / 1e6, "GB/s")
    weights: dict[str, list[Tensor]] = {}
    shapes = products()
    for shape in shapes:
        weights[shape.name] = [
            torch.randn(shape.n, shape.k, device="cuda", dtype=torch.bfloat16).mul_(0.02)
            for _ in range(LAYERS)
        ]
        floor_us = 2 * shape.n * shape.k / bandwidth * 1000
        for m in ROWS:
            check(shape, m)
            streamed = product_us(shape, weights[shape.name], m, shape.streamed)
            library = product_us(shape, weights[shape.name], m, shape.library)
            name = f"product_{shape.name}_{m}"
            report.add(f"{name}_us", streamed, "us")
            report.add(f"{name}_ratio_to_floor", streamed / floor_us, "ratio")
            report.add(f"{name}_ratio_to_cublas", streamed / library, "ratio")
    del weights["head"]
    floor_us = sum(2 * s.n * s.k for s in shapes if s.name != "head") / bandwidth * 1000
    for m in ROWS:
        streamed = block_us(weights, m, {s.name: s.streamed for s in shapes})
        library = block_us(weights, m, {s.name: s.library for s in shapes})
        report.add(f"block_{m}_us", streamed, "us")
        report.add(f"block_{m}_ratio_to_floor", streamed / floor_us, "ratio")
        report.add(f"block_{m}_ratio_to_cublas", streamed / library, "ratio")


def main() -> None:
    """Check, measure, save and print."""
    torch.set_grad_enabled(False)
    properties = torch.cuda.get_device_properties(0)
    report = Report("products", f"{properties.name}, torch {torch.__version__}")
    measure(report)
    report.save()
    print(report.table())


if __name__ == "__main__":
    main()
