"""Traces of each format, cut and made up."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duplet_load.prompts import PromptMaker
from duplet_load.synth import Synth, make_trace
from duplet_load.trace import (
    Arrival,
    Shape,
    TraceError,
    cut_trace,
    read_trace,
    write_trace,
)
from duplet_pages.prompt import check_prompt
from duplet_pages.spec import ModelSpec

SHAPE = Shape()
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,1180,8
2023-11-16 18:17:09.4799610,110,500
"""


def spec(codebooks: int = 3) -> ModelSpec:
    return ModelSpec(
        name="m",
        fingerprint="f",
        codebooks=codebooks,
        vocab=2_000,
        codebook_sizes=(100, 50, 50)[:codebooks],
        semantic_first=1_000 if codebooks else 0,
        semantic_last=1_099 if codebooks else 0,
        stop_id=7,
        page_rows=16,
        longest_sequence=4_096,
        default_max_rows=512,
        layers=2,
        kv_heads=2,
        head_dim=32,
        dtype="float32",
        kv_hash="xxh3-128",
        rows_per_second=21.0,
    )


def mooncake(*lines: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, line, strict=True))) for line in lines)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure_says_when_and_how_long(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, AZURE), SHAPE)
    assert [round(a.at_s, 4) for a in found] == [0.0, 0.052, 5.5]
    assert [a.prompt_rows for a in found] == [2_000, 1_180, 1_000]
    assert [a.output_rows for a in found] == [60, 48, 630]
    assert len({a.parts[0][0] for a in found}) == 3, "no two prompts share anything"


def test_mooncake_shares_blocks_and_spreads_ticks(tmp_path: Path) -> None:
    text = mooncake(
        (3_000, 6_758, 500, [0, 1, 2, 3, 4]),
        (3_000, 1_300, 5, [0, 1, 9]),
        (6_000, 600, 5, [7, 8]),
    )
    one, two, three = read_trace(written(tmp_path, text), SHAPE)
    assert (one.at_s, two.at_s, three.at_s) == (0.0, 1.5, 3.0)
    assert one.parts == (("block-0", 512), ("block-1", 512), ("block-2", 512), ("block-3", 464))
    assert two.parts == (("block-0", 512), ("block-1", 512), ("block-9", 276))
    assert three.parts == (("block-7", 512), ("block-8", 88), ("mooncake-2", 400))
    assert [a.output_rows for a in (one, two, three)] == [630, 30, 30]


def test_our_own_format_comes_back_as_it_was(tmp_path: Path) -> None:
    made = make_trace(Synth(requests=50))
    path = tmp_path / "own.jsonl"
    write_trace(made, path)
    assert read_trace(path, SHAPE) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "{}",
        '{"parts": [], "at_s": 0, "output_rows": 5}',
        '{"parts": [["a", 5]], "at_s": -1, "output_rows": 5}',
        AZURE + "yesterday,1,1\n",
        mooncake((0, 5, 5, [1])).replace("input_length", "length"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="trace: "):
        read_trace(written(tmp_path, text), SHAPE)


def test_a_slice_begins_at_zero_and_may_go_faster() -> None:
    arrivals = [Arrival(float(s), (("a", 1),), 1) for s in range(10)]
    assert [a.at_s for a in cut_trace(arrivals, 4.0, 3.0, 2.0)] == [0.0, 0.5, 1.0]


def test_made_up_traces_are_what_was_asked_for() -> None:
    asked = Synth(requests=20_000, rate=40.0, burstiness=2.0, voices=50, cold=0.25, seed=3)
    made = make_trace(asked)
    assert make_trace(asked) == made
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(made)]
    assert statistics.mean(gaps) == pytest.approx(1 / 40.0, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(2.0, rel=0.05)
    cold = [a for a in made if a.parts[0][0].startswith("cold-")]
    assert len(cold) / len(made) == pytest.approx(0.25, abs=0.02)
    assert all(1_000 - 2 <= a.prompt_rows <= 2_000 for a in made)
    assert all(63 <= a.output_rows <= 420 for a in made)
    voices = Counter(a.parts[0][0] for a in made)
    assert voices["voice-0"] / voices["voice-9"] == pytest.approx(10**1.1, rel=0.2)
    assert len({a.parts[0] for a in made if a.parts[0][0] == "voice-3"}) == 1


def test_without_burstiness_arrivals_are_even() -> None:
    made = make_trace(Synth(requests=4, rate=2.0, burstiness=0.0))
    assert [a.at_s for a in made] == [0.0, 0.5, 1.0, 1.5]


def test_traces_of_different_labels_share_popular_voices_alone() -> None:
    asked = Synth(requests=300, voices=5, cold=0.3, seed=3)
    parts = [
        {part for a in make_trace(synth) for part in a.parts}
        for synth in (replace(asked, label="a"), replace(asked, label="b", requests=500))
    ]
    shared = parts[0] & parts[1]
    assert {name for name, _ in shared} == {f"voice-{n}" for n in range(5)}, "and of one length"


def test_a_day_of_requests_takes_seconds() -> None:
    began = time.process_time()
    assert len(make_trace(Synth(requests=78_000))) == 78_000
    assert time.process_time() - began < 60, "seconds, on any machine"


@pytest.mark.parametrize("codebooks", [0, 3])
def test_prompts_are_valid_and_follow_from_names(codebooks: int) -> None:
    model = spec(codebooks)
    arrival = Arrival(0.0, (("voice", 40), ("sentence", 7)), 5)
    prompt = PromptMaker(model).prompt(arrival)
    assert prompt.shape == (47, model.columns)
    assert check_prompt(prompt.astype("<i4").tobytes(), model.columns, model) == 47
    assert not (prompt[:, 0] == model.stop_id).any()
    again = PromptMaker(model).prompt(Arrival(9.0, (("voice", 40), ("other", 7)), 5))
    np.testing.assert_array_equal(again[:40], prompt[:40])
    assert (again[40:] != prompt[40:]).any()
