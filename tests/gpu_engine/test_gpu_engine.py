"""The GPU engine against the CPU engine and against itself, on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from duplet_core.errors import InvalidInput
from duplet_engine.engine import Engine
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.gpu_linear import linear
from duplet_engine.sequences import open_prefill
from duplet_engine.shapes import SHAPES, random_weights
from duplet_engine.tiny import TINY, tiny_weights
from duplet_pages.engine_config import Arrangement, EngineConfig
from tests.engine.company import Request, make_requests, run_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

STEPS = 30
LENGTHS = [20, 33, 47, 300, 129]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def tiny_on_gpu(arrangement: Arrangement) -> GpuEngine:
    weights = {name: tensor.cuda() for name, tensor in tiny_weights().items()}
    config = EngineConfig(
        "monolith", "tiny", pool_pages=320, slots=6, chunk_rows=64, arrangement=arrangement
    )
    return GpuEngine(config, TINY, weights)


def page_lists(requests: list[Request]) -> list[list[int]]:
    """Pages of 16 rows in random order."""
    order = np.random.default_rng(1).permutation(320).tolist()
    lists = []
    for request in requests:
        count = -(-(request.rows + STEPS + 1) // 16)
        lists.append(order[:count])
        order = order[count:]
    return lists


def gpu_rows(
    engine: GpuEngine, requests: list[Request], pages: list[list[int]], ahead: int
) -> list[list[list[int]]]:
    """`1 + STEPS` rows of each request, all in one batch."""
    rows: list[list[list[int]]] = []
    batch = engine.new_batch()
    c = engine.config
    for seq, request in enumerate(requests):
        start = request.prefill(seq, pages[seq])
        sequence = open_prefill(engine.model_config, start, c.page_rows, c.pool_pages)
        while (first := engine.prefill_chunk(sequence)) is None:
            pass
        rows.append([first.tolist()])
        batch.join(request.decode(seq, pages[seq], first, STEPS + 1))
    flights = []
    for step in range(STEPS + ahead):
        if step < STEPS:
            flights.append(engine.launch_step(batch))
        if step >= ahead:
            drawn, broken = engine.read_step(flights.pop(0))
            assert not broken.any()
            for seq, row in enumerate(drawn.tolist()):
                rows[seq].append(row)
    return rows


def digests_of(engine: GpuEngine, pages: list[int]) -> tuple[bytes, ...]:
    return engine.read_digests(engine.launch_digests(pages, [16] * len(pages)))


@pytest.mark.parametrize("arrangement", ["page-major", "layer-major"])
def test_rows_are_the_cpu_engines(arrangement: Arrangement) -> None:
    """In float32 only draws with two scores within rounding may differ: at most one in this
    many, and then the rest of its stream."""
    requests = make_requests(np.random.default_rng(11), LENGTHS)
    pages = page_lists(requests)
    cpu = Engine(EngineConfig("monolith", model="tiny", pool_pages=320))
    expected = [run_alone(cpu, r, p, STEPS)[1] for r, p in zip(requests, pages, strict=True)]
    cpu.close()
    engine = tiny_on_gpu(arrangement)
    normal = gpu_rows(engine, requests, pages, ahead=0)
    overlap = gpu_rows(engine, requests, pages, ahead=1)
    engine.close()
    assert normal == overlap
    same = sum(a == b for a, b in zip(normal, expected, strict=True))
    assert same >= len(requests) - 1


@pytest.mark.parametrize("m", [1, 5, 16, 17])
@pytest.mark.parametrize(("n", "k"), [(6144, 2560), (2560, 9728), (1000, 2560)])
def test_products_of_few_rows(m: int, n: int, k: int) -> None:
    x, weight = (torch.randn(size, device="cuda").bfloat16() for size in ((m, k), (n, k)))
    torch.cuda.synchronize()  # a product reads weights before the kernel before it has ended
    out = linear(x, weight).double().sum(0)
    expected = x.double() @ weight.double().T
    assert (out - expected).norm() / expected.norm() < 5e-3


def test_other_pages_stay_as_they_are() -> None:
    engine = tiny_on_gpu("page-major")
    requests = make_requests(np.random.default_rng(12), LENGTHS)
    pages = page_lists(requests)
    strangers = sorted(set(range(320)) - {page for one in pages for page in one})
    before, used = digests_of(engine, strangers), digests_of(engine, pages[0])
    gpu_rows(engine, requests, pages, ahead=1)
    assert digests_of(engine, strangers) == before
    assert digests_of(engine, pages[0]) != used
    engine.close()


def test_a_pool_that_does_not_fit_is_refused() -> None:
    weights = {name: tensor.cuda() for name, tensor in tiny_weights().items()}
    config = EngineConfig("decode", model="tiny", pool_pages=1 << 40, slots=2)
    with pytest.raises(InvalidInput, match=r"pool_pages: .* pages fit"):
        GpuEngine(config, TINY, weights)


def test_bfloat16_steps_do_not_depend_on_the_loop() -> None:
    """A model of S2-Pro's widths and fewer layers, drawn in both loops."""
    shape = SHAPES["s2-pro"]
    small = shape.codebook_transformer
    assert small is not None
    config = replace(
        shape,
        backbone=replace(shape.backbone, layers=2),
        codebook_transformer=replace(small, layers=1),
        longest_sequence=512,
    )
    weights = random_weights(config, torch.device("cuda", 0), torch.bfloat16)
    settings = EngineConfig("monolith", model="tiny", dtype="bfloat16", pool_pages=128, slots=40)
    engine = GpuEngine(settings, config, weights)
    chance = np.random.default_rng(2)
    requests = []
    for request in make_requests(chance, [60, 61, 62]):
        prompt = np.zeros((request.rows, config.columns), dtype="<i4")
        codes = chance.integers(0, 1024, (request.rows, config.codebooks))
        prompt[:, 0], prompt[:, 1:] = config.semantic_first + codes[:, 0], codes
        requests.append(Request(prompt, request.sampling))
    pages = [list(range(seq * 8, seq * 8 + 8)) for seq in range(3)]
    normal = gpu_rows(engine, requests, pages, ahead=0)
    assert normal == gpu_rows(engine, requests, pages, ahead=1)
    assert len({tuple(row) for rows in normal for row in rows}) > 60
    engine.close()
