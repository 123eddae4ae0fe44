"""The built-in voice on GPUs: its rows are the CPU's, the unit's are the monolith's, and what
listeners hear is the voice that they asked for."""

# ruff: noqa: RUF001 (phonemes look like letters)

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from duplet_client import AsyncClient, Finished, FinishReason, Rows, SamplingOptions
from duplet_core.engine import Start
from duplet_core.messages import Sampling
from duplet_engine.checkpoint import load_checkpoint
from duplet_engine.engine import Engine
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.sequences import open_prefill
from duplet_models import directory
from duplet_pages.engine_config import EngineConfig
from duplet_unit.gpus import model_settings
from duplet_voice.codec import load_codec
from duplet_voice.front_end import VoiceFrontEnd
from tests.e2e.live_unit import live_unit
from tests.e2e.streams import known_spec
from tests.e2e.test_voices_never_mix import Listened, misheard
from tests.equality.live_monolith import live_monolith

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(120),
]

STEPS = 16
PAGES_EACH = 24
PHONEMES = (
    "ði ˈOld mˈæn ɪn ðə ɡˈɑɹdən wʌz ˌɔlɹˈɛdi wˈATɪŋ fɔɹ ði ˈivnɪŋ nˈuz.",
    "nˈObˌɑdi ˌɔn ðə plˈætfˌɔɹm hæd nˈOTəst ðə smˈɔl bɹˈWn bˈɜɹd.",
    "ʃˌi tˈɜɹnd ðə lˈæst pˈAʤ ˈOvəɹ ænd bəɡˈæn tə ɹˈid ɪt əɡˈɛn.",
)
"""What the front end makes of three sentences; a machine with a GPU need not have the package that
does it."""
VOICES = ("amber", "cedar", "slate", "robin")
GREEDY = Sampling(seed=1, temperature=0.0, top_p=1.0, top_k=0, repetition_window=0)
CONFIG = EngineConfig(
    "monolith", "wren", pool_pages=len(PHONEMES) * PAGES_EACH + 64, slots=4, chunk_rows=64
)
SETTINGS = {
    "DUPLET_LB_QUEUE_WAIT_MS": "60000",
    "DUPLET_LB_QUEUE_LIMIT": "64",
    "DUPLET_PREFILL_POOL_PAGES": "2048",
    "DUPLET_DECODE_POOL_PAGES": "2048",
    "DUPLET_MONOLITH_POOL_PAGES": "2048",
    **model_settings("wren"),
}
LISTENERS = 16


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def on_gpu(config: EngineConfig) -> GpuEngine:
    model, weights = load_checkpoint("wren", "cuda", torch.float32, lambda *_: None)
    return GpuEngine(config, model, weights)


def greedy_rows(engine: Engine | GpuEngine, prompts: Sequence[np.ndarray]) -> np.ndarray:
    """int32 [prompts, 1 + STEPS, columns], all streams in one batch; goes on after a stop row."""
    batch: Any = engine.new_batch()
    c = engine.config
    found = []
    for seq, prompt in enumerate(prompts):
        pages = tuple(range(seq * PAGES_EACH, (seq + 1) * PAGES_EACH))
        start = Start(seq, pages, prompt.astype("<i4").tobytes(), 0, 0, GREEDY)
        sequence = open_prefill(engine.model_config, start, c.page_rows, c.pool_pages)
        while (first := engine.prefill_chunk(sequence)) is None:
            pass
        found.append([first.numpy()])
        row = first.numpy().astype("<i4").tobytes()
        batch.join(Start(seq, pages, row, len(prompt), STEPS + 1, GREEDY))
    for _ in range(STEPS):
        rows, broken = engine.decode_step(batch)
        assert not broken.any()
        for seq, row in enumerate(rows.numpy()):
            found[seq].append(row.copy())
    return np.array(found, np.int32)


def test_greedy_rows_are_the_cpus() -> None:
    """In float32 two scores within rounding may end one stream's equality."""
    cpu = Engine(CONFIG)
    front_end = VoiceFrontEnd(cpu.spec)
    prompts = [
        front_end.prompt(front_end.voices[voice].rows, phonemes)
        for voice, phonemes in zip(VOICES, PHONEMES, strict=False)
    ]
    expected = greedy_rows(cpu, prompts)
    cpu.close()
    gpu = on_gpu(CONFIG)
    found = greedy_rows(gpu, prompts)
    again = greedy_rows(gpu, prompts)
    gpu.close()
    assert np.array_equal(found, again)
    same = [np.array_equal(a, b) for a, b in zip(found, expected, strict=True)]
    assert sum(same) >= len(PHONEMES) - 1, same


async def hear_one(client: AsyncClient, front_end: VoiceFrontEnd, number: int) -> Listened:
    """To one sentence in one voice, as sampled by default."""
    voice, phonemes = VOICES[number % len(VOICES)], PHONEMES[number % len(PHONEMES)]
    generation = client.generate(
        front_end.prompt(front_end.voices[voice].rows, phonemes),
        voice=voice,
        sampling=SamplingOptions(seed=number),
        max_rows=front_end.max_rows(phonemes),
    )
    rows: list[np.ndarray] = []
    finished: Finished | None = None
    async with generation:
        async for event in generation:
            if isinstance(event, Rows):
                rows.append(event.rows)
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None and finished.reason is FinishReason.STOP
    return Listened(voice, False, np.concatenate(rows), finished.usage.cached_rows)


async def hear(client: AsyncClient) -> list[Listened]:
    """Every voice once, alone."""
    front_end = VoiceFrontEnd(await known_spec(client))
    return [await hear_one(client, front_end, number) for number in range(len(VOICES))]


async def test_listeners_hear_the_voice_of_their_request() -> None:
    """The monolith in bfloat16: alone the same rows twice, and no voice is another's in company."""
    async with live_monolith(SETTINGS, ("0",)) as listen, AsyncClient(listen) as client:
        spec = await known_spec(client)
        front_end = VoiceFrontEnd(spec)
        first, second = await hear(client), await hear(client)
        again = await hear(client)
        heard = await asyncio.gather(
            *(hear_one(client, front_end, number) for number in range(LISTENERS))
        )
    assert all(one.cached_rows for one in (*second, *again))
    for one, other in zip(second, again, strict=True):
        assert np.array_equal(one.rows, other.rows)
    everything = [*first, *second, *heard]
    assert misheard(everything, spec, load_codec(directory("wren")), front_end.voices) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")
async def test_a_pair_speaks_as_the_monolith_does() -> None:
    """Alone both make the same passes and steps: bit for bit."""
    async with live_unit(SETTINGS, gpus=("0", "1")) as unit, AsyncClient(unit.listen) as client:
        pair = await hear(client)
        await unit.wait_idle()
        told = await unit.wait_pages_free()
        assert told.kv_checks >= len(pair) and told.kv_mismatches == 0
    async with live_monolith(SETTINGS, ("0",)) as listen, AsyncClient(listen) as client:
        monolith = await hear(client)
    for one, other in zip(pair, monolith, strict=True):
        assert np.array_equal(one.rows, other.rows)
